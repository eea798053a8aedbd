"""A collector hears where a request's time went."""

from __future__ import annotations

import gzip
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from tokenizers import Tokenizer

from server.config import TelemetryConfig
from server.tracing import Tracing
from swapper.errors import Refused
from tests.server.conftest import ServerThread, config, publish
from tests.server.fakes import WAIT
from tests.server.test_chat import script

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP/HTTP receiver."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                assert self.path == "/v1/traces"
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Collector:
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> dict[str, Span]:
        spans = [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        assert len({span.name for span in spans}) == len(spans)
        return {span.name: span for span in spans}


class House:
    def __init__(self, server: ServerThread, collector: Collector, life: ExitStack) -> None:
        self.server = server
        self._collector = collector
        self._life = life

    def ask(self, **more: object) -> httpx.Response:
        headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "me-1"}
        with self.server.client(headers=headers) as client:
            return client.post("/v1/completions", json={"model": "smol", "prompt": "Hello", **more})

    def spans(self) -> dict[str, Span]:
        """All of them, once the daemon has ended."""
        self._life.close()
        return self._collector.spans()


@pytest.fixture
def house(tmp_path: Path, smollm2: Path) -> Iterator[House]:
    with Collector() as collector:
        tracing = Tracing(TelemetryConfig(otlp_endpoint=collector.url))  # type: ignore[arg-type]
        with ExitStack() as life:
            life.callback(tracing.close)
            server = life.enter_context(ServerThread(config(tmp_path), tracing))
            publish(server.store, "smol", smollm2)
            yield House(server, collector, life)


def attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
def test_a_requests_stages_are_spans_below_it_and_it_goes_on_from_its_callers(
    house: House, tokenizer: Tokenizer, stream: bool
) -> None:
    house.server.scheduler.script = script(tokenizer, "One two three")
    house.server.scheduler.stages = {"queue": 1e-5, "page": 1e-5, "compute": 1.0}
    house.ask(stream=stream).raise_for_status()
    spans = house.spans()
    request = spans.pop("POST /v1/completions")
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == (TRACE, CALLER)
    assert list(spans) == ["queue", "page in", "prefill", "decode"]
    assert {span.parent_span_id for span in spans.values()} == {request.span_id}
    times = [time for span in spans.values() for time in (span.start_time_unix_nano, span.end_time_unix_nano)]
    assert times == sorted(times), "one begins where the one before ends"
    assert request.start_time_unix_nano <= times[0] <= times[-1] <= request.end_time_unix_nano
    told = attributes(request)
    assert told["gswapd.request_id"] == "me-1"
    assert told["gen_ai.request.model"] == "smol"
    assert told["http.response.status_code"] == 200
    assert attributes(spans["decode"]) == {"gen_ai.usage.output_tokens": 3}


def test_a_request_that_fails_is_an_error(house: House) -> None:
    house.server.scheduler.script = [Refused("no_memory", "It does not fit.")]
    assert house.ask().status_code == 503
    spans = house.spans()
    assert spans["POST /v1/completions"].status.code == 2
    assert "decode" not in spans


def test_a_client_that_goes_leaves_a_trace(house: House) -> None:
    house.server.scheduler.script = [[500], WAIT]
    with (
        house.server.client() as client,
        client.stream("POST", "/v1/completions", json={"model": "smol", "prompt": "Hello", "stream": True}) as answer,
    ):
        next(answer.iter_bytes())
    assert house.server.scheduler.cancellation.wait(10)
    told = attributes(house.spans()["POST /v1/completions"])
    assert [one.string_value for one in told["gen_ai.response.finish_reasons"].values] == ["cancelled"]  # type: ignore[attr-defined]


def test_a_collector_that_is_not_there_holds_nothing_up(tmp_path: Path, smollm2: Path) -> None:
    tracing = Tracing(TelemetryConfig(otlp_endpoint="http://127.0.0.1:9"))  # type: ignore[arg-type]
    with ServerThread(config(tmp_path), tracing) as server, server.client() as client:
        publish(server.store, "smol", smollm2)
        answers = [client.post("/v1/completions", json={"model": "smol", "prompt": "Hello"}) for _ in range(3)]
        assert {answer.status_code for answer in answers} == {200}
    tracing.close()


def test_without_an_endpoint_nothing_of_it_is_imported() -> None:
    code = "import sys, server.daemon; sys.exit('opentelemetry.sdk' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
