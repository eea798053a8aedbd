"""Tool calls: the ways in which models write them, and how they are found in an answer as it comes.

A model's chat template shows which way it was trained to write calls:

- **hermes** (Qwen 2.5 and 3, Hermes): `<tool_call>{"name": …, "arguments": {…}}</tool_call>`, any number, text between;
- **mistral**: `[TOOL_CALLS][{"name": …, "arguments": {…}}, …]` at the end of the answer;
- **llama** (Llama 3.1 to 3.3): the whole answer is `{"name": …, "parameters": {…}}`, several with `;` between.

What looks like a call and is none (it is not JSON, or has no name) is text. A call comes as a whole, when its last
character has come.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import ApiError

_SOMETHING = re.compile(r"[^ \t\r\n;]")


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # JSON


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One way to write calls: between `begin` and `end`. An empty `begin` is the beginning of an answer that starts
    with a brace, an empty `end` the end of the answer.
    """

    name: str
    begin: str
    end: str
    arguments: str  # what the arguments are called
    id_length: int | None = None  # None: ids are as OpenAI's

    def new_id(self) -> str:
        if self.id_length is None:
            return f"call_{secrets.token_hex(12)}"
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(self.id_length))

    def calls(self, text: str) -> list[ToolCall]:
        """The calls of a text between `begin` and `end`; none if it is no such text."""
        try:
            return [self._call(value) for value in _values(text)]
        except (ValueError, RecursionError):
            return []

    def _call(self, value: object) -> ToolCall:
        """Raises ValueError if it is none, or one that no client could read: models may write half of a surrogate pair,
        and Python reads numbers that JSON has not.
        """
        if not isinstance(value, dict):
            raise ValueError
        name, given = value.get("name"), value.get(self.arguments, {})
        if not (isinstance(name, str) and isinstance(given, dict)):
            raise ValueError
        arguments = json.dumps(given, ensure_ascii=False, allow_nan=False)
        (name + arguments).encode()
        return ToolCall(self.new_id(), name, arguments)


def _values(text: str) -> Iterator[Any]:
    """The JSON values that stand one behind the other, or behind semicolons; those of a list instead of the list.
    Raises ValueError or RecursionError.
    """
    decoder, at = json.JSONDecoder(), 0
    while found := _SOMETHING.search(text, at):
        value, at = decoder.raw_decode(text, found.start())
        yield from value if isinstance(value, list) else (value,)


HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]", "", "arguments", id_length=9)
LLAMA = ToolFormat("llama", "", "", "parameters")


def format_of(template: str) -> ToolFormat:
    """How a model with this chat template writes calls. Raises ApiError."""
    if "tools" not in template:
        raise _no_tools("its chat template takes none")
    if HERMES.begin in template and "<function=" not in template:
        return HERMES
    if MISTRAL.begin in template and "[ARGS]" not in template:
        return MISTRAL
    if '"parameters"' in template and ("ipython" in template or "<|python_tag|>" in template):
        return LLAMA
    raise _no_tools("it writes calls in a way that is not known here; known are those of Hermes, Mistral and Llama 3")


def _no_tools(why: str) -> ApiError:
    return ApiError(400, f"This model cannot be given tools: {why}.", "unsupported_parameter", "tools")


