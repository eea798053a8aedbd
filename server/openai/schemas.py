"""What requests may say. Anything else is refused by name, never ignored in silence.

A parameter of the OpenAI API that is not supported is still taken with the value that means "without it": null, or what
`NEUTRAL` lists. Answers are not modelled here: they are written as bytes, for speed (`server/openai/chat.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from server.errors import ApiError, invalid_request

NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}
MAX_STOPS = 16
MAX_STOP_LENGTH = 256
MAX_PROMPTS = 64
MAX_LOGPROBS = 20
INT64 = 1 << 63


def _drop(values: object, neutral: dict[str, tuple[object, ...]]) -> object:
    if not isinstance(values, dict):
        return values
    return {k: v for k, v in values.items() if v is not None and not _is_one_of(v, neutral.get(k, ()))}


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)  # to Python, True == 1


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


TEXT, TOKENS, LIST = "<text>", "<tokens>", "<list>"
"""What a value is taken for, so that a problem is told of what was meant. As no parameter can be called:
`errors.invalid_request` leaves these out of names."""


def _shape(value: object) -> str | None:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return TOKENS if value and isinstance(value[0], int | float) else LIST
    return None


def _content_shape(value: object) -> str | None:
    return LIST if isinstance(value, list) else _shape(value)


def _one_of(shape: Callable[[object], str | None], names: str) -> Discriminator:
    return Discriminator(shape, custom_error_type="shape", custom_error_message=f"must be {names}")


Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1), Tag(TOKENS)]
Prompt = Annotated[Annotated[str, Tag(TEXT)] | Tokens, _one_of(_shape, "text or a list of tokens")]

_MEDIA = {"image_url": "images", "input_image": "images", "input_audio": "audio", "file": "files"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Part):
    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _drop(values, {"include_obfuscation": (False,)})


class TextPart(Part):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _no_media(cls, values: object) -> object:
        kind = values.get("type") if isinstance(values, dict) else None
        if isinstance(kind, str) and kind in _MEDIA:
            raise PydanticCustomError("media", "{media} are not supported, only text is", {"media": _MEDIA[kind]})
        return values


class Message(Part):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(min_length=1), Tag(LIST)],
        _one_of(_content_shape, "text or a list of parts"),
    ]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        # What clients send back with an assistant's message as they got it.
        return _drop(values, {"tool_calls": ([],), "annotations": ([],)})

    def for_template(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        message = {"role": role, "content": text}
        return message if self.name is None else message | {"name": self.name}


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
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]],
        Field(max_length=MAX_STOPS),
        BeforeValidator(_listed),
    ] = []
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Who asks: taken, and of no effect on an answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return _drop(values, NEUTRAL)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def limiting_parameter(self) -> str:
        """The one that `wanted_tokens` comes from."""
        return "max_tokens"

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def check(self) -> None:
        """What concerns two parameters at once. Raises ApiError naming the one to change."""
        if self.stream_options is not None and not self.stream:
            raise _contradiction("stream_options", "it needs 'stream' to be true")


class ChatRequest(Generate):
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

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


class CompletionRequest(Generate):
    prompt: Annotated[
        Annotated[str, Tag(TEXT)]
        | Tokens
        | Annotated[list[Prompt], Field(min_length=1, max_length=MAX_PROMPTS), Tag(LIST)],
        _one_of(_shape, "text, a list of tokens, or a list of such prompts"),
    ]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        if isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            return self.prompt
        return [self.prompt]


def _contradiction(param: str, why: str) -> ApiError:
    return ApiError(400, f"Parameter '{param}' is invalid: {why}.", "invalid_value", param)


R = TypeVar("R", bound=Generate)


def parse(kind: type[R], body: bytes) -> R:
    """What the body of a request says. Raises ApiError."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False)) from None
    parsed.check()
    return parsed
