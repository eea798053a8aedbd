"""Text to tokens: the tokenizer and chat template of an image, off the event loop.

Tokenizers are read when a model is first asked for, kept in a small cache, and used in threads of their own. They are
loaded through transformers' tokenizer base class rather than `AutoTokenizer`, which would import torch.

A megabyte takes a second to tokenize. So that nobody waits for other people's megabytes, a long text is refused, before
it is tokenized, if it cannot fit the model's context whatever its tokens are; else it goes through a thread that only
long texts use, in front of which only a few may wait.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any, ParamSpec, TypeVar

from transformers import PreTrainedTokenizerFast

from server.detokenize import Detokenizer, Vocabulary
from server.token_bound import TokenBound
from swapper.errors import CorruptImage, GswapdError, Refused

CACHED_TOKENIZERS = 32

LONG_TEXT = 64 << 10
"""Characters that make a text long: up to here, tokenizing takes a few hundredths of a second."""

LONG_CONVERSATION = 256  # messages: from here on, rendering the template takes long

LONG_TEXTS = 8
"""So many long texts are tokenized or wait for it; the next one is refused."""

RETRY_LONG = 5.0  # seconds
SAMPLE = 16  # characters for each token of the context: several times what a token usually has

P = ParamSpec("P")
T = TypeVar("T")


class ChatTemplateError(GswapdError):
    """The model has no chat template, or its template refuses the conversation."""


class UnknownToken(GswapdError):
    """A token is not in the vocabulary."""

    def __init__(self, token: int, vocabulary: int, param: str) -> None:
        super().__init__(f"Parameter '{param}' is invalid: {token} is not a token; there are {vocabulary}.")
        self.param = param


class PromptTooLong(GswapdError):
    """A text has more tokens than the context, which was found without tokenizing all of it."""

    def __init__(self, least: int) -> None:
        super().__init__(f"The prompt has at least {least} tokens.")
        self.least = least


@dataclass(frozen=True, slots=True)
class Chat:
    """What a chat template is given. `opening` is what the answer has already begun with."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] = ()
    opening: str = ""


class ModelTokenizer:
    """One model's tokenizer. Its methods take time: call them through `Tokenizers`."""

    def __init__(self, model: str, path: Path) -> None:
        """Raises CorruptImage if the image has no tokenizer that can be read."""
        self.model = model
        self._tokenizer = _load(path)
        self.vocabulary = Vocabulary(self._tokenizer.backend_tokenizer)
        self._bound = TokenBound(self._tokenizer.backend_tokenizer)
        self.vocabulary_size = self._tokenizer.backend_tokenizer.get_vocab_size()
        self.stop_tokens = _stop_tokens(path, self._tokenizer.eos_token_id)

    def detokenizer(self) -> Detokenizer:
        return self.vocabulary.detokenizer()

    def encode(self, text: str, rendered: bool = False) -> tuple[int, ...]:
        """A plain prompt, with the begin-of-text token where the model wants one, or a rendered conversation."""
        # The template writes the special tokens itself.
        return tuple(self._tokenizer.encode(text, add_special_tokens=not rendered))

    def encode_beginning(self, text: str, limit: int) -> tuple[int, ...]:
        """A text's first tokens, `limit` at most, special ones included. Takes a time that `limit` bounds."""
        tokens = self.encode(text[: SAMPLE * limit])
        if len(tokens) <= limit:
            return tokens
        # Not by the library's truncation, which is a state of a tokenizer that other threads use.
        frame = self.encode("")
        end = next(n for n in range(len(frame), -1, -1) if tokens[len(tokens) - n :] == frame[len(frame) - n :])
        return tokens[: limit - end] + tokens[len(tokens) - end :]

    def checked(self, tokens: Sequence[int], param: str) -> tuple[int, ...]:
        """Tokens that a client gave. Raises UnknownToken."""
        if max(tokens) >= self.vocabulary_size:
            raise UnknownToken(max(tokens), self.vocabulary_size, param)
        return tuple(tokens)

    def check_length(self, text: str, limit: int) -> None:
        """Raises PromptTooLong if `text` is sure to have more tokens than `limit`. Takes no longer than reading it."""
        least = self._bound.least_tokens(text)
        if least > limit:
            raise PromptTooLong(least)

    def check_sample(self, text: str, limit: int) -> None:
        """The same by tokenizing a beginning of `text`, which takes a time that `limit` bounds.

        A beginning has no more tokens than the whole, but for what the cut does to the last word. Twice the limit is
        wide of that.
        """
        if self._bound.known and len(text) > SAMPLE * limit:
            tokens = len(self.encode(text[: SAMPLE * limit], rendered=True))
            if tokens > 2 * limit:
                raise PromptTooLong(tokens // 2)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(token) for token in tokens]) + detokenizer.flush()

    @property
    def chat_template(self) -> str:
        """The one that is used with tools, if there are several. Raises ChatTemplateError."""
        template = self._tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use") or template.get("default")
        if not template:
            raise ChatTemplateError(f"Model {self.model!r} has no chat template; use /v1/completions with it.")
        return str(template)

    def encode_chat(self, chat: Chat, longest: int = sys.maxsize) -> tuple[int, ...] | str:
        """A conversation, up to where the assistant's answer begins; where it has more characters than `longest`, its
        text instead. Raises ChatTemplateError.
        """
        text = self.render(chat)
        return text if len(text) > longest else self.encode(text, rendered=True)

    def render(self, chat: Chat) -> str:
        """The conversation as the text that the model was trained on. Raises ChatTemplateError."""
        assert self.chat_template
        try:
            text = self._tokenizer.apply_chat_template(
                list(chat.messages), tools=list(chat.tools) or None, tokenize=False, add_generation_prompt=True
            )
            return f"{text}{chat.opening}"
        except Exception as error:
            raise ChatTemplateError(f"The chat template of {self.model!r} refuses these messages: {error}") from error


def _load(path: Path) -> PreTrainedTokenizerFast:
    loader = PreTrainedTokenizerFast
    if not (path / "tokenizer.json").exists():  # an older format, which a class of its own has to convert
        from transformers import AutoTokenizer

        loader = AutoTokenizer
    try:
        tokenizer = loader.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        raise CorruptImage(f"The tokenizer in {path} cannot be read ({error}). Add the model again.") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise CorruptImage(f"The tokenizer in {path} has no fast form. Add the model with a tokenizer.json.")
    tokenizer.model_max_length = sys.maxsize  # whether a text is too long is ours to say
    return tokenizer


def _stop_tokens(path: Path, eos: int | None) -> frozenset[int]:
    """End-of-text tokens: those of generation_config.json, else config.json, and the tokenizer's own."""
    own = frozenset() if eos is None else frozenset((eos,))
    for name in ("generation_config.json", "config.json"):
        try:
            value = json.loads((path / name).read_text()).get("eos_token_id")
        except FileNotFoundError:
            continue
        except (OSError, ValueError, AttributeError) as error:
            raise CorruptImage(f"{path / name} cannot be read ({error}). Add the model again.") from error
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value]) | own
    return own


