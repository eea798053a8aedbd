"""OpenTelemetry spans of requests, sent to a collector by OTLP where `telemetry.otlp_endpoint` names one.

    POST /v1/chat/completions                          what the client sees; goes on from its `traceparent`
      ├─ queue      until the scheduler sent it to a worker
      ├─ page in    what its first forward pass waited for pages
      ├─ prefill    from there to the first token
      └─ decode     from there to the last

An answer's spans are made when it ends, from times that are taken anyway. Page-ins and layers overlap: `page in` is as
long as all the waiting, and does not say when each wait was; an answer that a stop string ended has none. Without an
endpoint nothing of this is imported. Spans that the collector does not take are dropped, never waited for.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from importlib.metadata import version
from typing import Any

from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.request import Request, Tokens
from scheduler.interface import Answer
from server import request_id
from server.config import TelemetryConfig

EXPORT_TIMEOUT = 5.0  # seconds
TRACED = ("/v1/", "/api/")


class Tracing:
    """Makes spans; one a daemon."""

    def __init__(self, config: TelemetryConfig) -> None:
        resource = Resource.create({"service.name": "gswapd", "service.version": version("gswapd")})
        self._provider = TracerProvider(sampler=ParentBasedTraceIdRatio(config.sample), resource=resource)
        endpoint = f"{str(config.otlp_endpoint).rstrip('/')}/v1/traces"
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT)
        self._provider.add_span_processor(BatchSpanProcessor(exporter, export_timeout_millis=1e3 * EXPORT_TIMEOUT))
        self.tracer = self._provider.get_tracer("gswapd")

    def close(self) -> None:
        """Send what is left. Waits for the collector for a few seconds at most."""
        self._provider.shutdown()

    def follow(self, answer: Answer, request: Request) -> Answer:
        """The same answer; its spans are made when it ends, below the request's."""
        return TracedAnswer(answer, request, self.tracer)


class TracedAnswer:
    """Implements `scheduler.interface.Answer`."""

    def __init__(self, answer: Answer, request: Request, tracer: trace.Tracer) -> None:
        self._answer = answer
        self._request = request
        self._tracer = tracer
        self._parent = trace.get_current_span()
        self._began = time.time_ns()
        self._first: int | None = None
        self._tokens = 0
        self._finish = "error"

    async def __aiter__(self) -> AsyncIterator[Tokens]:
        async for report in self._answer:
            if report.tokens and self._first is None:
                self._first = time.time_ns()
            self._tokens += len(report.tokens)
            self._finish = report.finish or "cancelled"
            yield report

    @property
    def stages(self) -> Mapping[str, float]:
        return self._answer.stages

    def cancel(self) -> None:
        """However an answer ends, its reader says this, and before the request's span ends."""
        self._answer.cancel()
        self._tell()

    def _tell(self) -> None:
        if not self._parent.is_recording():
            return
        end = time.time_ns()
        first = self._first or end
        at = self._began
        for name, stage in (("queue", "queue"), ("page in", "page")):
            if stage in self._answer.stages:
                at = self._span(name, at, min(first, at + int(1e9 * self._answer.stages[stage])))
        self._span("prefill", at, first, **{"gen_ai.usage.input_tokens": self._request.prompt_tokens})
        if self._first is not None:
            self._span("decode", first, end, **{"gen_ai.usage.output_tokens": self._tokens})
        self._parent.set_attributes(
            {
                "gen_ai.request.model": self._request.model,
                "gen_ai.response.id": self._request.id,
                "gen_ai.response.finish_reasons": [self._finish],
            }
        )

    def _span(self, name: str, start: int, end: int, **attributes: Any) -> int:
        context = trace.set_span_in_context(self._parent)
        self._tracer.start_span(name, context, attributes=attributes, start_time=start).end(end)
        return end


class RequestSpans:
    """A span for every API request, as long as its answer."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracer = tracing.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(TRACED):
            await self._app(scope, receive, send)
            return
        name = f"{scope['method']} {scope['path']}"
        parent = propagate.extract(Headers(scope=scope))
        with self._tracer.start_as_current_span(name, parent, trace.SpanKind.SERVER) as span:
            span.set_attribute("gswapd.request_id", request_id.current.get())

            async def watched(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                    if message["status"] >= 500:
                        span.set_status(trace.StatusCode.ERROR)
                await send(message)

            await self._app(scope, receive, watched)
