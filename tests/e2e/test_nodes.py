"""Groups on several nodes: a node that joins late is used, one that dies takes its groups along, and may return; a hot
model is on both."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from server.demo.daemon import DaemonProcess
from swapper.store import Store
from tests.e2e.client import Client
from tests.e2e.nodes import ENVIRONMENT, PATIENCE, Node
from tests.models import make_checkpoint, make_tokenizer
from worker.add import add_model

PAGE = 2 << 20
TOKENS = 900


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one page, slow enough that an answer can be interrupted."""
    root = tmp_path_factory.mktemp("store")
    for seed, name in enumerate(("a", "b")):
        checkpoint = tmp_path_factory.mktemp(name)
        make_checkpoint(checkpoint, "llama", seed, num_hidden_layers=8, max_position_embeddings=2048)
        add_model(Store(root), make_tokenizer(checkpoint), name)
    return root


@pytest.fixture(scope="module")
def head() -> Iterator[Node]:
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as directory, Node(1, Path(directory)) as node:
        yield node


def groups(client: Client) -> dict[str, dict[str, Any]]:
    return {worker["group"]: worker for worker in client.workers()}


def test_a_node_joins_late_dies_and_returns(store: Path, head: Node, tmp_path: Path) -> None:
    """Scenario 20. Each group holds one model with the KV of one request, so what is pinned on one sends others
    elsewhere, and whom many ask for is wanted on both."""
    config = {
        "store": str(store),
        "memory": {"pool": 2 * PAGE, "page": PAGE},
        "cluster": {
            "ray_address": head.address,
            "compute_threads": 1,
            "max_batch_sequences": 1,
            "groups": [{"name": "near", "node": head.ip}, {"name": "far", "node": "127.0.0.12"}],
        },
    }
    far = Node(2, head=head.address)
    with DaemonProcess(tmp_path, config, env=ENVIRONMENT) as daemon, Client(daemon.url) as client:
        assert groups(client)["near"]["state"] == "up"
        assert groups(client)["far"]["state"] == "down"
        assert "wants 1 worker with 1 CPU on node 127.0.0.12, but Ray has" in groups(client)["far"]["reason"]
        whole = client.text("a", max_tokens=TOKENS)

        client.post("/admin/models/b/pin").raise_for_status()  # on near, which is full now
        with far:
            client.until(lambda: groups(client)["far"]["state"] == "up", PATIENCE)
            with client.stream("a", max_tokens=TOKENS, prompt="The sky is") as pieces:
                heard = [next(pieces)]
                assert client.models()["a"]["group"] == "far"
                far.kill()
                client.until(lambda: groups(client)["far"]["state"] == "down")
                assert client.text("b", max_tokens=4)
                client.post("/admin/models/b/unpin").raise_for_status()  # now there is room elsewhere
                assert "".join([*heard, *pieces]) == whole
            assert client.models()["a"]["group"] == "near"

            client.post("/admin/models/a/pin").raise_for_status()
            far.start()
            client.until(lambda: groups(client)["far"]["state"] == "up", PATIENCE)
            assert groups(client)["far"]["restarts"] == 1
            client.text("b", max_tokens=TOKENS // 4)
            assert client.models()["b"]["group"] == "far"

            client.post("/admin/models/a/unpin").raise_for_status()
            answers = [client.start("b", max_tokens=TOKENS // 4) for _ in range(6)]
            client.until(lambda: [place["running"] for place in client.models()["b"]["places"]] == [1, 1])
            assert len({answer.result(PATIENCE).json()["choices"][0]["text"] for answer in answers}) == 1
