"""What requests are made of: messages, tools, formats of answers; and how a value is taken for what was meant.

Validation happens on the event loop, and a mistake costs a hundred times what its bytes do. So none is looked for
behind the first in a list (`fail_fast`), and what has too many names is not looked into (`few_names`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError, from_json

MAX_NAMES = 64
MAX_TOKENS = 1 << 21
"""In one prompt: more than any context has."""


def drop_neutral(values: object, neutral: dict[str, tuple[object, ...]]) -> object:
    if not isinstance(values, dict):
        return values
    return {k: v for k, v in values.items() if v is not None and not _is_one_of(v, neutral.get(k, ()))}


def _is_one_of(value: object, neutral: tuple[object, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in neutral)  # to Python, True == 1


def listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def few_names(value: object, most: int = MAX_NAMES) -> object:
    if isinstance(value, dict) and len(value) > most:
        raise PydanticCustomError("names", "must have at most {most} fields", {"most": most})
    return value


def _parsed_json(value: object) -> object:
    """JSON in a string, as the OpenAI API writes the arguments of calls, and templates do not want them."""
    try:
        return from_json(value, allow_inf_nan=False) if isinstance(value, str) else value
    except ValueError:
        raise PydanticCustomError("json", "must be an object, as JSON in a string") from None


TEXT, TOKENS, LIST, OBJECT = "<text>", "<tokens>", "<list>", "<object>"
"""What a value is taken for, so that a problem is told of what was meant. As no parameter can be called:
`errors.invalid_request` leaves these out of names."""


def shape_of(value: object) -> str | None:
    if isinstance(value, str):
        return TEXT
    if isinstance(value, list):
        return TOKENS if value and isinstance(value[0], int | float) else LIST
    return None


def choice_shape(value: object) -> str | None:
    return OBJECT if isinstance(value, dict | NamedTool) else shape_of(value)


def _content_shape(value: object) -> str | None:
    return LIST if isinstance(value, list) else shape_of(value)


def one_of(shape: Callable[[object], str | None], names: str) -> Discriminator:
    return Discriminator(shape, custom_error_type="shape", custom_error_message=f"must be {names}")


Tokens = Annotated[
    list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True), Tag(TOKENS)
]
Prompt = Annotated[Annotated[str, Tag(TEXT)] | Tokens, one_of(shape_of, "text or a list of tokens")]

_MEDIA = {"image_url": "images", "input_image": "images", "input_audio": "audio", "file": "files"}


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    def check(self) -> None:
        """What concerns several parameters at once. Raises ApiError naming the one to change."""

    @model_validator(mode="before")
    @classmethod
    def _few_names(cls, values: object) -> object:
        return few_names(values)


class StreamOptions(Part):
    include_usage: bool = False

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        return drop_neutral(values, {"include_obfuscation": (False,)})


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


class Function(Part):
    """A function that a model may call. `parameters` is a JSON schema."""

    name: str = Field(min_length=1, max_length=64, pattern=r"^[a-zA-Z0-9_.-]+$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Part):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return {"type": "function", "function": self.function.model_dump(exclude_none=True, exclude={"strict"})}

    def checked(self) -> dict[str, Any]:
        """What calls are held to: of a function that is not strict, nothing but that they are calls."""
        return self.for_template() if self.function.strict else {"function": {"name": self.function.name}}


class NamedFunction(Part):
    name: str


class NamedTool(Part):
    type: Literal["function"]
    function: NamedFunction


class CalledFunction(Part):
    name: str
    arguments: Annotated[dict[str, Any], BeforeValidator(_parsed_json)]


class Call(Part):
    """A call that the assistant made earlier."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Part):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Annotated[str, Tag(TEXT)] | Annotated[list[TextPart], Field(min_length=1, fail_fast=True), Tag(LIST)],
        one_of(_content_shape, "text or a list of parts"),
    ]
    name: str | None = None
    tool_calls: list[Call] = Field(default=[], fail_fast=True)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, values: object) -> object:
        # What clients send back with an assistant's message as they got it.
        values = drop_neutral(values, {"annotations": ([],)})
        if isinstance(values, dict) and values.get("role") == "assistant" and values.get("tool_calls"):
            values.setdefault("content", "")
        return values

    def for_template(self) -> dict[str, Any]:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        role = "system" if self.role == "developer" else self.role
        more = self.model_dump(include={"name", "tool_calls", "tool_call_id"}, exclude_defaults=True)
        return {"role": role, "content": text, **more}


class JsonSchema(Part):
    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Part):
    """What an answer must be. `text` has been dropped before: it is what there is without it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def wanted_schema(self) -> dict[str, Any]:
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_
