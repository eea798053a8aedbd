"""The real server on a real port, over a scripted scheduler, a real store and SmolLM2's real tokenizer."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from server.catalog import Catalog
from server.config import Config
from server.daemon import HttpServer, bind, url_of
from server.observers import Observers
from server.service import Service
from server.tokens import Tokenizers
from server.tracing import Tracing
from swapper.image import MANIFEST, Embedding, Manifest, Shard
from swapper.store import Store
from tests.server.fakes import TIMEOUT, FakeScheduler

CONTEXT = 256


def publish(
    store: Store,
    name: str,
    tokenizer: Path,
    tp: int = 1,
    pp: int = 1,
    files: dict[str, str] | None = None,
    embedding: Embedding | None = None,
) -> None:
    """Put an image into the store: everything a real one has for the server, but weights."""
    with store.adding(name) as path:
        for file in tokenizer.iterdir():
            if file.is_file() and file.suffix != ".safetensors":
                shutil.copy(file, path)
        for file_name, text in (files or {}).items():
            (path / file_name).write_text(text)
        shards = tuple(Shard(rank, f"rank-{rank}.safetensors", 4096, 4096, ("ab",), (), ()) for rank in range(tp * pp))
        for shard in shards:
            (path / shard.file).write_bytes(bytes(8192))
        manifest = Manifest(
            1, name, f"print of {name}", "LlamaForCausalLM", "bfloat16", tp, pp, CONTEXT, 1024, shards, embedding
        )
        (path / MANIFEST).write_text(manifest.to_json())


class ServerThread:
    """The HTTP server with its own event loop in a thread."""

    def __init__(self, config: Config, tracing: Tracing | None = None) -> None:
        self.store = Store(config.store)
        self.scheduler = FakeScheduler()
        self.observers = Observers()
        self.tracing = tracing
        self.metrics = self.observers.metrics
        self.loop = asyncio.new_event_loop()
        self._config = config
        self._ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        self.loop.run_until_complete(self._serve())
        self.loop.close()

    async def _serve(self) -> None:
        config = self._config
        listener = bind(config.server)
        self.url = url_of(listener)
        self.metrics.watch(self.scheduler, config.scheduler.wait_bound)
        self.catalog = Catalog(
            self.store, self.scheduler, config.models, config.memory.page, config.cluster.groups, self.metrics
        )
        tokenizers = Tokenizers(config.server.tokenizer_threads)
        self.service = Service(
            config, self.scheduler, self.catalog, tokenizers, self.metrics, self.observers.events, self.tracing
        )
        self.http = HttpServer(self.service)
        self._ready.set_result(None)
        await self.http.serve([listener])
        await self.catalog.close()
        await self.service.adds.close()
        await self.service.background.close()
        tokenizers.close()

    def call(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(TIMEOUT)

    def __enter__(self) -> ServerThread:
        self._thread.start()
        self._ready.result(TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        self.http.should_exit = True
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive()

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=TIMEOUT, **options)

    def openai(self, key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=TIMEOUT)


def config(tmp_path: Path, **sections: Any) -> Config:
    server = {"port": 0} | sections.pop("server", {})
    memory = {"pool": "64MiB", "page": "2MiB"}
    return Config(store=tmp_path / "store", server=server, memory=memory, **sections)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[ServerThread]:
    models = {
        "smol": {"aliases": ["tiny", "gpt-4o"]},
        "tuned": {"defaults": {"temperature": 0.25, "top_k": 7, "max_tokens": 5}},
    }
    with ServerThread(config(tmp_path_factory.mktemp("server"), models=models)) as server:
        for name in ("smol", "tuned", "org/base"):
            publish(server.store, name, smollm2)
        yield server


@pytest.fixture
def server(shared_server: ServerThread) -> ServerThread:
    shared_server.scheduler.reset()
    return shared_server


@pytest.fixture
def scheduler(server: ServerThread) -> FakeScheduler:
    return server.scheduler


@pytest.fixture(scope="session")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture
def openai(server: ServerThread) -> Iterator[OpenAI]:
    with server.openai() as client:
        yield client


@pytest.fixture
def http(server: ServerThread) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client
