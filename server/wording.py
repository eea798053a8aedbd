"""What is wrong with a value, in plain words: the validation library's own name classes and types of Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Context = Mapping[str, Any]


def _items(count: int) -> str:
    return "1 item" if count == 1 else f"{count} items"


def _characters(count: int) -> str:
    return "1 character" if count == 1 else f"{count} characters"


_PHRASES: dict[str, str | Callable[[Context], str]] = {
    "string_type": "must be text",
    "string_sub_type": "must be text",
    "string_unicode": "must be text",
    "string_too_short": lambda context: f"must have at least {_characters(context['min_length'])}",
    "string_too_long": lambda context: f"must have at most {_characters(context['max_length'])}",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "is too large a number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "greater_than": lambda context: f"must be greater than {context['gt']}",
    "greater_than_equal": lambda context: f"must be at least {context['ge']}",
    "less_than": lambda context: f"must be less than {context['lt']}",
    "less_than_equal": lambda context: f"must be at most {context['le']}",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "string_pattern_mismatch": "may have only letters, digits, '_', '-' and '.'",
    "too_short": lambda context: f"must have at least {_items(context['min_length'])}",
    "too_long": lambda context: f"must have at most {_items(context['max_length'])}",
    "dict_type": "must be an object with named fields",
    "model_type": "must be an object with named fields",
    "model_attributes_type": "must be an object with named fields",
    "literal_error": lambda context: f"must be {context['expected']}",
    "path_type": "must be a path",
    "missing": "is missing",
}


def in_plain_words(problem: Mapping[str, Any]) -> str:
    """What follows the value's name: `must be at most 2`. Of one problem that a ValidationError lists."""
    phrase = _PHRASES.get(problem["type"])
    if callable(phrase):
        return phrase(problem["ctx"])
    if phrase is not None:
        return phrase
    message: str = problem["msg"]
    return message.removeprefix("Value error, ").replace("Input should", "should")
