"""A newcomer's path through the command line: add, serve, ps, load, pin, evict, verify, rm."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx

from server.demo.daemon import DaemonProcess

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


def test_without_a_daemon_the_cure_is_told() -> None:
    assert "gswapd serve" in gswapd("ps", "--url", "http://127.0.0.1:9", status=1)
