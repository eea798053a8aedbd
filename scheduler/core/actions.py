"""What the scheduler wants done: imperative. Whoever runs the core carries them out in order.

An asynchronous action carries an epoch; its completion comes back with the same one. A completion with another epoch
than the one awaited speaks of a world that is gone: it frees what it held and changes nothing else.
"""

from __future__ import annotations

from typing import Literal

from scheduler.core.message import message

Reason = Literal[
    "model_not_found",
    "queue_full",
    "no_memory",  # it cannot fit: too large, or what is pinned leaves too little
    "pinned",  # evict of a pinned model
    "load_failed",
    "timeout",  # its deadline passed before its first step
    "removed",
    "draining",
    "engine_failed",  # the group was lost, its pages cannot be taken, or the live driver says so
]


@message
class PageIn:
    group: str
    model: str
    first: int
    last: int  # exclusive
    epoch: int


@message
class PageOut:
    group: str
    model: str
    keep: int
    epoch: int


@message
class GrantKv:
    group: str
    model: str
    frames: int
    epoch: int


@message
class Serve:
    request: str
    group: str


@message
class Suspend:
    """Stop all running requests of a model between two passes, keep their keys and values elsewhere, and give up all
    its KV frames. It is a grant of no frames too: answered by Suspended, and by no KvReleased.
    """

    group: str
    model: str
    epoch: int


@message
class Resume:
    """Let a suspended model go on; its pages may still be on their way. It is a grant of `kv_frames` too, answered by
    Resumed, and by no KvReleased.
    """

    group: str
    model: str
    kv_frames: int
    epoch: int


@message
class Cancel:
    """Stop a running request; its Finished still comes."""

    request: str
    group: str


@message
class Reject:
    """A request or job was not admitted. Its last word."""

    id: str
    reason: Reason
    message: str
    retry_after: float | None = None


@message
class Fail:
    """An admitted request or job ends without its result. Its last word."""

    id: str
    reason: Reason
    message: str
    retry_after: float | None = None


@message
class Done:
    """A job (load, evict, pin, unpin) is done. Its last word."""

    job: str


@message
class WakeAt:
    """Send a Tick at this time, unless an earlier one is asked for later."""

    at: float


Action = PageIn | PageOut | GrantKv | Serve | Suspend | Resume | Cancel | Reject | Fail | Done | WakeAt