class ToolCallParser:
    """Parts one answer into text and calls. Of an answer with calls, white space at its ends is not shown."""

    def __init__(self, format: ToolFormat, *, single: bool = False, begun: bool = False) -> None:
        """With `single`, nothing comes after the first call; with `begun`, the prompt has opened it."""
        self._format = format
        self._single = single
        self._inside = begun
        self._text = ""  # not yet known to be text or part of a call
        self._space = ""  # white space that is shown only if text follows
        self._is_new = True  # nothing but white space has come since the beginning, or since the last call
        self._has_shown = False  # any text but white space
        self.called = False

    @property
    def done(self) -> bool:
        return self._single and self.called

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """The text that is certain now, and the calls that are complete."""
        self._text += text
        shown, calls = "", []
        while not self.done:
            if not self._inside:
                shown += self._shown(self._before_call())
            end = self._text.find(self._format.end) if self._inside and self._format.end else -1
            if end < 0:
                break
            body, self._text = self._text[:end], self._text[end + len(self._format.end) :]
            more, made = self._ended(body, self._format.end)
            shown += more
            calls += made
        return shown, calls

    def flush(self) -> tuple[str, list[ToolCall]]:
        """The answer has ended."""
        text, self._text = self._text, ""
        if self.done:
            return "", []
        shown, calls = self._ended(text, "") if self._inside else (self._shown(text), [])
        return shown + ("" if self.called else self._space), calls

    def _before_call(self) -> str:
        """Take what is surely text from what has come; if a call begins behind it, its opening too."""
        begin = self._format.begin
        if not begin:  # only an answer that begins with a brace is a call
            self._inside = self._is_new and self._text.lstrip().startswith("{")
            before, self._text = ("", self._text) if self._inside else (self._text, "")
            return before
        at = self._text.find(begin)
        if at >= 0:
            self._inside = True
            before, self._text = self._text[:at], self._text[at + len(begin) :]
            return before
        lengths = range(min(len(begin) - 1, len(self._text)), 0, -1)
        held = next((length for length in lengths if begin.startswith(self._text[-length:])), 0)
        cut = len(self._text) - held
        before, self._text = self._text[:cut], self._text[cut:]
        return before

    def _ended(self, body: str, end: str) -> tuple[str, list[ToolCall]]:
        """What stood between the markers: calls, or text after all."""
        self._inside = False
        calls = self._format.calls(body)[: 1 if self._single else None]
        if not calls:
            return self._shown(f"{self._format.begin}{body}{end}"), []
        self._is_new = self.called = True
        return "", calls

    def _shown(self, text: str) -> str:
        text = self._space + text
        if self.called and not self._has_shown:
            text = text.lstrip()
        kept = text.rstrip()
        self._space = text[len(kept) :]
        self._is_new &= not kept
        self._has_shown |= bool(kept)
        return kept


# ---- grammars, as llguidance writes them


def forced_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]], single: bool) -> tuple[str, str]:
    """What the prompt ends with, and the grammar of what follows: calls of these tools, and nothing else."""
    if format is HERMES:
        more = "" if single else ' ("\\n</tool_call>\\n<tool_call>\\n" call)*'
        return "<tool_call>\n", _grammar(format, tools, f'start: call{more} "\\n</tool_call>"')
    if format is MISTRAL:
        more = "" if single else ' (", " call)*'
        return format.begin, _grammar(format, tools, f'start: "[" call{more} "]"')
    return "", _grammar(format, tools, "start: call" if single else 'start: call ("; " call)*')


def strict_calls(format: ToolFormat, tools: Sequence[Mapping[str, Any]]) -> str:
    """The grammar of answers that are free but for their calls. Raises ApiError."""
    if format is HERMES:
        start = (
            'start: (opening "\\n" call "\\n</tool_call>")* TEXT\nopening[lazy]: TEXT "<tool_call>"\nTEXT: /(.|\\n)*/'
        )
        return _grammar(format, tools, start)
    if format is LLAMA:
        return _grammar(format, tools, 'start: TEXT | call ("; " call)*\nTEXT: /[^{](.|\\n)*/')
    raise ApiError(
        400,
        f"Parameter 'tools' is invalid: 'strict' is not supported for models that write calls like {format.name}.",
        "unsupported_parameter",
        "tools",
    )


def _grammar(format: ToolFormat, tools: Sequence[Mapping[str, Any]], start: str) -> str:
    """With `call` defined: the call of any of the tools."""
    rules = [start, f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}"]
    for index, tool in enumerate(tools):
        function = tool["function"]
        opening = f'{{"name": {json.dumps(function["name"])}, "{format.arguments}": '
        rules.append(f'call_{index}: {json.dumps(opening)} arguments_{index} "}}"')
        rules.append(f"arguments_{index}: %json {json.dumps(function.get('parameters') or {'type': 'object'})}")
    return "\n".join(rules)
