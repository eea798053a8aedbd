"""The requests that the core knows, each with its answer: what workers report of them and what ends them.

A request stays here until nobody below can say anything of it any more, which for one whose client went away is later
than for the client. What is reported of a request that is not here came too late and is ignored.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.request import Request, RequestFailed, Started, Tokens
from scheduler.answers import LiveAnswer
from scheduler.core.events import Cancelled, Event, Finished
from scheduler.interface import Observer
from swapper.errors import Refused


def again(refusal: Refused) -> Refused:
    """The same refusal for somebody else: an exception object carries the traceback of whoever raised it."""
    return Refused(refusal.reason, str(refusal), refusal.retry_after)


class AdmittedRequests:
    """By id, in order of arrival."""

    def __init__(self, put: Callable[[Event], None], observer: Observer, clock: Callable[[], float]) -> None:
        self._put = put
        self._observer = observer
        self._clock = clock
        self._answers: dict[str, LiveAnswer] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, id: object) -> bool:
        return id in self._answers

    def open(self, request: Request) -> LiveAnswer:
        answer = self.new(request)
        self._answers[request.id] = answer
        return answer

    def new(self, request: Request) -> LiveAnswer:
        """An answer to a request that the core will not hear of."""
        return LiveAnswer(request, self._clock(), self._ended, self._cancelled)

    # ---- what the core decides

    def serve(self, id: str, group: str) -> Request:
        """What to send to the group's workers."""
        answer = self._answers[id]
        answer.group = group
        answer.served_at = self._clock()
        answer.stages = {"queue": answer.served_at - answer.at}
        return answer.remainder()

    def refuse(self, id: str, refusal: Refused) -> None:
        """The core's last word on a request; nothing if its answer has ended."""
        answer = self._answers.pop(id, None)
        if answer is not None:
            answer.refuse(refusal)

    def drop(self, id: str) -> None:
        """The core has let go of a request whose client is gone."""
        self._answers.pop(id, None)

    def cancel_all(self, refusal: Refused) -> None:
        """End every answer that is not over yet, with an error; the workers are told through the core."""
        for id, answer in self._answers.items():
            if answer.outcome is None:
                answer.refuse(again(refusal))
                self._put(Cancelled(self._clock(), id))

    def waiting_since(self) -> dict[str, float]:
        """By model, the arrival of its oldest request that took part in no forward pass yet."""
        oldest: dict[str, float] = {}
        for answer in self._answers.values():
            if not answer.started and answer.outcome is None:
                oldest.setdefault(answer.request.model, answer.at)
        return oldest

    def served(self) -> list[tuple[str, str]]:
        """Group and id of each request that a worker may have."""
        return [(answer.group, id) for id, answer in self._answers.items() if answer.group is not None]

    # ---- what the workers report

    def heard_start(self, report: Started) -> None:
        answer = self._answers.get(report.request)
        if answer is not None and not answer.started:
            answer.started = True
            self._observer.request_started(answer.request.model, self._clock() - answer.at, answer.cold)

    def heard_tokens(self, report: Tokens) -> str | None:
        """Pass tokens on. Returns the model's name if they were the request's last."""
        answer = self._answers.get(report.request)
        if answer is None:
            return None
        if answer.outcome is None and answer.has_gap_before(report):
            answer.refuse(Refused("engine_failed", "Tokens of this answer were lost between worker and daemon."))
            self._put(Cancelled(self._clock(), report.request))
        answer.deliver(report, self._clock())
        return None if report.finish is None else self._finished(answer)

    def heard_failure(self, report: RequestFailed) -> str | None:
        answer = self._answers.get(report.request)
        if answer is None:
            return None
        answer.refuse(Refused("engine_failed", report.message))
        return self._finished(answer)

    def _finished(self, answer: LiveAnswer) -> str:
        del self._answers[answer.request.id]
        self._put(Finished(self._clock(), answer.request.id))
        return answer.request.model

    # ---- what the client does

    def _cancelled(self, answer: LiveAnswer) -> None:
        self._put(Cancelled(self._clock(), answer.request.id))

    def _ended(self, answer: LiveAnswer, outcome: str) -> None:
        self._observer.request_ended(answer.request.model, outcome, self._clock() - answer.at)
