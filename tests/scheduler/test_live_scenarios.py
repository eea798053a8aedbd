"""Trouble that users of such servers have met, driven through the live driver and scripted workers."""

from __future__ import annotations

import pytest

from scheduler.core.config import CoreConfig
from swapper.errors import Refused
from tests.scheduler.fake_group import PAGE_BYTES, FakeGroup
from tests.scheduler.house import house, served
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from worker.protocol import AddModel, Cancel, PageIn, PageOut, Serve

A, B, C = served("a", 4), served("b", 4), served("c", 3)
"""Of eight frames, A and B with KV take ten: only one of them fits beside its KV."""


@virtual_time
async def test_b_waits_until_a_has_answered_when_it_needs_the_memory_of_a() -> None:
    """Row 1. Elsewhere the connection of A was cut, its client retried, and the two evicted each other."""
    async with house(A, B) as here:
        a = here.ask("a")
        await here.work()
        here.group.tokens(a.answer.request.id, 0, 10, 11)
        b = here.ask("b")
        await here.work()
        assert not here.is_served(b)
        assert not here.group.waiting(PageOut)
        here.group.tokens(a.answer.request.id, 2, 12, finish="stop")
        await here.work()
        assert a.tokens == [10, 11, 12]
        await here.finish(b, 20)
        assert b.tokens == [20]


@virtual_time
async def test_a_request_for_a_model_whose_eviction_began_is_served() -> None:
    """Row 2. Elsewhere it hung for ever."""
    async with house(A, B) as here:
        await here.answered("a")
        b = here.ask("b")
        await settle()
        assert here.group.waiting(PageOut), "the eviction of A has begun"
        a = here.ask("a")
        await here.work()
        await here.finish(b, 1)
        await here.work()
        await here.finish(a, 2)
        assert (a.tokens, b.tokens) == ([2], [1])


@virtual_time
async def test_a_client_that_goes_takes_its_sequence_out_of_the_batch_at_once() -> None:
    """Row 6. Elsewhere the generation ran on for nobody."""
    async with house(A) as here:
        gone, stays = here.ask("a", "gone"), here.ask("a", "stays")
        await here.work()
        assert gone.task is not None
        gone.task.cancel()
        await settle()
        assert here.group.next(Cancel) == Cancel("gone")
        await here.work()
        assert here.status("a").running == 1
        await here.finish(stays, 1)
        assert here.diary.ends == [("a", "cancelled"), ("a", "stop")]


@virtual_time
async def test_thirty_cold_requests_for_one_model_load_it_once() -> None:
    """Row 9. Elsewhere it was loaded several times."""
    async with house(A, frames=40) as here:
        clients = [here.ask("a") for _ in range(30)]
        await here.work()
        posted = [command for post in here.group.posts for command in post]
        page_ins = [command for command in posted if isinstance(command, PageIn)]
        assert [(command.first, command.last) for command in page_ins] == [(0, 2), (2, 4)]
        assert len([command for command in posted if isinstance(command, AddModel)]) == 1
        assert len([command for command in posted if isinstance(command, Serve)]) == 30
        for number, client in enumerate(clients):
            await here.finish(client, number)
        assert [client.tokens for client in clients] == [[number] for number in range(30)]
        assert len(here.diary.loads) == 1


@virtual_time
async def test_a_stray_request_is_refused_at_once_while_a_pinned_model_fills_the_memory() -> None:
    """Row 10. Elsewhere the precious model was evicted, or memory over-committed."""
    async with house(A, served("big", 7)) as here:
        await here.scheduler.pin("big")
        await here.work()
        stray = here.ask("a")
        await settle()
        assert stray.error is not None
        assert stray.error.reason == "no_memory"
        assert here.status("big").pinned
        assert here.status("big").state == "resident"


@virtual_time
async def test_load_evict_pin_and_unpin_may_be_repeated() -> None:
    """Row 17. Elsewhere the second call aborted half way."""
    async with house(A) as here:
        for _ in range(2):
            await here.obeyed(here.scheduler.load("a"))
            assert here.status("a").state == "resident"
        for _ in range(2):
            await here.obeyed(here.scheduler.pin("a"))
            assert here.status("a").pinned
        with pytest.raises(Refused) as refused:
            await here.obeyed(here.scheduler.evict("a"))
        assert refused.value.reason == "pinned"
        for _ in range(2):
            await here.obeyed(here.scheduler.unpin("a"))
            assert not here.status("a").pinned
        for _ in range(2):
            await here.obeyed(here.scheduler.evict("a"))
            assert here.status("a").state == "absent"
        assert len(here.diary.loads) == 1
        assert [(model, pages, reason) for model, pages, _, reason, _ in here.diary.page_outs] == [("a", 4, "evicted")]


