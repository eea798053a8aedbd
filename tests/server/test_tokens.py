"""Tokenizers of images: what they encode, and that they cost the server neither torch nor the event loop."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from server import tokens
from server.tokens import (
    LONG_CONVERSATION,
    LONG_TEXT,
    LONG_TEXTS,
    Chat,
    ChatTemplateError,
    ModelTokenizer,
    PromptTooLong,
    Tokenizers,
)
from swapper.errors import CorruptImage, Refused

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
    assert list(ours.encode_chat(Chat(CHAT))) == expected


def test_serving_imports_no_torch() -> None:
    code = "import sys, server.daemon; assert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_encoding_imports_no_torch(smollm2: Path) -> None:
    code = f"""if True:
        import sys; from pathlib import Path; from server.tokens import Chat, ModelTokenizer
        ModelTokenizer("m", Path({str(smollm2)!r})).encode_chat(Chat([{{"role": "user", "content": "x"}}]))
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
        ModelTokenizer("m", directory).encode_chat(Chat(CHAT))


@pytest.mark.parametrize("template", ["{% for %}", "{{ 1 / 0 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"])
def test_whatever_a_template_raises_is_the_templates(directory: Path, template: str) -> None:
    tokenizer = ModelTokenizer("m", directory)
    tokenizer._tokenizer.chat_template = template
    with pytest.raises(ChatTemplateError, match="refuses these messages"):
        tokenizer.encode_chat(Chat(CHAT))


