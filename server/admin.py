"""The operator's routes: what is in memory, moving it, and whether the daemon is well."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, fields
from typing import Any, Literal

import orjson
from fastapi import APIRouter, Depends, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import Field

from engine.recorder import Recording, TorchProfiler
from scheduler.interface import LoadRecord, ModelStatus, WorkerStatus
from server.background import Act
from server.errors import ApiError
from server.openai.messages import Part
from server.openai.schemas import parse
from server.reload import reload
from server.service import Service, service_of
from swapper.errors import ModelNotFound, Refused, WorkerError
from swapper.store import Store


async def _known_query(request: Request) -> None:
    """Actions take `wait`, recordings `torch_profiler`, and nothing else is let pass in silence."""
    known = "torch_profiler" if request.url.path.endswith("/recording") else "wait"
    for name in request.query_params:
        if request.method != "POST" or name != known:
            raise ApiError(400, f"Parameter '{name}' is not supported.", "unsupported_parameter", name)


class AddRequest(Part):
    source: str = Field(min_length=1, max_length=4096)
    name: str
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    tp: int = Field(default=1, ge=1, le=64)
    pp: int = Field(default=1, ge=1, le=64)


router = APIRouter(prefix="/admin", dependencies=[Depends(_known_query)])
health = APIRouter()


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    service = service_of(request)
    await service.catalog.refresh()
    return {
        "models": [model_json(service, status) for status in models_there(service)],
        "adding": [asdict(add) for add in service.adds.known.values()],
        "problems": [{"name": name, "reason": why} for name, why in sorted(service.catalog.problems.items())],
    }


@router.post("/models")
async def add_model(request: Request, wait: bool = True) -> Response:
    """Add a checkpoint of this machine to the store; without `wait`, answer at once, and tell in GET how far it is."""
    service = service_of(request)
    body = parse(AddRequest, await service.bodies.read(request, service.config.server.max_body))
    add = service.adds.start(body.name, body.source, body.dtype, body.tp, body.pp)
    if wait:
        await service.adds.wait(add)
    return Response(orjson.dumps(add), 201 if wait else 202, media_type="application/json")


@router.delete("/models/{name:path}")
async def remove_model(request: Request, name: str) -> dict[str, str]:
    """Take a model from the store. Its running requests finish, those that wait fail."""
    service = service_of(request)
    await asyncio.to_thread(Store(service.config.store).remove, name)
    await service.catalog.refresh()
    return {"removed": name}


@router.post("/reload")
async def reload_configuration(request: Request) -> dict[str, list[str]]:
    return {"changed": await reload(service_of(request))}


@router.get("/workers")
async def workers(request: Request) -> dict[str, Any]:
    return {"workers": [asdict(worker) for worker in service_of(request).scheduler.workers()]}


@router.post("/groups/{group}/recording")
async def begin_recording(request: Request, group: str, torch_profiler: TorchProfiler = "off") -> dict[str, str]:
    """Have the workers of a group keep what their passes take, until it is taken by DELETE."""
    await _record(request, group, True, torch_profiler)
    return {"group": group, "recording": "on"}


@router.delete("/groups/{group}/recording")
async def end_recording(request: Request, group: str) -> Response:
    """End a recording, and answer with it: one entry a rank. Torch's trace is Chrome's, compressed, in base 64."""
    ranks = await _record(request, group, False)
    body = orjson.dumps({"group": group, "ranks": ranks}, default=lambda trace: b64encode(trace).decode())
    return Response(body, media_type="application/json")


async def _record(
    request: Request, group: str, on: bool, torch_profiler: TorchProfiler = "off"
) -> Sequence[Recording | None]:
    try:
        return await service_of(request).scheduler.record(group, on, torch_profiler)
    except WorkerError as error:
        raise ApiError(409, str(error), "not_recording", "group") from None


@router.post("/models/{name:path}/load")
async def load(request: Request, name: str, wait: bool = True) -> Response:
    """What an earlier request's `keep_alive` said is over: the model stays."""
    catalog = service_of(request).catalog
    catalog.keep_alive((await catalog.find(name)).name, None)
    return await _act(request, name, "load", service_of(request).scheduler.load, wait)


