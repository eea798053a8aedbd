"""What answers are compared with, and when that is left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from server.profile.accuracy import Reference, reference
from server.profile.document import ProfileError


def image(dtype: str, shards: int) -> Any:
    nbytes = (1 << 30) // shards
    return SimpleNamespace(manifest=SimpleNamespace(dtype=dtype, shards=[SimpleNamespace(nbytes=nbytes)] * shards))


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize(("dtype", "wanted"), [("bfloat16", 3), ("float32", 2)])
def test_weights_that_this_machine_has_no_memory_for_are_not_computed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], dtype: str, wanted: int, shards: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=(wanted << 30) - 1))
    assert reference(image(dtype, shards), None, ()) is None  # type: ignore[arg-type]
    assert f"{wanted} GiB" in capsys.readouterr().out


def test_agreement_is_the_share_of_tokens_that_are_alike() -> None:
    of_float32 = Reference(10.0, ("a", "b", "c", "d"))
    assert of_float32.agreement(["a", "x", "c", "d"]) == 0.75
    with pytest.raises(ProfileError, match="3 tokens were scored"):
        of_float32.agreement(["a", "b", "c"])
