"""docs/api.md, its tables written from what requests are checked against.

python -m server.api_page > docs/api.md
"""

# ruff: noqa: E501 – lines of the page

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from server.ollama import schemas as ollama
from server.openai import schemas as openai
from server.openai.structured import MAX_GRAMMAR
from server.openai.tools import HERMES, LLAMA, MISTRAL
from server.reload import LIVE

MEANINGS = {
    "model": "its name in the store, or an alias",
    "messages": "roles system, developer, user, assistant, tool; text only. Written by the model's own chat template",
    "prompt": "text, tokens, or a list of either: one choice for each, times `n`",
    "input": "text, tokens, or a list of either. One that is longer than the model takes is refused",
    "max_tokens": "of an answer; KV memory is reserved for it. 0 (with `echo`): the prompt is only scored",
    "max_completion_tokens": "the same by its newer name",
    "temperature": "0: the likeliest token",
    "top_p": "",
    "top_k": "0 and -1: off",
    "min_p": "",
    "repetition_penalty": "over prompt and answer",
    "presence_penalty": "over the answer",
    "frequency_penalty": "over the answer",
    "seed": "the same seed repeats an answer (in bfloat16 another batch may round a near-tie differently); answer i of `n` has seed + i",
    "ignore_eos": "go on behind the end of text, until `max_tokens`",
    "n": "answers; each is computed for itself, its prompt too",
    "logit_bias": "by token id; of at most {max_length} tokens. Log-probabilities are told without it",
    "response_format": "`json_object`, or `json_schema` with any schema that llguidance can keep; always kept, `strict` or not",
    "keep_alive": "not OpenAI's: how long the model stays once idle, until the next request; as Ollama has it (`5m`, 300, 0; -1 or more than a century: for ever)",
    "stop": "up to {max_length} strings; the answer ends before the first",
    "stream": "",
    "stream_options": "`include_usage`",
    "timeout": "not OpenAI's: seconds that it may wait for its first token, at most `timeouts.request`",
    "user": "taken, of no effect",
    "safety_identifier": "taken, of no effect",
    "prompt_cache_key": "taken, of no effect",
    "logprobs": "natural, of the raw logits: before bias, penalties, masks and temperature",
    "top_logprobs": "alternatives at each place",
    "tools": "functions; see below",
    "tool_choice": "`none`, `auto`, `required`, or one function: the last two are kept by a grammar",
    "parallel_tool_calls": "false: the answer ends with its first call",
    "echo": "the answer begins with the prompt; with `logprobs`, the prompt is scored too",
    "encoding_format": "`base64` is little-endian float32",
    "dimensions": "the first so many, to length 1 again; says something where the model was trained so",
}
"""What is to be said of each parameter; a new one has to be added here."""

HEAD = f"""\
# The API

Two dialects, one way behind them: OpenAI's under `/v1`, Ollama's under `/api`. Checked with the official clients of both (tests/server, tests/e2e). **A
parameter that is not in these tables is refused by name**, unless it has the value that means "without it" (they are named behind each table). This page is
generated: `python -m server.api_page > docs/api.md`.

Errors are OpenAI's envelope, `{{"error": {{"message", "type", "param", "code"}}}}`, under `/api` Ollama's `{{"error": message}}`; within a stream that has begun, too.

## Streams

Server-sent events. A stream that has had nothing to say for `server.silence` seconds begins, if it has not yet, and says in a comment how far the model
is: `: {{"state":"loading","resident_pages":41,"total_pages":129,"waiting":1,"running":0}}`. Clients pass over comments. A refusal that comes later than that is an
event in the stream and not a status. Ollama's lines know no comments.

## Calls of tools

The model's chat template is given the tools, and shows how the model writes calls: like **{HERMES.name}** (`{HERMES.begin}` JSON `{HERMES.end}`: Hermes, Qwen 2.5 and 3),
**{MISTRAL.name}** (`{MISTRAL.begin}` and a list), or **{LLAMA.name}** (Llama 3.1 to 3.3: the answer is JSON with `parameters`). Other ways (`<function=…>`, `[ARGS]`, Python) are refused with
the reason, and so are models whose template takes no tools. A call comes in one chunk of a stream, when it is complete. What looks like a call and is none
is text. Arguments are held to their schema when a call is `required`, or a function is `strict` (not in the {MISTRAL.name} way); in `auto`, otherwise, the model is free.
`tools` and `response_format` do not go together.

## JSON

Kept by masking tokens, in the worker, with [llguidance](https://github.com/guidance-ai/llguidance). A schema with what it cannot keep, or of more
than {MAX_GRAMMAR} characters, is refused with the reason. At most 16 characters of white space
stand between two parts. An answer that `max_tokens` cuts off is cut off JSON (`finish_reason` is `length`). The first answer of a model that needs a grammar
waits about half a second, and the others of the model with it, while its tokenizer is prepared.

## Embeddings

By encoders that come with the `modules.json` of sentence-transformers: a Transformer, its Pooling (mean, CLS, max or last token), and Normalize if it says so. Vectors
are those of the model by itself. `/v1/completions` and chat refuse such models, `/v1/embeddings` all others. Up to {openai.MAX_INPUTS} texts make one request, which takes turns with others
text by text.
"""

