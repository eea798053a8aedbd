"""GPUDirect Storage is claimed only where kvikio, cuFile and the kernel all take part in it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from swapper import gds

P2PDMA = '{\n  // a comment, as NVIDIA ships them\n  "properties": {"use_pci_p2pdma": true}\n}'


def kvikio(*, compatible: bool = False, available: bool = True) -> ModuleType:
    """What is asked of kvikio."""
    module = ModuleType("kvikio")
    module.defaults = SimpleNamespace(is_compat_mode_preferred=lambda: compatible)  # type: ignore[attr-defined]
    module.cufile_driver = SimpleNamespace(get=lambda name: available)  # type: ignore[attr-defined]
    return module


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host without any of it."""
    monkeypatch.setattr(gds, "NVIDIA_FS", tmp_path / "nvidia-fs")
    monkeypatch.setattr(gds, "CUFILE_CONFIG", tmp_path / "cufile.json")
    monkeypatch.setattr(gds, "KERNEL_SYMBOLS", tmp_path / "kallsyms")
    monkeypatch.delenv("CUFILE_ENV_PATH_JSON", raising=False)
    return tmp_path


def test_a_cufile_that_falls_back_by_itself_is_not_gds() -> None:
    assert not gds.has_gds(kvikio())


def test_the_kernel_module_is_enough(host: Path) -> None:
    (host / "nvidia-fs").touch()
    assert gds.has_gds(kvikio())
    assert not gds.has_gds(kvikio(compatible=True))
    assert not gds.has_gds(kvikio(available=False))


def test_peer_to_peer_must_be_asked_for_and_be_in_the_kernel(host: Path) -> None:
    (host / "cufile.json").write_text(P2PDMA)
    (host / "kallsyms").write_text("0 d something_else\n")
    assert not gds.has_gds(kvikio())
    (host / "kallsyms").write_text("0 d p2pdma_pgmap_ops\n")
    assert gds.has_gds(kvikio())
    (host / "cufile.json").write_text(P2PDMA.replace("true", "false"))
    assert not gds.has_gds(kvikio())


def test_a_configuration_that_does_not_parse_is_none(host: Path) -> None:
    (host / "cufile.json").write_text("{")
    assert not gds.has_gds(kvikio())
