"""The status page at `/`, and the events it lives on.

The page is three files of the package, without a build step and without a network; it may run and ask nothing but what
comes from here. Whoever may see the daemon may have the page; what it shows needs the admin key.
"""

from __future__ import annotations

from dataclasses import asdict
from importlib.resources import files
from itertools import islice
from typing import Any

from fastapi import APIRouter, Request, Response

from scheduler.interface import WorkerStatus
from server.admin import model_json, models_there
from server.errors import ApiError
from server.events import State
from server.openai.connection import EventStream
from server.service import Service, service_of

ASSETS = {
    "index.html": "text/html",
    "style.css": "text/css",
    "page.js": "text/javascript",
    "events.js": "text/javascript",
    "memory.js": "text/javascript",
    "timeline.js": "text/javascript",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

MOST_DECISIONS = 100

page = APIRouter()
router = APIRouter(prefix="/admin")


@page.get("/")
async def index() -> Response:
    return _asset("index.html")


@page.get("/page/{name}")
async def asset(name: str) -> Response:
    if name not in ASSETS:
        raise ApiError(404, f"There is no /page/{name} here.", "not_found")
    return _asset(name)


def _asset(name: str) -> Response:
    headers = {
        "Cache-Control": "no-cache",
        "Content-Security-Policy": POLICY,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    content = (files("server") / "page" / name).read_bytes()
    return Response(content, headers=headers, media_type=ASSETS[name])


@router.get("/events")
async def stream(request: Request) -> Response:
    service = service_of(request)
    last_id = request.headers.get("last-event-id", "")
    return await EventStream.open(request, service.events.stream(lambda: state(service), last_id))


@router.get("/decisions")
async def decisions(request: Request, model: str | None = None) -> dict[str, Any]:
    service = service_of(request)
    name = None if model is None else (await service.catalog.find(model)).name
    decided = islice(service.scheduler.decisions(name), MOST_DECISIONS)
    return {"decisions": [asdict(one) for one in decided]}


def state(service: Service) -> State:
    return {
        "daemon": {
            "live": service.scheduler.is_live(),
            "draining": service.draining,
            "wait_bound": service.config.scheduler.wait_bound,
        },
        "models": {status.name: model_json(service, status) for status in models_there(service)},
        "problems": dict(service.catalog.problems),
        "workers": {f"{worker.group}/{worker.rank}": _worker(worker) for worker in service.scheduler.workers()},
        "memory": {one.group: asdict(one) for one in service.scheduler.memory()},
    }


def _worker(worker: WorkerStatus) -> dict[str, object]:
    """What of a worker does not change with every look."""
    tier = worker.heartbeat.tier if worker.heartbeat is not None else None
    return {
        "group": worker.group,
        "rank": worker.rank,
        "state": worker.state,
        "restarts": worker.restarts,
        "device": worker.device,
        "reader": worker.reader,
        "host_tier": None if tier is None else {"slots": tier.slots, "ready": tier.ready, "used": tier.used},
    }
