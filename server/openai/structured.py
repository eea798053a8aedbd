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


def json_grammar(schema: dict[str, Any], param: str) -> str:
    """The grammar of JSON that a schema describes. Raises ApiError, of the parameter that the schema came in."""
    return _checked(LLMatcher.grammar_from_json_schema(schema, defaults=WHITE_SPACE), param)


def lark_grammar(text: str, param: str) -> str:
    return _checked(LLMatcher.grammar_from_lark(text), param)


def grammar_of(body: Generate) -> str | None:
    """Of the answer's format, if the request asks for one. Raises ApiError."""
    return None if body.response_format is None else json_grammar(body.response_format.wanted_schema, "response_format")


def _checked(grammar: str, param: str) -> str:
    complaint = LLMatcher.validate_grammar(grammar).strip().rstrip(".")
    if complaint:
        message = f"Parameter '{param}' has a JSON schema that no answer can be held to: {complaint}."
        raise ApiError(400, message, "invalid_json_schema", param)
    return grammar
