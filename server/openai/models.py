"""GET /v1/models: what can be asked for, aliases too."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.catalog import CatalogModel
from server.service import service_of

router = APIRouter()


@router.get("/models")
async def list_models(request: Request) -> dict[str, Any]:
    catalog = service_of(request).catalog
    await catalog.refresh()
    data = [
        _describe(name, model)
        for model in catalog.models.values()
        for name in (model.name, *catalog.aliases(model.name))
    ]
    return {"object": "list", "data": data}


@router.get("/models/{name:path}")
async def get_model(request: Request, name: str) -> dict[str, Any]:
    return _describe(name, await service_of(request).catalog.find(name))


def _describe(name: str, model: CatalogModel) -> dict[str, Any]:
    """`root` is the model an alias stands for; it and `max_model_len` are vLLM's additions."""
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "gswapd",
        "root": model.name,
        "max_model_len": model.context_length,
    }