def test_a_tokenizer_that_could_not_be_read_once_is_read_again(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        monkeypatch.setattr(tokens, "_load", Mock(side_effect=MemoryError))
        with pytest.raises(MemoryError):
            await tokenizers.get("m", smollm2, (1, 1))
        monkeypatch.undo()
        await tokenizers.get("m", smollm2, (1, 1))
        tokenizers.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("file", ["tokenizer.json", "generation_config.json"])
def test_a_broken_file_is_named(directory: Path, file: str) -> None:
    (directory / file).write_text("{")
    with pytest.raises(CorruptImage, match="Add the model again"):
        ModelTokenizer("m", directory)


def test_a_tokenizer_is_read_once_however_many_ask(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(2)
        several = await asyncio.gather(*(tokenizers.get("m", smollm2, (1, 1)) for _ in range(8)))
        assert len(set(map(id, several))) == 1
        assert await tokenizers.get("m", smollm2, (2, 1)) is not several[0]
        tokenizers.close()

    asyncio.run(scenario())


def test_a_failure_is_not_kept(directory: Path) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        whole = (directory / "tokenizer.json").read_bytes()
        (directory / "tokenizer.json").write_text("{")
        with pytest.raises(CorruptImage):
            await tokenizers.get("m", directory, (1, 1))
        (directory / "tokenizer.json").write_bytes(whole)
        await tokenizers.get("m", directory, (1, 1))
        tokenizers.close()

    asyncio.run(scenario())


def test_the_cache_is_bounded(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.tokens.CACHED_TOKENIZERS", 1)

    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        first = await tokenizers.get("a", smollm2, (1, 1))
        await tokenizers.get("b", smollm2, (1, 1))
        assert await tokenizers.get("a", smollm2, (1, 1)) is not first
        tokenizers.close()

    asyncio.run(scenario())


def test_work_is_done_off_the_event_loop() -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        assert (await tokenizers.run(threading.current_thread)) is not threading.current_thread()
        tokenizers.close()

    asyncio.run(scenario())


class Recorded(ModelTokenizer):
    """Tells which thread encoded how many characters, and waits before it does so if that is wanted."""

    def __init__(self, path: Path) -> None:
        super().__init__("m", path)
        self.encoded: list[tuple[str, int]] = []
        self.held = threading.Event()
        self.held.set()
        self.begun = threading.Event()

    def encode(self, text: str, rendered: bool = False) -> tuple[int, ...]:
        self.encoded.append((threading.current_thread().name.rpartition("_")[0], len(text)))
        if len(text) > LONG_TEXT:
            self.begun.set()
            assert self.held.wait(20)
        return super().encode(text, rendered)


@pytest.fixture(scope="module")
def recorded_once(smollm2: Path) -> Recorded:
    return Recorded(smollm2)


@pytest.fixture
def recorded(recorded_once: Recorded) -> Recorded:
    recorded_once.encoded.clear()
    recorded_once.begun.clear()
    return recorded_once


LONG = "word " * (LONG_TEXT // 5 + 1)


def test_a_hopeless_text_is_refused_without_being_tokenized(recorded: Recorded) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        with pytest.raises(PromptTooLong):
            await tokenizers.encode(recorded, LONG * 100, limit=256)
        with pytest.raises(PromptTooLong):
            await tokenizers.encode_chat(recorded, Chat([{"role": "user", "content": LONG * 100}]), limit=256)
        tokenizers.close()

    asyncio.run(scenario())
    assert recorded.encoded == []


def test_a_conversation_is_as_long_as_all_that_the_template_writes(recorded: Recorded) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        call = {"function": {"name": LONG, "arguments": {}}}
        told = {"role": "assistant", "content": "", "tool_calls": [call]}
        template = "{{ messages[0].tool_calls[0].function.name }}"
        recorded._tokenizer.chat_template, before = template, recorded.chat_template
        try:
            assert len(await tokenizers.encode_chat(recorded, Chat([told]), limit=1 << 20)) > 1
        finally:
            recorded._tokenizer.chat_template = before
        tokenizers.close()

    asyncio.run(scenario())
    assert {thread for thread, characters in recorded.encoded if characters == len(LONG)} == {"tokenize long"}


def test_of_a_text_that_is_too_long_a_beginning_is_tokenized(recorded: Recorded) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        with pytest.raises(PromptTooLong) as refusal:
            await tokenizers.encode(recorded, LONG, limit=1000)
        assert refusal.value.least > 1000
        tokenizers.close()

    asyncio.run(scenario())
    ((thread, characters),) = recorded.encoded
    assert thread == "tokenize long"
    assert characters < LONG_TEXT


def test_a_long_text_that_fits_is_tokenized_whole(recorded: Recorded, smollm2: Path) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        assert await tokenizers.encode(recorded, LONG, limit=1 << 20) == recorded.encode(LONG)
        chat = [{"role": "user", "content": LONG}]
        assert await tokenizers.encode_chat(recorded, Chat(chat), limit=1 << 20) == recorded.encode_chat(Chat(chat))
        tokenizers.close()

    asyncio.run(scenario())


def test_short_texts_do_not_wait_for_long_ones_of_which_few_may_wait(recorded: Recorded) -> None:
    async def scenario() -> None:
        tokenizers = Tokenizers(1)
        recorded.held.clear()
        long = [asyncio.create_task(tokenizers.encode(recorded, LONG, 1 << 20)) for _ in range(LONG_TEXTS)]
        assert await asyncio.to_thread(recorded.begun.wait, 20)
        assert len(await tokenizers.encode(recorded, "Once", 1 << 20)) == 1
        for _ in range(LONG_TEXTS):  # the checks of the others are over: they went through the same thread
            await tokenizers.run(len, "")
        with pytest.raises(Refused, match="try again") as refusal:
            await tokenizers.encode(recorded, LONG, 1 << 20)
        assert refusal.value.reason == "queue_full"
        long.pop().cancel()
        await asyncio.sleep(0)
        crowd = [{"role": "user", "content": ""}] * (LONG_CONVERSATION + 1)
        long.append(asyncio.create_task(tokenizers.encode_chat(recorded, Chat(crowd), 1 << 20)))
        recorded.held.set()
        assert len(await asyncio.gather(*long)) == LONG_TEXTS
        tokenizers.close()

    try:
        asyncio.run(scenario())
    finally:
        recorded.held.set()