@virtual_time
async def test_a_worker_that_dies_while_loading_is_given_the_load_again() -> None:
    """Row 18. Elsewhere the model was LOADING for ever."""
    async with house(A) as here:
        client = here.ask("a")
        await settle()
        here.group.page_in()
        here.group.die()
        await settle()
        assert not here.scheduler.is_live()
        assert here.status("a").state == "absent"
        here.group.come_up()
        await pass_time(5)
        await here.work()
        await here.finish(client, 1)
        assert client.tokens == [1]
        assert here.diary.restarts == ["g0"]
        (load,) = here.diary.loads
        assert (load.pages, load.error) == (4, None)


@virtual_time
async def test_a_worker_that_dies_while_answering_is_continued_from_the_tokens_already_sent() -> None:
    """Row 19. Elsewhere the stream was cut with a 500."""
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        here.group.started("r")
        here.group.tokens("r", 0, 10, 11)
        await settle()
        here.group.die()
        here.group.come_up()
        await pass_time(5)
        await here.work()
        assert here.serving("r").request.answer == (10, 11)
        here.group.started("r")
        here.group.tokens("r", 1, 11, 12)  # a worker may repeat what it was given
        here.group.tokens("r", 3, 13, finish="stop")
        await settle()
        assert (client.tokens, client.finish) == ([10, 11, 12, 13], "stop")
        assert len(here.diary.starts) == 1, "the wait of a request ends once"


@virtual_time
async def test_work_of_a_dead_group_moves_to_one_that_lives() -> None:
    """Rows 19 and 20: a group that does not come back is not waited for."""
    async with house(A, groups=[FakeGroup("g0"), FakeGroup("g1")]) as here:
        client = here.ask("a", "r")
        await here.work()
        first = next(group for group in here.groups if "r" in group.serving)
        first.tokens("r", 0, 10)
        await settle()
        first.die()
        await pass_time(5)
        await here.work()
        assert here.scheduler.is_live()
        assert here.serving("r").request.answer == (10,)
        await here.finish(client, 11)
        assert client.tokens == [10, 11]


@virtual_time
async def test_a_failed_load_tells_those_who_wait_and_is_tried_again_later() -> None:
    """Row 22. Elsewhere a slot leaked and the model was "starting" for ever."""
    async with house(A, C, frames=16) as here:
        other = here.ask("c")
        await here.work()
        client = here.ask("a")
        await settle()
        here.group.fail_page_in("rank-0.safetensors is truncated")
        await settle()
        await here.work()
        assert client.error is not None
        assert client.error.reason == "load_failed"
        assert "truncated" in str(client.error)
        status = here.status("a")
        assert status.state == "failed"
        assert "truncated" in (status.reason or "")
        assert status.last_load is not None
        assert status.last_load.error == "rank-0.safetensors is truncated"
        await here.finish(other, 1)
        assert other.tokens == [1]
        await pass_time(60)
        again = here.ask("a")
        await here.work()
        await here.finish(again, 2)
        assert again.tokens == [2]


@virtual_time
async def test_a_model_that_was_loaded_for_a_request_answers_it_before_it_has_to_go() -> None:
    """Row 25. Elsewhere the next request of A evicted B before B had run."""
    async with house(A, B) as here:
        await here.answered("a")
        b = here.ask("b")
        await settle()
        a = here.ask("a")
        await here.work()
        assert here.is_served(b)
        assert not here.is_served(a)
        await here.finish(b, 1)
        await here.work()
        await here.finish(a, 2)
        assert (a.tokens, b.tokens) == ([2], [1])


@virtual_time
@pytest.mark.parametrize("resident", [False, True])
async def test_a_full_queue_refuses_with_a_time_to_come_back(resident: bool) -> None:
    """Row 28. Elsewhere the limit was ignored for a loaded model."""
    config = CoreConfig(page_bytes=PAGE_BYTES, max_queue=2, max_running=1)
    async with house(A, config=config) as here:
        if resident:
            await here.answered("a")
        clients = [here.ask("a") for _ in range(3)]
        await here.work()
        late = here.ask("a")
        await settle()
        refused = [client.error for client in [*clients, late] if client.error is not None]
        assert refused
        assert {error.reason for error in refused} == {"queue_full"}
        assert all(error.retry_after for error in refused)
        waiting = [client for client in clients if client.error is None]
        for client in waiting:
            await here.work()
            await here.finish(client, 5)
        assert all(client.tokens == [5] for client in waiting)
