"""An engine without forward passes: it knows models, answers as the real one does, and keeps a diary."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.request import EngineReport, GenerationRequest, KvReleased, Resumed, Started, Suspended, Tokens
from swapper.pager import PagedShard


class FakeModule:
    def __init__(self, name: str) -> None:
        self.name = name


class FakeEngine:
    def __init__(self, emit: Callable[[Sequence[EngineReport]], None]) -> None:
        self.diary: list[tuple[object, ...]] = []
        self.running: dict[str, GenerationRequest] = {}
        self.models: set[str] = set()
        self.steps = 0
        self.busy = False
        self.in_a_pass: set[str] = set()  # models whose fence does not pass
        self.emit = emit

    def add(self, model: FakeModule, shard: PagedShard) -> None:
        self.models.add(model.name)
        self.diary.append(("add", model.name))

    def remove(self, name: str) -> None:
        self.models.remove(name)
        self.diary.append(("remove", name))

    def submit(self, request: GenerationRequest) -> None:
        assert request.model in self.models
        if request.id in self.running:
            raise ValueError(f"The engine has a request {request.id} already.")
        self.running[request.id] = request
        self.emit([Started(request.id)])

    def cancel(self, request: str) -> None:
        if self.running.pop(request, None) is not None:
            self.emit([Tokens(request, 0, (), finish="cancelled")])

    def grant_kv(self, model: str, frames: int, epoch: int) -> None:
        assert model in self.models
        self.emit([KvReleased(model, frames, epoch)])

    def suspend(self, model: str, epoch: int) -> None:
        assert model in self.models
        self.emit([Suspended(model, len(self.running), epoch)])

    def resume(self, model: str, kv_frames: int, epoch: int) -> None:
        assert model in self.models
        self.emit([Resumed(model, epoch)])

    def abort(self, model: str) -> None:
        if model not in self.models:
            raise KeyError(model)
        self.running = {id_: request for id_, request in self.running.items() if request.model != model}
        self.diary.append(("abort", model))

    def fence(self, model: str) -> None:
        if model not in self.models:
            raise KeyError(model)
        if model in self.in_a_pass:
            raise TimeoutError(f"Model {model} is still in a forward pass after 60 s.")

    def close(self) -> None:
        self.diary.append(("close",))
