"""One file, the environment over it, the command line over both; problems are told by the field's name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from server.config import Config, available_memory, load_config
from swapper.errors import ConfigError


@pytest.fixture(autouse=True)
def _nothing_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in os.environ:
        if name.startswith("GSWAPD_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def written(text: str) -> Path:
    path = Path("other.yaml")
    path.write_text(text)
    return path


def problems(text: str) -> list[str]:
    with pytest.raises(ConfigError) as failure:
        load_config(written(text))
    return str(failure.value).splitlines()


def test_the_defaults_are_safe() -> None:
    config = load_config()
    assert config.server.host == "127.0.0.1"
    assert config.server.api_key is None
    assert config.store == Path("~/.local/share/gswapd").expanduser()
    assert 0 < config.memory.frames * config.memory.page <= available_memory()


def test_a_file() -> None:
    config = load_config(
        written("""
        store: ~/models
        server: {port: 9000, api_key: sk-1}
        memory: {pool: 2GiB, page: 2MiB}
        models:
          qwen: {aliases: [q], pinned: true, defaults: {temperature: 0.7, max_tokens: 100}}
        """)
    )
    assert config.store == Path.home() / "models"
    assert config.server.port == 9000
    assert config.memory.frames == 1024
    assert config.models["qwen"].aliases == ("q",)
    assert config.models["qwen"].defaults.temperature == 0.7


def test_gswapd_yaml_is_read_without_being_named() -> None:
    Path("gswapd.yaml").write_text("server: {port: 9001}")
    assert load_config().server.port == 9001


def test_an_empty_file_is_the_defaults() -> None:
    assert load_config(written(""), memory="1GiB").model_dump() == load_config(memory="1GiB").model_dump()


def test_the_environment_goes_over_the_file_and_the_command_line_over_both(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written("server: {host: 10.0.0.1, port: 1, max_requests: 3}")
    monkeypatch.setenv("GSWAPD_SERVER__HOST", "10.0.0.2")
    monkeypatch.setenv("GSWAPD_SERVER__PORT", "2")
    monkeypatch.setenv("GSWAPD_STORE", "/elsewhere")
    config = load_config(path, port=3, memory="64MiB", ray_address="ray:1")
    assert (config.server.host, config.server.port, config.server.max_requests) == ("10.0.0.2", 3, 3)
    assert config.store == Path("/elsewhere")
    assert config.memory.pool == 64 << 20
    assert config.cluster.ray_address == "ray:1"


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2GiB", 2 << 30), ("500 MB", 500_000_000), ("1.5GiB", 3 << 29), ("4194304", 4 << 20)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert Config(memory={"pool": text, "page": "2MiB"}).memory.pool == nbytes  # type: ignore[arg-type]


def test_a_share_of_the_memory() -> None:
    pool = Config(memory={"pool": "25%"}).memory.pool  # type: ignore[arg-type]
    assert 0 < pool < available_memory()


def test_every_problem_is_one_line_that_names_its_field() -> None:
    lines = problems("""
        bogus: 1
        server: {port: 99999, prot: 1}
        memory: {pool: 2GX}
        timeouts: {drain: 0}
        models: {a: {defaults: {temperature: 9}}}
        """)
    assert [line.split(":")[0] for line in lines] == [
        "server.port",
        "server.prot",
        "memory.pool",
        "timeouts.drain",
        "models.a.defaults.temperature",
        "bogus",
    ]
    assert "99999" in lines[0]
    assert "no such field" in lines[1]


def test_a_page_is_whole_granules_and_the_pool_whole_pages() -> None:
    assert problems("memory: {page: 3MiB, pool: 1GiB}") == [
        "memory: page must be a multiple of 2MiB, not 3145728 bytes"
    ]
    assert "at least one page" in problems("memory: {page: 32MiB, pool: 16MiB}")[0]


def test_an_alias_stands_for_one_model() -> None:
    assert "'x' of 'b' is taken by 'a'" in problems("models: {a: {aliases: [x]}, b: {aliases: [x]}}")[0]
    assert "'b' of 'a' is taken" in problems("models: {a: {aliases: [b]}, b: {}}")[0]


@pytest.mark.parametrize("text", ["server: [", "- a list", "just words"])
def test_a_file_that_is_no_configuration(text: str) -> None:
    assert problems(text)[0].startswith("other.yaml")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file"):
        load_config(Path("missing.yaml"))


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("GSWAPD_SERVER__PORT", "many", "server.port"),
        ("GSWAPD_SERVER__PROT", "1", "server.prot"),
        ("GSWAPD_SEVER__PORT", "1", "GSWAPD_SEVER__PORT"),
        ("GSWAPD_MODELS", "{", "models"),
        ("GSWAPD_STOR", "/x", "GSWAPD_STOR"),
        ("gswapd_stor", "/x", "gswapd_stor"),
        ("GSWAPD_STORE__PATH", "/x", "GSWAPD_STORE__PATH"),
        ("GSWAPD_SERVER__PORT__X", "1", "GSWAPD_SERVER__PORT__X"),
        ("GSWAPD_SERVER__API_KEY", "", "server.api_key"),
    ],
)
def test_a_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, named: str) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ConfigError, match=named):
        load_config()


def test_keys_are_not_shown() -> None:
    assert "sk-secret" not in repr(load_config(written("server: {api_key: sk-secret}")))
    assert "12345" not in problems("server: {api_key: 12345}")[0]


@pytest.mark.parametrize(
    ("memory", "share"),
    [
        pytest.param({}, 0.8, id="left to us"),
        pytest.param({"pool": "45%"}, 0.45, id="a share"),
        pytest.param({"pool": "1GiB"}, None, id="a size"),
        pytest.param({"pool": 1 << 30}, None, id="a number"),
    ],
)
def test_a_share_of_a_gpu_is_left_to_its_worker(memory: dict[str, object], share: float | None) -> None:
    assert Config(memory=memory).memory.gpu_share == share  # type: ignore[arg-type]


def test_there_is_no_host_tier_unless_it_is_asked_for() -> None:
    assert Config().memory.host_tier == 0
    assert Config(memory={"host_tier": "2GiB"}).memory.host_tier == 2 << 30  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["GSWAPD_URL", "GSWAPD_ADMIN_KEY", "GSWAPD_INSTANCE"])
def test_variables_of_others_are_let_be(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "x")
    load_config()


@pytest.mark.parametrize("key", ["''", "' '", "'sk 1'", '"sk-1\\n"'])
@pytest.mark.parametrize("field", ["api_key", "admin_key"])
def test_a_key_that_keeps_nobody_out_or_everybody_is_refused(field: str, key: str) -> None:
    (problem,) = problems(f"server: {{{field}: {key}}}")
    assert problem.startswith(f"server.{field}: must not be empty")


@pytest.mark.parametrize(
    ("text", "key"),
    [("server: {port: 1}\nserver: {port: 2}", "server"), ("models: {a: {pinned: true, pinned: false}}", "pinned")],
)
def test_a_key_that_is_there_twice(text: str, key: str) -> None:
    assert f"'{key}' is there twice" in "\n".join(problems(text))


def test_merged_keys_may_be_there_twice() -> None:
    text = "models: {a: &a {pinned: true, preload: true}, b: {<<: *a, pinned: false}}"
    assert load_config(written(text)).models["b"].model_dump(include={"pinned", "preload"}) == {
        "pinned": False,
        "preload": True,
    }


def test_a_store_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (problem,) = problems(f"store: {tmp_path}/file")
    assert problem == f"store: is a file; the store is a directory, which `gswapd add` makes (got '{tmp_path}/file')"


@pytest.mark.parametrize(
    "text",
    [
        "server: 5",
        "server: {port: many}",
        "server: {port: 1.5}",
        "server: {max_requests: 0}",
        "cluster: {device: tpu}",
        "cluster: {verify: perhaps}",
        "timeouts: {drain: .inf}",
        "models: 5",
        "models: {a: 5}",
        "models: {a: {aliases: 5}}",
        "models: {a: {aliases: [5]}}",
        "store: 5",
    ],
)
def test_problems_are_told_in_plain_words(text: str) -> None:
    (problem,) = problems(text)
    for leaked in ("Input", "valid ", "instance", "Config", "tuple", "Path"):
        assert leaked not in problem


def test_there_is_one_group_of_one_worker_unless_groups_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    [group] = load_config().cluster.groups
    assert (group.name, group.tp, group.pp) == ("default", 1, 1)
    config = load_config(written("cluster: {groups: [{name: pair, tp: 2, pool: 1GiB}, {name: deep, pp: 3}]}"))
    assert [(group.name, group.ranks) for group in config.cluster.groups] == [("pair", 2), ("deep", 3)]
    assert config.cluster.ranks == 5
    monkeypatch.setenv("GSWAPD_CLUSTER__GROUPS", '[{"tp": 4}]')
    assert load_config().cluster.groups[0].tp == 4


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ("[]", "cluster.groups: must have at least 1 item"),
        ("[{tp: 0}]", "cluster.groups.0.tp: must be at least 1 (got 0)"),
        ("[{name: a b}]", "cluster.groups.0.name: "),
        ("[{name: a}, {name: a}]", "cluster: groups: 'a' is there twice; every group needs a name of its own"),
        ("[{node: 10.0.0.1}]", "cluster: groups: 'default' names a node, but without ray_address there is one only"),
        ("[{pool: 2MiB}]", "cluster.groups: the pool of 'default' must hold at least one memory.page"),
    ],
)
def test_groups_that_cannot_be(groups: str, problem: str) -> None:
    assert problems(f"cluster: {{groups: {groups}}}")[0].startswith(problem)
