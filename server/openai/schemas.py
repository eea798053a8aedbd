"""What requests may say. Anything else is refused by name, never ignored in silence.

A parameter of the OpenAI API that is not supported is still taken with the value that means "without it": null, or what
`NEUTRAL` lists. Answers are not modelled here: they are written as bytes, for speed (`server/openai/chat.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BeforeValidator, Field, Tag, ValidationError, model_validator

from server.errors import ApiError, invalid_request
from server.keep_alive import KeepAlive
from server.openai.messages import (
    LIST,
    OBJECT,
    TEXT,
    Message,
    NamedTool,
    Part,
    Prompt,
    ResponseFormat,
    StreamOptions,
    Tokens,
    Tool,
    choice_shape,
    drop_neutral,
    few_names,
    listed,
    one_of,
    shape_of,
)

NEUTRAL: dict[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("auto",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "suffix": ("",),
}
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_CHOICES = 64
"""Answers of one request: prompts times `n`."""
MAX_MESSAGES = 1 << 14
MAX_TOOLS = 128
MAX_INPUTS = 2048
MAX_LOGPROBS = 20
MAX_BIASES = 1024
INT64 = 1 << 63


class Generate(Part):
    """What chat and text completions share. None means: the model's default."""

    model: str = Field(max_length=256)
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, description="0 and -1: off")
    min_p: float | None = Field(default=None, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, ge=0.01, le=10)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    ignore_eos: bool = False
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    logit_bias: Annotated[
        dict[Annotated[int, Field(ge=0, strict=False)], Annotated[float, Field(ge=-100, le=100)]],
        BeforeValidator(partial(few_names, most=MAX_BIASES)),
    ] = Field(default={}, max_length=MAX_BIASES)
    response_format: ResponseFormat | None = None
    keep_alive: KeepAlive | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS, fail_fast=True),
        BeforeValidator(listed),
    ] = Field(default=[])
    stream: bool = False
    stream_options: StreamOptions | None = None
    timeout: float | None = Field(default=None, gt=0, description="seconds that it may wait for its first token")
    # Who asks: taken, and of no effect on an answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return drop_neutral(values, NEUTRAL)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def limiting_parameter(self) -> str:
        """The one that `wanted_tokens` comes from."""
        return "max_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        """How many alternatives each token is to be told with; None: not even its own log-probability."""
        raise NotImplementedError

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options", "it needs 'stream' to be true")
        if self.response_format is not None:
            has_schema = self.response_format.json_schema is not None
            if has_schema != (self.response_format.type == "json_schema"):
                raise _contradiction("response_format", "'json_schema' goes with the type of that name")


class ChatRequest(Generate):
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    tools: list[Tool] = Field(default=[], max_length=MAX_TOOLS, fail_fast=True)
    tool_choice: Annotated[
        Annotated[Literal["none", "auto", "required"], Tag(TEXT)] | Annotated[NamedTool, Tag(OBJECT)],
        one_of(choice_shape, "none, auto, required, or a function's name in an object"),
    ] = "auto"
    parallel_tool_calls: bool = True

    @property
    def offered_tools(self) -> list[Tool]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> list[Tool]:
        """Those of which one must be called."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return self.tools if self.tool_choice == "required" else []

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limiting_parameter(self) -> str:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def wanted_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def check(self) -> None:
        super().check()
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise _contradiction("max_tokens", "'max_completion_tokens' says something else")
        if self.top_logprobs is not None and not self.logprobs:
            raise _contradiction("top_logprobs", "it needs 'logprobs' to be true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise _contradiction("tools", "two functions have the same name")
        if self.tool_choice not in ("none", "auto") and not self.forced_tools:
            raise _contradiction("tool_choice", "'tools' has no such function")
        if self.offered_tools and self.response_format is not None:
            raise _contradiction("response_format", "it cannot be kept together with 'tools'")


class CompletionRequest(Generate):
    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Tokens
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True), Tag(LIST)],
        one_of(shape_of, "text, a list of tokens, or a list of such prompts"),
    ]
    max_tokens: int | None = Field(default=None, ge=0)
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False

    @property
    def wanted_tokens(self) -> int | None:
        """One where none is wanted: a prompt has to be run to be scored."""
        return 1 if self.max_tokens == 0 else self.max_tokens

    @property
    def wanted_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        return _several(self.prompt)

    def check(self) -> None:
        super().check()
        if self.max_tokens == 0 and not self.echo:
            raise _contradiction("max_tokens", "it can be 0 only with 'echo'")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise _contradiction("n", f"prompts times 'n' must be at most {MAX_CHOICES}")


class EmbeddingsRequest(Part):
    model: str = Field(max_length=256)
    input: Annotated[
        Annotated[str, Tag(TEXT)]
        | Tokens
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True), Tag(LIST)],
        one_of(shape_of, "text, a list of tokens, or a list of such inputs"),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    keep_alive: KeepAlive | None = None
    user: str | None = None

    @property
    def inputs(self) -> Sequence[str | list[int]]:
        return _several(self.input)


def _several(value: str | list[int] | list[str | list[int]]) -> Sequence[str | list[int]]:
    if isinstance(value, str) or isinstance(value[0], int):
        return [value]
    return value


def _contradiction(param: str, why: str) -> ApiError:
    return ApiError(400, f"Parameter '{param}' is invalid: {why}.", "invalid_value", param)


R = TypeVar("R", bound=Part)


def parse(kind: type[R], body: bytes | dict[str, Any]) -> R:
    """What the body of a request says, as JSON or already read. Raises ApiError."""
    try:
        parsed = kind.model_validate(body) if isinstance(body, dict) else kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False)) from None
    parsed.check()
    return parsed
