"""Tokenizers of images: what they encode, and that they cost the server neither torch nor the event loop."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server.tokens import ChatTemplateError, ModelTokenizer, Tokenizers
from swapper.errors import CorruptImage

CHAT = [{"role": "user", "content": "What is the capital of France? 👩‍🍳"}]


@pytest.fixture
def directory(smollm2: Path, tmp_path: Path) -> Path:
    for file in smollm2.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_it_encodes_as_the_library_does(smollm2: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(smollm2)
    ours = ModelTokenizer("m", smollm2)
    assert list(ours.encode("Once upon a time")) == theirs.encode("Once upon a time")
    expected = theirs.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert list(ours.encode_chat(CHAT)) == expected


def test_serving_imports_no_torch() -> None:
    code = "import sys, server.daemon; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_encoding_imports_no_torch(smollm2: Path) -> None:
    code = f"""if True:
        import sys; from pathlib import Path; from server.tokens import ModelTokenizer
        ModelTokenizer("m", Path({str(smollm2)!r})).encode_chat([{{"role": "user", "content": "x"}}])
        assert "torch" not in sys.modules"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    ("files", "stops"),
    [
        ({}, {2}),
        ({"generation_config.json": {"eos_token_id": [0, 7]}}, {0, 2, 7}),
        ({"generation_config.json": {}, "config.json": {"eos_token_id": 5}}, {2, 5}),
        ({"generation_config.json": {"eos_token_id": 9}, "config.json": {"eos_token_id": 5}}, {2, 9}),
    ],
)
def test_an_answer_ends_at_any_end_token(directory: Path, files: dict[str, object], stops: set[int]) -> None:
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content))
    assert ModelTokenizer("m", directory).stop_tokens == stops


def test_no_chat_template(directory: Path) -> None:
    with pytest.raises(ChatTemplateError, match="no chat template"):
        ModelTokenizer("m", directory).encode_chat(CHAT)


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_a_broken_file_is_named(directory: Path, file: str) -> None:
    (directory / file).write_text("{")
    with pytest.raises(CorruptImage, match="Add the model again"):
        ModelTokenizer("m", directory)


def test_a_tokenizer_is_read_once_however_many_ask(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(2)
        several = await asyncio.gather(*(tokenizers.get("m", smollm2, "print") for _ in range(8)))
        assert len(set(map(id, several))) == 1
        assert await tokenizers.get("m", smollm2, "another print") is not several[0]
        tokenizers.close()

    asyncio.run(scenario())


def test_a_failure_is_not_kept(directory: Path) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        whole = (directory / "tokenizer.json").read_bytes()
        (directory / "tokenizer.json").write_text("{")
        with pytest.raises(CorruptImage):
            await tokenizers.get("m", directory, "print")
        (directory / "tokenizer.json").write_bytes(whole)
        await tokenizers.get("m", directory, "print")
        tokenizers.close()

    asyncio.run(scenario())


def test_the_cache_is_bounded(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.tokens.CACHED_TOKENIZERS", 1)

    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        first = await tokenizers.get("a", smollm2, "print")
        await tokenizers.get("b", smollm2, "print")
        assert await tokenizers.get("a", smollm2, "print") is not first
        tokenizers.close()

    asyncio.run(scenario())


def test_work_is_done_off_the_event_loop() -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        assert (await tokenizers.run(threading.current_thread)) is not threading.current_thread()
        tokenizers.close()

    asyncio.run(scenario())
