"""The daemon's configuration: one YAML file, every field also an environment variable.

`server.port` in `gswapd.yaml` is `GSWAPD_SERVER__PORT` in the environment. What is named later wins: defaults, the
file, the environment, the command line. Anything unknown or out of range is refused at start, by name.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    AfterValidator,
    AnyHttpUrl,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    SecretStr,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from server.wording import in_plain_words
from swapper.errors import ConfigError
from swapper.geometry import DEFAULT_PAGE_BYTES, GRANULE_BYTES
from swapper.host_frames import available_memory

DEFAULT_FILE = Path("gswapd.yaml")
ENV_PREFIX = "GSWAPD_"
OTHER_VARIABLES = frozenset(("GSWAPD_URL", "GSWAPD_API_KEY", "GSWAPD_ADMIN_KEY", "GSWAPD_INSTANCE"))
"""Of the commands that talk to a daemon, and of the watchdog; no part of the configuration."""
DEFAULT_STORE = Path("~/.local/share/gswapd")

_UNITS = {"": 1, "B": 1} | {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")} | {"kB": 1000}


@cache
def _memory_at_start() -> int:
    """What was available when it was first asked for: a file that is read again means the same then."""
    return available_memory()


def parse_size(value: object) -> object:
    """`2GiB`, `500 MB`, a number of bytes, or `60%` of the memory that is available now."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(%|[A-Za-z]*)\s*", value)
    if match is None or (match[2] != "%" and match[2] not in _UNITS):
        raise ValueError(f"{value!r} is not a size; write it like 8GiB, 500MB, 60% or a number of bytes")
    if match[2] == "%":
        if float(match[1]) > 100:
            raise ValueError(f"{value!r} is more than all of the memory that is available")
        return int(float(match[1]) * _memory_at_start() / 100)
    return int(float(match[1]) * _UNITS[match[2]])


def _share(value: object) -> float | None:
    if value is None:
        return GPU_POOL_SHARE
    text = value.strip() if isinstance(value, str) else ""
    return min(1.0, float(text[:-1]) / 100) if text.endswith("%") else None


def _expand(value: object) -> object:
    return Path(value).expanduser() if isinstance(value, str | Path) else value


def _directory(path: Path) -> Path:
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError("is a file; the store is a directory, which `gswapd add` makes")
    return path


def _usable_key(key: SecretStr | None) -> SecretStr | None:
    text = "x" if key is None else key.get_secret_value()
    if not text or not text.isprintable() or " " in text:
        raise ValueError("must not be empty or have white space in it; leave it out to let everyone in")
    return key


