"""Grammars of answers that must be JSON. They are checked here, without a tokenizer; the worker masks what they do not
allow. The library on both sides is llguidance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher

from server.errors import ApiError
from server.openai.schemas import Generate

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

WHITE_SPACE: JsonCompileOptions = {"whitespace_pattern": r"[ \t\n\r]{0,16}"}
"""Between the parts of JSON. Without a limit, small models like to go on with it for ever."""


MAX_GRAMMAR = 64 << 10
"""Characters. Making a matcher of so many may take a worker, and all its models, half a second."""


def json_grammar(schema: dict[str, Any], param: str) -> str:
    """The grammar of JSON that a schema describes. Raises ApiError, of the parameter that the schema came in."""
    try:
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=WHITE_SPACE)
    except ValueError:  # whole numbers of more than 64 bits
        raise _unusable("it has a number that is too large", param) from None
    return _checked(grammar, param)


def lark_grammar(text: str, param: str) -> str:
    return _checked(LLMatcher.grammar_from_lark(text), param)


def grammar_of(body: Generate) -> str | None:
    """Of the answer's format, if the request asks for one. Raises ApiError."""
    return None if body.response_format is None else json_grammar(body.response_format.wanted_schema, "response_format")


def _checked(grammar: str, param: str) -> str:
    if len(grammar) > MAX_GRAMMAR:
        raise _unusable(f"it is longer than {MAX_GRAMMAR} characters", param)
    if complaint := LLMatcher.validate_grammar(grammar).strip().rstrip("."):
        raise _unusable(complaint, param)
    return grammar


def _unusable(why: str, param: str) -> ApiError:
    message = f"Parameter '{param}' has a JSON schema that no answer can be held to: {why}."
    return ApiError(400, message, "invalid_json_schema", param)
