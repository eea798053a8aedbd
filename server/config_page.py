"""docs/configuration.md, written from the configuration's own definition.

python -m server.config_page > docs/configuration.md
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from server.config import Config, GroupConfig, ModelConfig, Section

MIB = 1 << 20

HEAD = """\
# Configuration

One YAML file: `gswapd.yaml` in the working directory, or `gswapd serve --config FILE`. Every field is an environment
variable too: `GSWAPD_`, the section, two underscores, the field. The command line wins over the environment, and that
over the file. This page is generated: `python -m server.config_page > docs/configuration.md`.

Sizes are written like `8GiB`, `500MB` or a number of bytes; `memory.pool` may be a share of the memory that is
available at start, like `60%`.
"""


def page() -> str:
    """The whole page, Markdown."""
    parts = [HEAD, "\n".join(_rows("", {"store": Config.model_fields["store"]}, "GSWAPD_"))]
    for name, field in Config.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, Section):
            parts.append(_section(f"## {name}", section, name, f"GSWAPD_{name.upper()}__"))
    parts.append(_section("## cluster.groups[]", GroupConfig, "cluster.groups[]", ""))
    parts.append(_section("## models.NAME", ModelConfig, "models.NAME", ""))
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _section(title: str, section: type[BaseModel], path: str, prefix: str) -> str:
    text = " ".join((section.__doc__ or "").split())
    return "\n".join([title, "", text, "", *_rows(path + ".", section.model_fields, prefix)])


def _rows(path: str, fields: dict[str, FieldInfo], prefix: str) -> Iterator[str]:
    yield "| field | default | |" + (" environment |" if prefix else "")
    yield "|---|---|---|" + ("---|" if prefix else "")
    for name, field in fields.items():
        nested = field.annotation
        if isinstance(nested, type) and issubclass(nested, Section):
            for inner, below in nested.model_fields.items():
                yield _row(f"{path}{name}.{inner}", below, "")
        else:
            yield _row(path + name, field, prefix + name.upper() if prefix else "")


def _row(path: str, field: FieldInfo, variable: str) -> str:
    row = f"| `{path}` | {_default(field)} | {field.description or ''} |"
    return f"{row} `{variable}` |" if variable else row


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, tuple):
        return "`[{}]`"
    if isinstance(value, int) and value >= MIB and value % MIB == 0:
        return f"`{value // MIB}MiB`"
    return f"`{value}`"


if __name__ == "__main__":
    print(page(), end="")