Key = Annotated[SecretStr | None, AfterValidator(_usable_key)]
Size = Annotated[int, BeforeValidator(parse_size)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class ServerConfig(Section):
    """Where the daemon listens, who may ask, and how much it takes on."""

    host: str = "127.0.0.1"
    port: int = Field(default=8321, ge=0, le=65535, description="0 takes a free port")
    api_key: Key = Field(default=None, description="wanted by /v1 routes when set")
    admin_key: Key = Field(default=None, description="wanted by /admin routes when set")
    max_requests: int = Field(default=1024, ge=1, description="requests in the house at once, in whatever stage")
    max_body: Size = Field(default=16 << 20, ge=1024, description="largest request body")
    silence: Seconds = Field(default=5.0, description="a stream that waits for so long tells, in a comment, for what")
    tokenizer_threads: int = Field(default=2, ge=1, le=64)


GPU_POOL_SHARE = 0.8
"""Of a GPU's free memory, where `memory.pool` is left to us. The rest is for activations, graphs and libraries."""


class PoolSection(Section):
    """A section with a `pool`: how much memory a GPU has is known to its worker alone, so that is told the share."""

    _pool_share: float | None = PrivateAttr(default=None)

    @model_validator(mode="wrap")
    @classmethod
    def _remember_share(cls, value: Any, validate: ModelWrapValidatorHandler[Self]) -> Self:
        config = validate(value)
        if isinstance(value, dict):
            config._pool_share = _share(value.get("pool"))
        return config

    @property
    def gpu_share(self) -> float | None:
        """The share of a GPU's free memory that makes the pool; None where the pool has a size."""
        return self._pool_share


class MemoryConfig(PoolSection):
    """The frame pool of each worker, and its host tier. On a GPU, a share is of what is free there (by default 80%);
    on a CPU, of what is free on the machine, for all workers together.
    """

    pool: Size = Field(default="50%", ge=GRANULE_BYTES)  # type: ignore[assignment]  # validated, so it ends as an int
    page: Size = Field(default=DEFAULT_PAGE_BYTES, ge=GRANULE_BYTES)
    host_tier: Size = Field(default=0, ge=0, description="shared memory that keeps pages near a GPU; 0 turns it off")
    peers: Literal["auto", "off"] = Field(
        default="auto", description="auto: GPUs of one node copy pages from one another, and share their links"
    )
    suspended: Size = Field(
        default=512 << 20, ge=0, description="host memory of a worker for keys and values of suspended requests"
    )

    @model_validator(mode="after")
    def _whole_pages(self) -> MemoryConfig:
        if self.page % GRANULE_BYTES:
            raise ValueError(f"page must be a multiple of 2MiB, not {self.page} bytes")
        if self.pool < self.page:
            raise ValueError(f"pool ({self.pool} bytes) must hold at least one page ({self.page} bytes)")
        return self

    @property
    def frames(self) -> int:
        return self.pool // self.page


class StorageConfig(Section):
    """What page-ins may take from storage."""

    max_bytes_per_second: Size | None = Field(
        default=None, ge=1 << 20, description="of each worker; the host tier and aliases do not count"
    )


Device = Literal["auto", "cpu", "cuda"]


class GroupConfig(PoolSection):
    """A mesh of workers, one a GPU, which serves the models that were added with the same `--tp` and `--pp`."""

    name: str = Field(default="default", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")
    tp: int = Field(default=1, ge=1, le=64, description="tensor-parallel ranks")
    pp: int = Field(default=1, ge=1, le=64, description="pipeline stages")
    device: Device | None = Field(default=None, description="otherwise `cluster.device`")
    node: str | None = Field(default=None, description="address of the Ray node to run on; otherwise any")
    pool: Size | None = Field(default=None, ge=GRANULE_BYTES, description="otherwise `memory.pool`")
    host_tier: Size | None = Field(default=None, ge=0, description="otherwise `memory.host_tier`")

    @property
    def ranks(self) -> int:
        return self.tp * self.pp


class ClusterConfig(Section):
    """The workers and how they are started."""

    groups: tuple[GroupConfig, ...] = Field(default=(GroupConfig(),), min_length=1, description="see below")
    ray_address: str | None = Field(default=None, description="join this Ray; otherwise a private one is started")
    device: Device = Field(default="auto", description="auto: a GPU where there is one")
    verify: bool = Field(default=False, description="check the hash of every page that is read")
    reader: Literal["auto", "pread", "kvikio"] = Field(default="auto", description="auto: kvikio on a GPU, else pread")
    read_threads: int | None = Field(
        default=None, ge=1, le=256, description="by default 4; with a GPU two less than cores, 16 at most"
    )
    compute_threads: int | None = Field(
        default=None, ge=1, description="by default one less than there are cores, shared among the workers"
    )
    max_batch_tokens: int = Field(default=512, ge=16)
    max_batch_sequences: int = Field(default=64, ge=1)
    graphs: bool = Field(default=True, description="decode from CUDA graphs on a GPU")
    attention: Literal["fused", "plain"] = Field(
        default="fused", description="plain: step by step, slower, without fused kernels or graphs; to compare with"
    )

    @model_validator(mode="after")
    def _groups_can_be(self) -> ClusterConfig:
        names = [group.name for group in self.groups]
        for group in self.groups:
            if names.count(group.name) > 1:
                raise ValueError(f"groups: {group.name!r} is there twice; every group needs a name of its own")
            if group.node is not None and self.ray_address is None:
                raise ValueError(f"groups: {group.name!r} names a node, but without ray_address there is one only")
        return self

    @property
    def ranks(self) -> int:
        return sum(group.ranks for group in self.groups)


class SchedulerConfig(Section):
    """Who goes first, and bounds of queueing."""

    policy: Literal["gswapd", "lru", "computron"] = Field(
        default="gswapd", description="the other two are for comparison: see scheduler.md"
    )

    max_queue: int = Field(default=64, ge=1, description="requests that wait for one model")
    max_queue_total: int = Field(default=256, ge=1, description="requests that wait in all")
    wait_bound: Seconds = Field(default=5.0, description="a request that waited so long goes before all younger ones")
    time_slice: Seconds | None = Field(
        default=1.0,
        description="for a request that waited for `wait_bound`, what ran for so long is suspended; null: it never is",
    )
    journal: Annotated[Path | None, BeforeValidator(_expand)] = Field(
        default=None, description="file for every event and no word of a prompt; `gswapd replay` reads it"
    )
    journal_size: Size = Field(default=64 << 20, ge=1 << 16, description="of one file; four full ones are kept")


class TimeoutConfig(Section):
    """Seconds."""

    request: Seconds = Field(
        default=300.0,
        description="longest wait for a first token; a request may say `timeout`, in seconds, to wait less",
    )
    drain: Seconds = Field(default=30.0, description="what runs may finish for so long after SIGTERM")
    stall: Seconds = Field(default=60.0, description="a busy worker without progress for so long is restarted")
    heartbeat: Seconds = Field(default=5.0, description="a worker that says nothing for so long is restarted")


class TelemetryConfig(Section):
    """The log, and traces. Metrics are always there, at /metrics."""

    log: Literal["text", "json"] = Field(default="text", description="lines for people, or JSON objects")
    otlp_endpoint: AnyHttpUrl | None = Field(
        default=None,
        description="send traces there by OTLP/HTTP, as to `http://localhost:4318`; needs `gswapd[tracing]`",
    )
    sample: float = Field(default=1.0, ge=0, le=1, description="share of requests that are traced; callers may decide")


class SamplingDefaults(Section):
    """What a request that does not say otherwise gets."""

    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float = Field(default=1.0, ge=0.01, le=10)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    max_tokens: int | None = Field(default=None, ge=1)


class ModelConfig(Section):
    """One model of the store, by its name there. A model that is not listed is served with the defaults."""

    aliases: tuple[str, ...] = ()
    defaults: SamplingDefaults = SamplingDefaults()
    pinned: bool = False
    preload: bool = False
    max_wait: Seconds | None = Field(default=None, description="otherwise `scheduler.wait_bound`")
    slo: Seconds | None = Field(default=None, description="in which an answer should be complete")
    priority: int = Field(default=0, ge=-100, le=100, description="the higher goes first, within the others' bounds")
    ttl: Seconds | None = Field(default=None, description="paged out once it was idle for so long")


class Config(BaseSettings):
    """All of it. Made by `load_config`."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, validate_default=True
    )

    store: Annotated[Path, BeforeValidator(_expand), AfterValidator(_directory)] = DEFAULT_STORE
    server: ServerConfig = ServerConfig()
    memory: MemoryConfig = MemoryConfig()
    storage: StorageConfig = StorageConfig()
    cluster: ClusterConfig = ClusterConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
    models: dict[str, ModelConfig] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _pools_hold_a_page(self) -> Config:
        for group in self.cluster.groups:
            if group.pool is not None and group.pool < self.memory.page:
                raise ValueError(f"cluster.groups: the pool of {group.name!r} must hold at least one memory.page")
        return self

    @model_validator(mode="after")
    def _aliases_are_unique(self) -> Config:
        owners = dict.fromkeys(self.models, "the model of that name")
        for name, model in self.models.items():
            for alias in model.aliases:
                if alias in owners:
                    raise ValueError(f"models: alias {alias!r} of {name!r} is taken by {owners[alias]}")
                owners[alias] = repr(name)
        return self


def load_config(
    path: Path | None = None,
    *,
    store: Path | None = None,
    host: str | None = None,
    port: int | None = None,
    memory: str | None = None,
    ray_address: str | None = None,
    journal: Path | None = None,
) -> Config:
    """The configuration in force: `path`, or `gswapd.yaml` here if there is one; keywords are the command line's.

    Raises ConfigError with one line for each problem.
    """
    file = _read(path or DEFAULT_FILE) if path or DEFAULT_FILE.exists() else {}
    command_line = {
        "store": store,
        "server": _given(host=host, port=port),
        "memory": _given(pool=memory),
        "cluster": _given(ray_address=ray_address),
        "scheduler": _given(journal=journal),
    }

    class Sourced(Config):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return (init_settings, env_settings, InitSettingsSource(settings_cls, file))

    try:
        _refuse_unknown_variables()
        return Sourced(**_given(**command_line))
    except ValidationError as error:
        raise ConfigError("\n".join(_sentence(problem) for problem in error.errors())) from error
    except SettingsError as error:
        raise ConfigError(f"{error}: {error.__cause__}" if error.__cause__ else str(error)) from error


def _given(**values: Any) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value not in (None, {})}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.load(path.read_text(), _Loader)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from error
    if not isinstance(values, dict | None):
        raise ConfigError(f"{path} must hold sections such as `server:`, not a {type(values).__name__}.")
    return values or {}


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, of which YAML would take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:merge" and isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is there twice", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep)


def _refuse_unknown_variables() -> None:
    """The settings library ignores in silence what it does not know."""
    for name in sorted(os.environ):
        if not name.upper().startswith(ENV_PREFIX) or name.upper() in OTHER_VARIABLES:
            continue
        section, *inner = name[len(ENV_PREFIX) :].lower().split("__")
        if section not in Config.model_fields:
            raise ConfigError(f"{name}: there is no section {section!r}; there are {', '.join(Config.model_fields)}.")
        # `models` has names of models below it; of a section, the library itself refuses what it does not know.
        depth = 1 if isinstance(Config.model_fields[section].default, Section) else 0
        if section != "models" and len(inner) > depth:
            raise ConfigError(f"{name}: {'.'.join((section, *inner[:depth]))} has no fields.")


def _sentence(problem: ErrorDetails) -> str:
    """`server.port: must be at most 65535 (got 99999)`, keys kept out of it."""
    field = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"{field}: there is no such field"
    message = in_plain_words(problem)
    if not field:
        return message
    if field.endswith("_key") or isinstance(problem["input"], dict):
        return f"{field}: {message}"
    given = problem["input"]
    return f"{field}: {message} (got {str(given) if isinstance(given, Path) else repr(given)})"
