"""Groups of several ranks in one daemon: answers whatever dies, a model on the group that it was packed for."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.demo.daemon import DaemonProcess
from swapper.errors import WorkerError
from swapper.image import Image
from swapper.store import Store
from tests.e2e.client import Client
from tests.models import make_checkpoint, make_tokenizer
from worker.add import add_model

PAGE = 2 << 20
PROMPT = "The sky is"
LONG: dict[str, Any] = {"max_tokens": 300, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SLOW = PAGE * 2  # bytes a second: what a page-in is slowed down to, so that it can be interrupted
PATIENCE = 90.0


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Image]:
    """One model, of several pages, packed for the three shapes of our groups and for one that none has; and another."""
    large = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 8, "max_position_embeddings": 1024}
    one, other = (
        make_tokenizer(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), "llama", seed, **large))
        for seed in range(2)
    )
    store = Store(tmp_path_factory.mktemp("store"))
    wanted = {
        "narrow": (one, 1, 1),
        "wide": (one, 2, 1),
        "deep": (one, 1, 2),
        "square": (one, 2, 2),
        "other": (other, 2, 2),
    }
    return {name: add_model(store, source, name, tp=tp, pp=pp) for name, (source, tp, pp) in wanted.items()}


@pytest.fixture(scope="module")
def config(images: dict[str, Image]) -> dict[str, Any]:
    return {
        "store": str(images["wide"].path.parents[1]),
        "memory": {"pool": 16 * PAGE, "page": PAGE},
        "storage": {"max_bytes_per_second": SLOW},
        "cluster": {
            "verify": True,
            "groups": [
                {"name": "one"},
                {"name": "pair", "tp": 2},
                {"name": "square", "tp": 2, "pp": 2, "pool": 4 * PAGE},  # one model's pages and a frame of its KV
            ],
        },
    }


@pytest.fixture(scope="module")
def client(config: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), config) as daemon, Client(daemon.url) as client:
        yield client
        assert daemon.process.poll() is None, "the daemon died: " + "\n".join(daemon.output)


@pytest.fixture(scope="module")
def text(client: Client) -> str:
    """The whole answer, from one rank."""
    return client.text("narrow", prompt=PROMPT, **LONG)


def kill(client: Client, rank: int) -> None:
    pid = next(worker["pid"] for worker in client.workers() if (worker["group"], worker["rank"]) == ("pair", rank))
    os.kill(pid, signal.SIGKILL)


def restarts(client: Client) -> dict[tuple[str, int], int]:
    return {(worker["group"], worker["rank"]): worker["restarts"] for worker in client.workers()}


def test_a_model_runs_on_the_group_that_it_was_packed_for(client: Client, text: str) -> None:
    assert client.text("wide", prompt=PROMPT, **LONG) == text
    placed = {name: model["group"] for name, model in client.models().items() if model["state"] == "resident"}
    assert placed == {"narrow": "one", "wide": "pair"}
    assert [(w["group"], w["tp"], w["pp"], w["rank"], w["state"]) for w in client.workers()] == [
        ("one", 1, 1, 0, "up"),
        ("pair", 2, 1, 0, "up"),
        ("pair", 2, 1, 1, "up"),
        *(("square", 2, 2, rank, "up") for rank in range(4)),
    ]


def test_two_models_take_turns_on_a_mesh_of_stages(client: Client, text: str) -> None:
    """Of tp 2 and pp 2, with memory for one of them."""
    other = client.text("other", prompt=PROMPT, **SHORT)
    answer = client.text("square", prompt=PROMPT, **SHORT)
    assert answer
    assert text.startswith(answer)
    assert client.models()["other"]["state"] != "resident"
    assert client.text("other", prompt=PROMPT, **SHORT) == other != answer
    assert client.models()["square"]["state"] != "resident"


def test_a_model_of_a_shape_that_no_group_has_is_refused_with_the_reason(client: Client) -> None:
    """Scenario 21: it never waits for ever."""
    refused = client.complete("deep")
    assert refused.status_code == 503
    assert "packed for tp 1, pp 2, and no group has that shape" in refused.json()["error"]["message"]


@pytest.mark.parametrize("rank", [0, 1], ids=["leader", "follower"])
def test_an_answer_goes_on_when_a_rank_dies(client: Client, text: str, rank: int) -> None:
    """The whole group is rebuilt, and no other."""
    before = restarts(client)
    with client.stream("wide", prompt=PROMPT, **LONG) as pieces:
        heard = [next(pieces), next(pieces)]
        kill(client, rank)
        assert client.text("narrow", prompt=PROMPT)
        assert "".join([*heard, *pieces]) == text
    after = restarts(client)
    assert {who for who in after if after[who] > before[who]} == {("pair", 0), ("pair", 1)}


def test_a_request_is_answered_when_a_rank_dies_while_pages_come_in(client: Client, text: str) -> None:
    client.post("/admin/models/wide/evict").raise_for_status()
    answer = client.start("wide", prompt=PROMPT, **LONG)
    client.until(lambda: client.models()["wide"]["state"] == "loading")
    kill(client, 1)
    assert answer.result(PATIENCE).json()["choices"][0]["text"] == text


def test_pages_that_are_damaged_on_one_rank_are_taken_back_on_all(
    client: Client, text: str, images: dict[str, Image]
) -> None:
    client.post("/admin/models/wide/evict").raise_for_status()
    before = restarts(client)
    shard = images["wide"].shard_path(1)
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused = client.complete("wide", prompt=PROMPT)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "load_failed"
        assert client.models()["wide"]["state"] == "failed"
        client.until(lambda: client.metric("gswapd_frames", group="pair", use="free") == 2 * 16)
    finally:
        shard.write_bytes(content)
    client.until(lambda: client.complete("wide", prompt=PROMPT).status_code == 200, PATIENCE)
    assert client.text("wide", prompt=PROMPT, **LONG) == text
    assert restarts(client) == before, "no group was rebuilt for that"


def test_more_ranks_than_there_are_gpus_are_refused_at_start_by_name(config: dict[str, Any], tmp_path: Path) -> None:
    """Scenario 21."""
    large = {**config, "cluster": {"groups": [{"name": "large", "tp": 64, "device": "cuda"}]}}
    with pytest.raises(WorkerError, match="group large wants 64 workers with 1 GPU each, but Ray has"):
        DaemonProcess(tmp_path, large).start()
