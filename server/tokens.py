"""Text to tokens: the tokenizer and chat template of an image, off the event loop.

Tokenizers are read when a model is first asked for, kept in a small cache, and used in a thread pool of their own. They
are loaded through transformers' tokenizer base class rather than `AutoTokenizer`, which would import torch.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from server.detokenize import Detokenizer, Vocabulary
from swapper.errors import CorruptImage, GswapdError

CACHED_TOKENIZERS = 32

P = ParamSpec("P")
T = TypeVar("T")


class ChatTemplateError(GswapdError):
    """The model has no chat template, or its template refuses the conversation."""


class ModelTokenizer:
    """One model's tokenizer. Its methods take time: call them through `Tokenizers.run`."""

    def __init__(self, model: str, path: Path) -> None:
        """Raises CorruptImage if the image has no tokenizer that can be read."""
        self.model = model
        self._tokenizer = _load(path)
        self.vocabulary = Vocabulary(self._tokenizer.backend_tokenizer)
        self.vocabulary_size = self._tokenizer.backend_tokenizer.get_vocab_size()
        self.stop_tokens = _stop_tokens(path, self._tokenizer.eos_token_id)

    def detokenizer(self) -> Detokenizer:
        return self.vocabulary.detokenizer()

    def encode(self, text: str) -> tuple[int, ...]:
        """A plain prompt, with the begin-of-text token where the model wants one."""
        return tuple(self._tokenizer.encode(text))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """A conversation, up to where the assistant's answer begins. Raises ChatTemplateError."""
        if not self._tokenizer.chat_template:
            raise ChatTemplateError(f"Model {self.model!r} has no chat template; use /v1/completions with it.")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise ChatTemplateError(f"The chat template of {self.model!r} refuses these messages: {error}") from error
        # The template writes the special tokens itself.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


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
        self._loads: OrderedDict[tuple[str, Path, str], asyncio.Future[ModelTokenizer]] = OrderedDict()

    async def get(self, model: str, path: Path, fingerprint: str) -> ModelTokenizer:
        """The tokenizer of an image, read once however many ask at once. Raises CorruptImage."""
        key = (model, path, fingerprint)
        if key not in self._loads:
            self._loads[key] = asyncio.ensure_future(self.run(ModelTokenizer, model, path))
            if len(self._loads) > CACHED_TOKENIZERS:
                self._loads.popitem(last=False)
        self._loads.move_to_end(key)
        load = self._loads[key]
        try:
            return await asyncio.shield(load)  # one asker's going away is no reason to fail the others
        except GswapdError:
            if self._loads.get(key) is load:
                del self._loads[key]
            raise

    async def run(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function` in a tokenizer thread. Admission bounds how many calls can queue here."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
