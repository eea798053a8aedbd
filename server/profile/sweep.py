"""The sweep over one model on one daemon: points, page-ins, the breaking point, accuracy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.traffic import Call, calls
from server.profile.accuracy import Yardstick
from server.profile.document import Accuracy, BreakingPoint, Memory, Moved, PageIn, Point, Spread
from server.profile.measure import Batch, Client
from swapper.geometry import kv_blocks, kv_capacity_blocks
from swapper.image import Image

_SEEN = {"all_reduce", "all_gather"}
"""What torch.profiler can tell from other kernels."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to sweep. Every batch size is run at every prompt length."""

    batches: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: int
    repeat: int


@dataclass(frozen=True, slots=True)
class Place:
    """The group a model runs on: its ranks' memory, and what its engine takes into a pass."""

    frames: int
    page_bytes: int
    max_batch_sequences: int
    max_batch_tokens: int


class Sweep:
    def __init__(self, client: Client, image: Image, place: Place, tell: Tell) -> None:
        self._client = client
        self._image = image
        self._place = place
        self._tell = tell
        self._shards = image.manifest.shards
        self._calls = [calls(image, rank) for rank in range(len(self._shards))]
        self._seed = 0

    async def page_ins(self, times: int) -> tuple[PageIn, ...]:
        """From wherever the pages are by now."""
        loads = [await self._client.load() for _ in range(times)]
        return tuple(_page_in(load) for load in loads)

    async def points(self, plan: Plan) -> tuple[Point, ...]:
        """Smallest first. Batches that cannot run at once are left out."""
        await self._client.run(1, min(plan.prompt_tokens), 2, self._next_seed())  # what only the first one pays
        points = []
        for prompt_tokens in plan.prompt_tokens:
            for batch in plan.batches:
                if batch > self.largest_batch(prompt_tokens + plan.output_tokens):
                    self._tell(f"batch {batch} of {prompt_tokens} + {plan.output_tokens} tokens: left out, too large")
                    continue
                runs = [
                    await self._client.run(batch, prompt_tokens, plan.output_tokens, self._next_seed())
                    for _ in range(plan.repeat)
                ]
                points.append(self._point(batch, prompt_tokens, plan.output_tokens, runs))
                self._tell(_line(points[-1]))
        return tuple(points)

    async def collectives(self, points: Sequence[Point]) -> tuple[Point, ...]:
        """The same points with the time of collectives, as torch.profiler sees it: on a GPU nobody else does."""
        return tuple([await self._seen(point) if _SEEN & point.moved.keys() else point for point in points])

    async def _seen(self, point: Point) -> Point:
        size = point.batch, point.prompt_tokens, point.output_tokens
        ran = await self._client.run(*size, self._next_seed(), torch_profiler="kernels")
        moved = {
            kind: its.model_copy(update={"seconds": _seconds_in_steps(ran, kind, point.batch)})
            for kind, its in point.moved.items()
        }
        return point.model_copy(update={"moved": moved})

    async def breaking_point(self, tokens: int) -> BreakingPoint:
        """Predicted by arithmetic, and then run: a few more requests than should fit."""
        predicted = self.largest_batch(tokens)
        asked = math.ceil(predicted * 1.05) + 2
        output_tokens = lasting_answer(asked, tokens, self._place.max_batch_tokens)
        prompt_tokens = tokens - output_tokens
        ran = await self._client.run(asked, prompt_tokens, output_tokens, self._next_seed())
        observed = max((its["decoded"] for its in ran.passes()), default=0)
        again = sum(its["prefilled"] for its in ran.passes()) > asked * prompt_tokens
        engine = self._most_sequences
        return BreakingPoint(
            tokens=tokens,
            predicted=predicted,
            observed=observed,
            limited_by="engine" if observed >= engine else "memory",
            preempted=again,
        )

    async def accuracy(self, text: Yardstick | None) -> Accuracy | None:
        if text is None:
            return None
        scored, reference = await self._client.score(text.tokens), text.reference
        logprobs = scored["token_logprobs"][1:]
        best = [max(top, key=top.__getitem__) for top in scored["top_logprobs"][1:]]
        return Accuracy(
            tokens=len(text.tokens),
            perplexity=math.exp(-sum(logprobs) / len(logprobs)),
            reference=reference.perplexity if reference is not None else None,
            agreement=reference.agreement(best) if reference is not None else None,
        )

    def largest_batch(self, tokens: int) -> int:
        """Sequences of so many tokens that can run at once, by the arithmetic of blocks and frames alone."""
        if tokens > self._image.manifest.context_length:
            return 0
        free = max(0, self._place.frames - self._pages)
        blocks = kv_capacity_blocks(free, self._image.manifest.kv_bytes_per_token, self._place.page_bytes)
        return min(blocks // kv_blocks(tokens), self._most_sequences)

    @property
    def _most_sequences(self) -> int:
        """Each has a token in every pass."""
        return min(self._place.max_batch_sequences, self._place.max_batch_tokens)

    @property
    def _pages(self) -> int:
        """Of weights, on the rank that has most: ranks move in lockstep."""
        return max(shard.page_count(self._place.page_bytes) for shard in self._shards)

    # ----

    def _point(self, batch: int, prompt_tokens: int, output_tokens: int, runs: Sequence[Batch]) -> Point:
        prefills = [[its for its in ran.passes() if its["prefilled"]] for ran in runs]
        decodes = [
            its["seconds"] for ran in runs for its in ran.passes() if not its["prefilled"] and its["decoded"] == batch
        ]
        prefill = Spread.of([sum(its["seconds"] for its in passes) for passes in prefills])
        assert prefill is not None
        return Point(
            batch=batch,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            prefill=prefill,
            prefill_passes=min(map(len, prefills)),
            decode=Spread.of(decodes),
            first_token=_spread([answer.first_token for ran in runs for answer in ran.answers]),
            latency=_spread([answer.last_token for ran in runs for answer in ran.answers]),
            tokens_per_second=_spread([batch * output_tokens / ran.seconds for ran in runs]),
            busy=_median([sum(its["seconds"] for its in ran.passes()) / ran.seconds for ran in runs]),
            gpu_busy=_median_or_none([its for ran in runs for its in ran.readings("gpu_busy")]),
            joules=_median_or_none(
                [sum(its) / batch / output_tokens for ran in runs if (its := ran.readings("joules"))]
            ),
            moved=self._moved(batch, runs),
            memory=self._memory(runs),
        )

    def _memory(self, runs: Sequence[Batch]) -> Memory:
        """Of the rank whose KV cache grew most: the first that has no frame left."""
        ranks = [(shard, rank["peaks"]) for ran in runs for shard, rank in zip(self._shards, ran.ranks, strict=True)]
        shard, peaks = max(ranks, key=lambda its: its[1].get("kv_bytes", 0))
        weights, kv = shard.nbytes, peaks.get("kv_bytes", 0)
        return Memory(
            weights=weights,
            kv=kv,
            fragmentation=peaks["frames"] - weights - kv,
            frames=peaks["frames"],
            mapped=peaks.get("mapped"),
            activations=peaks.get("allocated"),
            reserved=peaks.get("reserved"),
            graphs=peaks.get("graphs"),
            device=peaks.get("device"),
            nvml=max((int(its) for ran in runs for its in ran.readings("nvml")), default=None),
            pool=peaks.get("pool"),
        )

    def _moved(self, batch: int, runs: Sequence[Batch]) -> dict[str, Moved]:
        """By kind, on the rank that moves most of it."""
        moved: dict[str, Moved] = {}
        for rank, made in enumerate(self._calls):
            for kind in dict.fromkeys(call.kind for call in made):
                of_kind = [call for call in made if call.kind == kind]
                nbytes = sum(call.nbytes(batch, batch) for call in of_kind)
                if kind not in moved or nbytes > moved[kind].nbytes:
                    moved[kind] = Moved(
                        calls=len(of_kind),
                        nbytes=nbytes,
                        seconds=_seconds_in_steps(runs[-1], kind, batch) if rank == 0 else None,
                        counted=runs[-1].ranks[rank]["moved"].get(kind, (0, 0))[1],
                        expected=sum(_bytes_of(one, of_kind) for one in runs[-1].passes()),
                    )
        return moved

    def _next_seed(self) -> int:
        self._seed += 1
        return self._seed


def lasting_answer(sequences: int, tokens: int, pass_tokens: int) -> int:
    """How many of a sequence's tokens must be its answer's, for the first sequences to be there still when the last one
    has begun. Their decodes take part of the passes that prompts need."""
    passes = sequences / max(1, pass_tokens - sequences)  # at most, for a token of each prompt
    return min(math.ceil((tokens * passes + 8) / (1 + passes)), tokens - 1)


def _bytes_of(one: Mapping[str, Any], made: Sequence[Call]) -> int:
    """What calls move in a pass."""
    return sum(call.nbytes(one["prefilled"] + one["decoded"], one["sampled"]) for call in made)


def _seconds_in_steps(ran: Batch, kind: str, batch: int) -> float | None:
    """Of one kind in a decode step of the whole batch, on the leader, on average: a step that is launched ahead begins
    in the time of the one before. None if it ran where nobody saw it."""
    steps = [its for its in ran.passes() if not its["prefilled"] and its["decoded"] == batch]
    spans = [span for span in ran.ranks[0]["spans"] if span["name"] == kind]
    within = [
        span["seconds"] for step in steps for span in spans if step["at"] <= span["at"] < step["at"] + step["seconds"]
    ]
    return sum(within) / len(steps) if within else None


def _page_in(load: Mapping[str, Any]) -> PageIn:
    sources = {name: part for name, part in load["sources"].items() if part["bytes"]}
    return PageIn(
        source=max(sources, key=lambda name: sources[name]["bytes"], default="none"),
        nbytes=sum(part["bytes"] for part in sources.values()),
        pages=load["pages"],
        seconds=load["seconds"],
    )


def _line(point: Point) -> str:
    step = "never all at once (use more --output-tokens)"
    if point.decode is not None:
        step = f"{point.decode.median * 1e3:8.2f} ms a step"
    return (
        f"{point.batch:4} × {point.prompt_tokens:5} tokens: prefill {point.prefill.median * 1e3:8.1f} ms, {step}, "
        f"{point.tokens_per_second.median:8.1f} tokens/s"
    )


def _spread(values: Sequence[float]) -> Spread:
    spread = Spread.of(values)
    assert spread is not None
    return spread


def _median_or_none(values: Sequence[float]) -> float | None:
    return _median(values) if values else None


def _median(values: Sequence[float]) -> float:
    return _spread(values).median
