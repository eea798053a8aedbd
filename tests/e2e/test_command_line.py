"""A newcomer's path through the command line: add, serve, ps, load, pin, evict, verify, rm."""

from __future__ import annotations

import io
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from server.cli.remote import models_table
from server.cli.store import add
from server.demo.daemon import DaemonProcess
from swapper.errors import StoreError
from swapper.image import Image

PROMPT = "The three primary colours are"


def gswapd(*arguments: object, status: int = 0) -> str:
    """Run the command; what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "server.cli", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_model_is_added_served_moved_and_removed(smollm2: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    gswapd("add", smollm2, "--name", "small", "--dtype", "float32", "--store", store)
    assert "Choose another name" in gswapd("add", smollm2, "--name", "small", "--store", store, status=1)
    assert "intact" in gswapd("verify", "small", "--store", store)

    config = {"store": str(store), "memory": {"pool": "1GiB", "page": "8MiB"}, "server": {"admin_key": "secret"}}
    with DaemonProcess(tmp_path, config) as daemon:
        at = ("--url", daemon.url, "--admin-key", "secret")
        assert "key" in gswapd("ps", "--url", daemon.url, status=1)
        assert "absent" in gswapd("ps", *at)
        assert "load was asked for" in gswapd("load", "small", "--no-wait", *at)
        assert "resident" in gswapd("load", "small", *at)
        assert "pinned" in gswapd("pin", "small", *at)
        assert "pinned" in gswapd("evict", "small", *at, status=1)
        assert "resident" in gswapd("unpin", "small", *at)

        answer = httpx.post(
            f"{daemon.url}/v1/completions",
            json={"model": "small", "prompt": PROMPT, "max_tokens": 16, "temperature": 0},
            timeout=60,
        )
        assert answer.json()["choices"][0]["text"] == greedy_text(smollm2, 16)

        assert "absent" in gswapd("evict", "small", *at)
        gswapd("add", smollm2, "--name", "team/late", "--store", store)  # while the daemon serves
        assert "resident" in gswapd("load", "team/late", *at)
        gswapd("rm", "small", "--store", store)
        assert "small" not in gswapd("ps", *at)
        gswapd("evict", "team/late", *at)
        gswapd("rm", "team/late", "--store", store)
        assert "gswapd add" in gswapd("ps", *at)
        assert "does not exist" in gswapd("load", "small", *at, status=1)
        assert daemon.stop() == 0
    assert "freed" in gswapd("gc", "--store", store)


def greedy_text(checkpoint: Path, tokens: int) -> str:
    """What the library answers in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    prompt = tokenizer(PROMPT, return_tensors="pt")
    ids = model.generate(**prompt, max_new_tokens=tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(ids, skip_special_tokens=True)


def test_a_wrong_configuration_names_the_field(tmp_path: Path) -> None:
    (tmp_path / "gswapd.yaml").write_text("server: {prot: 80}\n")
    assert "server.prot" in gswapd("serve", "--config", tmp_path / "gswapd.yaml", status=1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("ps", "--url", "http://127.0.0.1:9", "--admin-key", "é"), "no daemon answers"),
        (("ps", "--url", "http://127.0.0.1:9", "--admin-key", "a\nb"), "--admin-key has a character"),
        (("ps", "--url", "http://127.0.0.1:9/v1"), "has a path"),
        (("ps", "--url", "ftp://127.0.0.1"), "is no HTTP URL"),
        (("ps", "--url", "127.0.0.1:9"), "is no HTTP URL"),
        (("load", "é\udcff", "--url", "http://127.0.0.1:9"), "no daemon answers"),
    ],
)
def test_whatever_is_typed_the_answer_is_one_sentence(arguments: tuple[str, ...], told: str) -> None:
    (line,) = gswapd(*arguments, status=1).splitlines()
    assert told in line


@pytest.mark.parametrize("command", [("rm", "a"), ("gc",), ("verify", "a")])
def test_only_add_makes_a_store(tmp_path: Path, command: tuple[str, ...]) -> None:
    assert "There is no model store" in gswapd(*command, "--store", tmp_path / "none", status=1)
    assert "There is no model store" in gswapd(*command, "--store", tmp_path, status=1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("name", "told"), [("a//b", "cannot name a model"), ("taken", "Choose another name")])
def test_a_wrong_name_is_told_before_anything_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, told: str
) -> None:
    (tmp_path / "models" / "taken").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, "worker.add", None)  # importing it fails
    with pytest.raises(StoreError, match=told):
        add(tmp_path, name, store=tmp_path)


@pytest.mark.parametrize(("groups", "is_told"), [("[{tp: 2}]", False), ("[{tp: 4}, {pp: 2, name: b}]", True)])
def test_add_tells_when_no_group_has_the_shape(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    images: dict[str, Image],
    groups: str,
    is_told: bool,
) -> None:
    """Scenario 21."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gswapd.yaml").write_text(f"store: {tmp_path}\ncluster: {{groups: {groups}}}\n")
    monkeypatch.setattr("worker.add.add_model", lambda *args, **kwargs: images["smollm2"])
    add(tmp_path, "wide", tp=2)
    assert ("No group of this configuration has tp 2, pp 1: wide is not served" in capsys.readouterr().out) == is_told


def test_the_version() -> None:
    assert gswapd("--version").split() == ["gswapd", version("gswapd")]


def test_ps_fits_a_terminal_and_cuts_no_name() -> None:
    name = "organisation/" + "a-very-long-name" * 3
    sources = {"disk": {"pages": 299, "bytes": 1}, "peer": {"pages": 1, "bytes": 1}}
    model = {
        **{"name": name, "state": "resident", "reason": None, "pinned": True, "running": 64, "waiting": 256},
        **{"resident_pages": 300, "total_pages": 300, "total_bytes": 269e6},
        "last_load": {"seconds": 0.1234, "error": None, "pages": 300, "sources": sources},
        "places": [{"group": "default"}],
    }
    output = io.StringIO()
    Console(width=80, file=output).print(models_table([model]))
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert "".join(line[: lines[0].index("STATE")].strip() for line in lines[1:]) == name
    for shown in ("resident", "269.0 MB", "100%", "yes", "64", "256", "0.123 s", "disk 99%, peer 1%"):
        assert shown in lines[1]


def test_ps_tells_where_models_are_when_there_are_several_groups() -> None:
    model = {
        **{"name": "a", "state": "resident", "reason": None, "pinned": False, "running": 0, "waiting": 0},
        **{"resident_pages": 3, "total_pages": 3, "total_bytes": 269e6, "last_load": None},
    }
    places = [[{"group": "pair"}, {"group": "other"}], [{"group": "pair"}], []]
    output = io.StringIO()
    Console(width=80, file=output).print(models_table([{**model, "places": place} for place in places]))
    titles, *rows = output.getvalue().splitlines()
    assert [row[titles.index("ON") :].strip() for row in rows] == ["pair, other", "pair", ""]


def test_without_a_daemon_the_cure_is_told() -> None:
    assert "gswapd serve" in gswapd("ps", "--url", "http://127.0.0.1:9", status=1)
