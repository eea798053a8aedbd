"""The core's words and the workers' words for the same things, each way. Pure functions."""

from __future__ import annotations

from engine import request as engine
from scheduler.core import actions, events
from scheduler.interface import GroupCommand, ServedModel
from worker import protocol

CoreReport = (
    engine.Started
    | engine.KvWanted
    | engine.KvReleased
    | engine.Suspended
    | engine.Resumed
    | protocol.PagedIn
    | protocol.PageInFailed
    | protocol.PagedOut
    | protocol.PageOutFailed
    | protocol.GroupUp
    | protocol.GroupLost
)
"""Reports that the core decides by, as they are. Tokens and RequestFailed reach it as Finished."""

_RANK_BITS = 16


def model_spec(model: ServedModel) -> events.ModelSpec:
    """A page's identity is its hash, as a number, and its rank: ranks share nothing, each has its own frames."""
    return events.ModelSpec(
        model.name,
        tuple(
            tuple(int(page_hash, 16) << _RANK_BITS | rank for page_hash in shard)
            for rank, shard in enumerate(model.page_hashes)
        ),
        pp=model.pp,
        max_wait=model.max_wait,
        slo=model.slo,
        priority=model.priority,
        ttl=model.ttl,
        page_seconds=model.page_seconds,
        run_seconds=model.run_seconds,
    )


def event_of(report: CoreReport, group: str, at: float) -> events.Event:
    match report:
        case engine.Started():
            return events.Started(at, report.request)
        case engine.KvWanted():
            return events.KvWanted(at, group, report.model, report.frames)
        case engine.KvReleased():
            return events.KvReleased(at, group, report.model, report.epoch, report.frames)
        case engine.Suspended():
            return events.Suspended(at, group, report.model, report.epoch, report.kv_frames)
        case engine.Resumed():
            return events.Resumed(at, group, report.model, report.epoch)
        case protocol.PagedIn():
            return events.PagedIn(at, group, report.model, report.epoch, report.last)
        case protocol.PageInFailed():
            return events.PageInFailed(at, group, report.model, report.epoch, report.message)
        case protocol.PagedOut():
            return events.PagedOut(at, group, report.model, report.epoch, report.keep)
        case protocol.PageOutFailed():
            return events.PageOutFailed(at, group, report.model, report.epoch, report.message)
        case protocol.GroupUp():
            return events.WorkerUp(at, group, report.frames, report.tp * report.pp, report.pp)
        case protocol.GroupLost():
            return events.WorkerLost(at, group, report.message)


def command_of(
    action: actions.PageOut | actions.GrantKv | actions.Suspend | actions.Resume | actions.Cancel,
) -> GroupCommand:
    match action:
        case actions.PageOut():
            return protocol.PageOut(action.model, action.keep, action.epoch)
        case actions.GrantKv():
            return protocol.GrantKv(action.model, action.frames, action.epoch)
        case actions.Suspend():
            return protocol.Suspend(action.model, action.epoch)
        case actions.Resume():
            return protocol.Resume(action.model, action.kv_frames, action.epoch)
        case actions.Cancel():
            return protocol.Cancel(action.request)