OLLAMA = f"""\
A request is put into OpenAI's words, so what is said above holds. What differs from Ollama:

- Defaults of sampling are the configuration's (`models.NAME.defaults`), not Ollama's. A model stays until memory is needed (`keep_alive` -1 means that), unless `ttl` or `keep_alive` says less.
- `/api/chat` and `/api/generate` without messages or prompt load the model, or, with `keep_alive` 0, evict it. A pin is not broken by `keep_alive`.
- `:latest` behind a name is passed over. `size_vram` is what is in frames now. `/api/version` is gswapd's.
- Taken without effect, because there is nothing here that they could change: {", ".join(f"`{name}`" for name in sorted(ollama.NO_EFFECT))}.
- No images, `suffix`, `template`, `context` or `think`; no `/api/pull`, `push`, `create`, `copy`, `delete`: `gswapd add`, or `POST /admin/models`.

| route | |
|---|---|
| `POST /api/chat`, `/api/generate` | streaming unless `"stream": false` |
| `POST /api/embed`, `/api/embeddings` | a text that is too long is cut, unless `"truncate": false` |
| `GET /api/tags`, `/api/ps`, `/api/version`, `POST /api/show` | what there is, what is in memory, how it is |
"""

ADMIN = f"""\
| route | |
|---|---|
| `GET /admin/models` | state, pages, bytes, queue and last load of each; `adding`: adds under way and what became of the last ones; `problems`: images that cannot be served |
| `POST /admin/models` | `{{"source": DIRECTORY, "name": NAME, "dtype": …, "tp": …, "pp": …}}`: adds a checkpoint of the daemon's machine, in a process of its own, one at a time. Answers when it is done, or at once with `?wait=false` |
| `DELETE /admin/models/NAME` | takes a model from the store: running requests finish, waiting ones fail |
| `POST /admin/models/NAME/load\\|evict\\|pin\\|unpin` | idempotent; `?wait=false` answers at once |
| `POST /admin/reload`, or SIGHUP | reads the configuration again and takes over what changed of `models`, {", ".join(f"`{section}.{field}`" for section, fields in LIVE.items() for field in fields)}. If anything else has changed, nothing is taken over, and the error names it |
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD]
    for title, model, neutral in (
        ("POST /v1/chat/completions", openai.ChatRequest, openai.NEUTRAL),
        ("POST /v1/completions", openai.CompletionRequest, openai.NEUTRAL),
        ("POST /v1/embeddings", openai.EmbeddingsRequest, {}),
    ):
        parts.append("\n".join([f"## {title}", "", *_rows(model.model_fields), *_neutral(neutral, model)]))
    parts += [
        "## GET /v1/models, /v1/models/NAME\n\nOpenAI's, aliases too; `root` is the model that an alias stands for, `max_model_len` its context.",
        "## Ollama's routes\n\n" + OLLAMA,
        "`options`:\n\n" + "\n".join(_bounds_rows(ollama.Options.model_fields)),
        "## The operator's routes\n\n" + ADMIN,
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield "| parameter | bounds | |"
    yield "|---|---|---|"
    for name, field in fields.items():
        meaning = MEANINGS[name].format(max_length=_bound(field, "max_length"))
        yield f"| `{name}` | {_bounds(field)} | {meaning} |"


def _bounds_rows(fields: Mapping[str, FieldInfo]) -> Iterator[str]:
    yield "| option | bounds |"
    yield "|---|---|"
    for name, field in fields.items():
        yield f"| `{name}` | {_bounds(field)} |"


def _neutral(neutral: Mapping[str, tuple[object, ...]], model: type[BaseModel]) -> Iterator[str]:
    left = {name: values for name, values in neutral.items() if name not in model.model_fields}
    if left:
        said = ", ".join(f"`{name}` ({' or '.join(map(_json, values))})" for name, values in left.items())
        yield f'\nTaken with the value that means "without it", or null: {said}.'


def _json(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).replace("'", '"')


def _bounds(field: FieldInfo) -> str:
    least, most = _bound(field, "ge"), _bound(field, "le")
    above, below = _bound(field, "gt"), _bound(field, "lt")
    words = [
        *([f"≥ {_number(least)}"] if least is not None else []),
        *([f"> {_number(above)}"] if above is not None else []),
        *([f"≤ {_number(most)}"] if most is not None else []),
        *([f"< {_number(below)}"] if below is not None else []),
    ]
    return ", ".join(words)


def _number(value: float) -> str:
    return {openai.INT64: "2⁶³", -openai.INT64: "-2⁶³"}.get(int(value), f"{value:g}")


def _bound(field: FieldInfo, name: str) -> Any:
    return next((getattr(part, name) for part in field.metadata if hasattr(part, name)), None)


if __name__ == "__main__":
    print(page(), end="")
