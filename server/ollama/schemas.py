"""What Ollama's clients may say. Anything else is refused by name, as in `server/openai/schemas.py`.

Some options are about how Ollama would run a model; there is nothing here that they could change, so they are taken and
have no effect (`NO_EFFECT`). Whatever would change an answer and cannot be kept is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from server.keep_alive import KeepAlive
from server.openai.messages import Part, Tool, listed
from server.openai.schemas import MAX_INPUTS, MAX_LOGPROBS, MAX_MESSAGES, MAX_STOP_LENGTH, MAX_STOPS, MAX_TOOLS

NO_EFFECT = frozenset(
    ("numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only",
     "use_mmap", "use_mlock", "embedding_only", "num_thread", "num_keep")
)  # fmt: skip


def _without(
    values: object, neutral: Mapping[str, tuple[object, ...]], no_effect: frozenset[str] = frozenset()
) -> object:
    if not isinstance(values, dict):
        return values
    return {
        name: value
        for name, value in values.items()
        if value is not None and name not in no_effect and value not in neutral.get(name, ())
    }


class Options(Part):
    """None means: the model's default, as the configuration has it."""

    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    repeat_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-(1 << 63), lt=1 << 63)
    num_predict: int | None = Field(default=None, ge=-2)
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS, fail_fast=True),
        BeforeValidator(listed),
    ] = Field(default=[])

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        neutral = {"typical_p": (1,), "tfs_z": (1,), "mirostat": (0,), "repeat_last_n": (-1,)}
        return _without(values, neutral, NO_EFFECT)

    def as_openai(self) -> dict[str, Any]:
        """The same in the OpenAI API's words."""
        said = self.model_dump(exclude_none=True, exclude={"repeat_penalty", "num_predict", "top_p"})
        if self.top_p is not None:
            said["top_p"] = max(self.top_p, 1e-6)  # 0 is the likeliest token alone
        if self.repeat_penalty is not None:
            said["repetition_penalty"] = self.repeat_penalty
        if self.num_predict is not None and self.num_predict > 0:  # else as many as there is room for
            said["max_tokens"] = self.num_predict
        return said


class Asking(Part):
    """What requests for text have in common."""

    model: str = Field(max_length=256)
    stream: bool = True
    format: Literal["", "json"] | dict[str, Any] = ""
    options: Options = Options()
    keep_alive: KeepAlive | None = None
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {"think": (False,), "truncate": (True, False), "shift": (True, False)})

    def as_openai(self) -> dict[str, Any]:
        said = {"model": self.model, "stream": self.stream, "keep_alive": self.keep_alive, **self.options.as_openai()}
        if isinstance(self.format, dict):
            said["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": self.format}}
        elif self.format:
            said["response_format"] = {"type": "json_object"}
        return said


class CalledFunction(Part):
    name: str
    arguments: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {}, frozenset(("index",)))


class Call(Part):
    function: CalledFunction

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {}, frozenset(("id", "type")))


class Message(Part):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[Call] = Field(default=[], fail_fast=True)
    tool_name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {"images": ([],), "thinking": ("",), "tool_calls": ([],)})

    def as_openai(self) -> dict[str, Any]:
        said: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_name is not None:
            said["name"] = self.tool_name
        if self.tool_calls:
            said["tool_calls"] = [
                {"id": f"call_{index}", "type": "function", "function": call.function.model_dump()}
                for index, call in enumerate(self.tool_calls)
            ]
        return said


class ChatRequest(Asking):
    messages: list[Message] = Field(default=[], max_length=MAX_MESSAGES, fail_fast=True)
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)

    def as_openai(self) -> dict[str, Any]:
        said = super().as_openai() | {"messages": [message.as_openai() for message in self.messages]}
        if self.logprobs:
            said |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if self.tools:
            said["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return said


class GenerateRequest(Asking):
    prompt: str = ""
    system: str | None = None
    raw: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, values: object) -> object:
        return _without(
            values, {"suffix": ("",), "template": ("",), "images": ([],), "context": ([],), "system": ("",)}
        )

    def as_chat(self) -> dict[str, Any]:
        messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        said = self.as_openai() | {"messages": [*messages, {"role": "user", "content": self.prompt}]}
        return said | ({"logprobs": True, "top_logprobs": self.top_logprobs or 0} if self.logprobs else {})

    def as_completion(self) -> dict[str, Any]:
        said = self.as_openai() | {"prompt": self.prompt}
        return said | ({"logprobs": self.top_logprobs or 0} if self.logprobs else {})


class EmbedRequest(Part):
    model: str = Field(max_length=256)
    input: Annotated[
        list[str],
        Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True),
        BeforeValidator(listed),
    ]
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=1)
    keep_alive: KeepAlive | None = None
    options: Options = Options()

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {})


class OldEmbedRequest(Part):
    """Of `/api/embeddings`, which `/api/embed` has replaced."""

    model: str = Field(max_length=256)
    prompt: str
    keep_alive: KeepAlive | None = None
    options: Options = Options()

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _without(values, {})


class ShowRequest(Part):
    model: str = Field(max_length=256)
    verbose: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        if isinstance(values, dict) and "name" in values:  # what it was called before
            values = {"model": values["name"], **{k: v for k, v in values.items() if k != "name"}}
        return _without(values, {})