class Tokenizers:
    """The tokenizers in use, and the threads they run in."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="tokenize long")
        self._long_places = BoundedSemaphore(LONG_TEXTS)
        self._loads: OrderedDict[tuple[str, Path, tuple[int, int]], asyncio.Future[ModelTokenizer]] = OrderedDict()

    async def get(self, model: str, path: Path, stamp: tuple[int, int]) -> ModelTokenizer:
        """The tokenizer of an image, read once however many ask at once. Raises CorruptImage.

        `stamp` tells an image from one that took its place: not even its weights need differ.
        """
        key = (model, path, stamp)
        if key not in self._loads:
            self._loads[key] = asyncio.ensure_future(self.run(ModelTokenizer, model, path))
            if len(self._loads) > CACHED_TOKENIZERS:
                self._loads.popitem(last=False)
        self._loads.move_to_end(key)
        load = self._loads[key]
        try:
            return await asyncio.shield(load)  # one asker's going away is no reason to fail the others
        except Exception:  # what was no fault of the image's may go better the next time
            if self._loads.get(key) is load:
                del self._loads[key]
            raise

    async def encode(self, tokenizer: ModelTokenizer, text: str, limit: int) -> tuple[int, ...]:
        """A prompt's tokens. Raises PromptTooLong, or Refused if too many long ones wait; a prompt that is not long may
        also come back with more than `limit` tokens.
        """
        if len(text) <= LONG_TEXT:
            return await self.run(tokenizer.encode, text)
        return await self._encode_long(tokenizer, text, limit, rendered=False)

    async def encode_chat(self, tokenizer: ModelTokenizer, chat: Chat, limit: int) -> tuple[int, ...]:
        """The same for a conversation; raises ChatTemplateError as well."""
        many = len(chat.messages) > LONG_CONVERSATION
        # How long it is shows when it is rendered: templates leave out what they like.
        rendered = await (self._run_long if many else self.run)(tokenizer.encode_chat, chat, LONG_TEXT)
        if isinstance(rendered, str):
            return await self._encode_long(tokenizer, rendered, limit, rendered=True)
        return rendered

    async def _encode_long(self, tokenizer: ModelTokenizer, text: str, limit: int, rendered: bool) -> tuple[int, ...]:
        await self.run(tokenizer.check_length, text, limit)

        def encode() -> tuple[int, ...]:
            tokenizer.check_sample(text, limit)
            return tokenizer.encode(text, rendered)

        return await self._run_long(encode)

    async def _run_long(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._long_places.acquire(blocking=False):
            message = f"{LONG_TEXTS} long prompts wait to be tokenized already; try again shortly."
            raise Refused("queue_full", message, RETRY_LONG)
        job = self._long.submit(function, *args, **kwargs)
        # Its end, not its asker's: what has begun goes on in its thread when the client has gone.
        job.add_done_callback(lambda _: self._long_places.release())
        return await asyncio.wrap_future(job)

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a `function` that is quick in a tokenizer thread. Admission bounds how many calls can queue here."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        for pool in (self._pool, self._long):
            pool.shutdown(wait=False, cancel_futures=True)