@router.post("/models/{name:path}/evict")
async def evict(request: Request, name: str, wait: bool = True) -> Response:
    return await _act(request, name, "evict", service_of(request).scheduler.evict, wait)


@router.post("/models/{name:path}/pin")
async def pin(request: Request, name: str, wait: bool = True) -> Response:
    try:
        return await _act(request, name, "pin", service_of(request).scheduler.pin, wait)
    except Refused as refusal:
        if refusal.reason != "no_memory":
            raise
        # The pins do not fit together: a conflict with what was asked for before, which waiting does not solve.
        raise ApiError(409, str(refusal), "no_memory", "model") from None


@router.post("/models/{name:path}/unpin")
async def unpin(request: Request, name: str, wait: bool = True) -> Response:
    return await _act(request, name, "unpin", service_of(request).scheduler.unpin, wait)


async def _act(request: Request, alias: str, action: str, act: Act, wait: bool) -> Response:
    """Do it and answer with what came of it; without `wait`, answer 202 at once."""
    service = service_of(request)
    name = (await service.catalog.find(alias)).name
    if wait:
        await act(name)
    else:
        service.background.start(f"{action} {name}", act, name)
    status = next((status for status in service.scheduler.models() if status.name == name), None)
    if status is None:
        raise ModelNotFound(f"The model {name!r} was removed meanwhile.")
    return Response(orjson.dumps(model_json(service, status)), 200 if wait else 202, media_type="application/json")


def models_there(service: Service) -> list[ModelStatus]:
    """A model that was removed from the store is shown as long as it holds anything."""
    known = service.catalog.models
    return [m for m in service.scheduler.models() if m.name in known or m.resident_pages or m.running or m.waiting]


def model_json(service: Service, status: ModelStatus) -> dict[str, Any]:
    return {
        **{field.name: getattr(status, field.name) for field in fields(status)},
        "aliases": service.catalog.aliases(status.name),
        "last_load": None if status.last_load is None else _load(status.last_load),
    }


def _load(record: LoadRecord) -> dict[str, Any]:
    return {
        "at": record.at,
        "group": record.group,
        "seconds": record.seconds,
        "pages": record.pages,
        "sources": {name: {"pages": part.pages, "bytes": part.nbytes} for name, part in record.sources.items()},
        "stages": dict(record.stages),
        "error": record.error,
    }


@health.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process answers. Whether it can serve is `/readyz`."""
    return {"status": "ok"}


@health.get("/readyz")
async def readyz(request: Request) -> Response:
    """200 if requests will be served: the scheduler makes progress, a group is up, and no shutdown has begun."""
    service = service_of(request)
    live = service.scheduler.is_live()
    details = {
        "ready": live and not service.draining,
        "scheduler": "ok" if live else "no progress, or no group of workers is up",
        "draining": service.draining,
        "workers": [
            {
                "group": worker.group,
                "rank": worker.rank,
                "state": worker.state,
                "reason": worker.reason,
                "host_tier": _host_tier(worker),
            }
            for worker in service.scheduler.workers()
        ],
        "models": len(service.catalog.models),
    }
    return Response(orjson.dumps(details), 200 if details["ready"] else 503, media_type="application/json")


def _host_tier(worker: WorkerStatus) -> dict[str, int] | None:
    """How far the host tier is; requests are served all the while."""
    tier = worker.heartbeat.tier if worker.heartbeat is not None else None
    return None if tier is None else {"slots": tier.slots, "ready": tier.ready, "used": tier.used}


@health.get("/metrics")
async def metrics(request: Request) -> Response:
    return Response(await service_of(request).metrics.exposition(), headers={"Content-Type": CONTENT_TYPE_LATEST})
