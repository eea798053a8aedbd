"""The live driver carries out what the core decides, turn by turn, and tells what happened."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from engine.request import EmbeddingRequest, Tokens
from scheduler.answers import LiveAnswer
from swapper.errors import Refused
from tests.scheduler.fake_group import PAGE_BYTES, FakeGroup
from tests.scheduler.house import TOKENS_A_FRAME, WALL, house, request, served
from tests.scheduler.virtual_time import pass_time, settle, virtual_time
from worker.protocol import AddModel, GrantKv, PageIn, RemoveModel, Serve

A, B = served("a", 4), served("b", 4)


# ---- commands


@virtual_time
async def test_workers_hear_of_a_model_at_once_and_a_turn_makes_one_post_a_group() -> None:
    async with house(A) as here:
        await settle()
        assert here.group.posts == [[AddModel("a", "/models/a", "identity of a")]]
        for id in ("r1", "r2"):
            here.scheduler.submit(request(id, "a"), 60.0)
        await settle()
        assert len(here.group.posts) == 2
        kinds = [type(command) for command in here.group.posts[1]]
        assert AddModel not in kinds
        assert kinds.count(PageIn) == 2
        assert kinds.count(Serve) == 2


@virtual_time
async def test_a_request_asks_for_the_kv_of_its_prompt_and_its_longest_answer() -> None:
    async with house(A) as here:
        here.ask("a", max_tokens=2 * TOKENS_A_FRAME)
        await settle()
        assert here.group.next(GrantKv).frames == 3


@virtual_time
async def test_a_group_that_came_up_again_is_told_of_the_model_again() -> None:
    async with house(A) as here:
        await here.answered("a")
        here.group.die()
        here.group.come_up()
        await pass_time(5)
        await here.answered("a")
        added = [command for post in here.group.posts for command in post if isinstance(command, AddModel)]
        assert added == [AddModel("a", "/models/a", "identity of a")] * 2


@virtual_time
async def test_what_was_decided_for_workers_that_died_is_not_posted_to_those_after_them() -> None:
    """Death, rebirth and a request in one turn: the new workers must hear of the new world only."""
    async with house(A, B) as here:
        await here.answered("a")
        posts = len(here.group.posts)
        here.scheduler.submit(request("r", "a"), 60.0)  # the core will serve it at once: the model is in
        here.group.die()
        here.group.come_up()
        await pass_time(5)
        commands = [command for post in here.group.posts[posts:] for command in post]
        assert isinstance(commands[0], AddModel)
        assert [type(command) for command in commands].count(Serve) == 1
        await here.work()
        assert here.serving("r")


@virtual_time
async def test_a_removed_model_is_forgotten_by_all_once_its_pages_are_out() -> None:
    async with house(A) as here:
        running = here.ask("a")
        await here.work()
        here.scheduler.remove_model("a")
        await here.work()
        assert here.status("a").running == 1
        await here.finish(running, 1)
        await here.work()
        assert here.scheduler.models() == []
        assert here.group.known == set()
        assert [type(command) for command in here.group.posts[-1]] == [RemoveModel]
        assert [(model, reason) for model, _, _, reason, _ in here.diary.page_outs] == [("a", "removed")]
        late = here.ask("a")
        await settle()
        assert late.error is not None
        assert late.error.reason == "model_not_found"


@virtual_time
async def test_a_model_whose_time_to_live_is_over_goes_for_no_other_reason() -> None:
    async with house(replace(A, ttl=10.0)) as here:
        await here.answered("a")
        await pass_time(11)
        await here.work()
        assert [(model, reason) for model, _, _, reason, _ in here.diary.page_outs] == [("a", "idle")]


@virtual_time
async def test_a_model_may_be_added_again_after_its_removal() -> None:
    async with house(A) as here:
        await here.answered("a")
        here.scheduler.remove_model("a")
        await here.work()
        here.scheduler.add_model(A)
        await here.answered("a")
        assert here.status("a").state == "resident"


@virtual_time
async def test_a_model_that_is_served_or_on_its_way_out_cannot_be_added_over() -> None:
    async with house(A) as here:
        running = here.ask("a")
        await here.work()
        for _ in range(2):
            with pytest.raises(ValueError, match="has to be gone"):
                here.scheduler.add_model(A)
            here.scheduler.remove_model("a")
            await here.work()
        await here.finish(running, 1)


# ---- requests


@virtual_time
async def test_tokens_reach_the_client_as_they_come() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        here.group.started("r")
        here.group.tokens("r", 0, 10)
        await settle()
        assert client.tokens == [10]
        here.group.tokens("r", 1, 11, 12, finish="length")
        await settle()
        assert (client.tokens, client.finish, client.is_done) == ([10, 11, 12], "length", True)
        assert here.diary.ends == [("a", "length")]
        assert here.status("a").running == 0


@virtual_time
async def test_the_wait_of_a_request_is_told_from_arrival_to_first_pass() -> None:
    async with house(A) as here:
        here.ask("a", "r")
        await pass_time(2)
        await here.work()
        here.group.started("r")
        await settle()
        ((model, waited),) = here.diary.starts
        assert model == "a"
        assert waited == pytest.approx(2.0)


@virtual_time
async def test_a_request_that_the_engine_gives_up_gets_the_reason_and_makes_room() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        here.group.tokens("r", 0, 10)
        here.group.fail_request("r", "a defect in the sampler")
        await settle()
        assert client.tokens == [10]
        assert client.error is not None
        assert (client.error.reason, str(client.error)) == ("engine_failed", "a defect in the sampler")
        assert here.status("a").running == 0
        assert here.diary.ends == [("a", "engine_failed")]


@virtual_time
async def test_tokens_that_are_missing_end_the_answer_rather_than_garble_it() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        here.group.tokens("r", 1, 11)
        await settle()
        assert client.error is not None
        assert client.error.reason == "engine_failed"
        await here.work()
        assert here.status("a").running == 0


@virtual_time
async def test_reports_of_what_has_ended_are_ignored() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        await here.finish(client, 1)
        here.group.tokens("r", 1, 2)
        here.group.tokens("r", 1, 2, finish="stop")
        here.group.started("r")
        await settle()
        assert client.tokens == [1]
        assert here.diary.ends == [("a", "stop")]


@virtual_time
async def test_a_waiting_request_that_is_cancelled_is_gone_at_once() -> None:
    async with house(A, B) as here:
        busy = here.ask("a")
        await here.work()
        client = here.ask("b")
        await here.work()
        assert here.status("b").waiting == 1
        client.answer.cancel()
        await settle()
        assert here.status("b").waiting == 0
        assert client.error is None
        assert client.is_done
        await here.finish(busy, 1)
        await asyncio.wait_for(here.scheduler.drain(60), 1)


@virtual_time
async def test_a_finish_that_crosses_a_cancellation_is_enough() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        client.answer.cancel()
        here.group.tokens("r", 0, 1, finish="stop")
        await here.work()
        assert here.status("a").running == 0
        assert here.diary.ends == [("a", "cancelled")]


@virtual_time
async def test_a_cancelled_request_is_not_served_again_after_its_worker_died() -> None:
    async with house(A) as here:
        client = here.ask("a", "r")
        await here.work()
        client.answer.cancel()
        here.group.die()
        here.group.come_up()
        await pass_time(5)
        await here.work()
        assert not here.is_served(client)
        assert here.status("a").running == here.status("a").waiting == 0


@virtual_time
async def test_a_death_that_is_heard_before_a_cancellation_is_no_contradiction() -> None:
    async with house(A, groups=[FakeGroup("g0"), FakeGroup("g1")]) as here:
        client = here.ask("a", "r")
        await here.work()
        next(group for group in here.groups if "r" in group.serving).die()
        client.answer.cancel()
        await here.work()
        assert not here.is_served(client)
        assert here.scheduler.is_live()


@virtual_time
async def test_a_request_that_waits_too_long_is_told_so() -> None:
    async with house(A) as here:
        here.group.die()
        client = here.ask("a", timeout=3.0)
        await pass_time(2.9)
        assert client.error is None
        await pass_time(0.2)
        assert client.error is not None
        assert client.error.reason == "timeout"


@virtual_time
async def test_an_unknown_model_is_not_found() -> None:
    async with house() as here:
        client = here.ask("nobody")
        await settle()
        assert client.error is not None
        assert client.error.reason == "model_not_found"
        with pytest.raises(Refused):
            await here.scheduler.load("nobody")


@virtual_time
async def test_two_requests_of_one_id_are_a_mistake_of_the_caller() -> None:
    async with house(A) as here:
        here.ask("a", "r")
        with pytest.raises(ValueError, match="r is being answered already"):
            here.ask("a", "r")


@virtual_time
async def test_a_slow_client_does_not_hold_up_the_others() -> None:
    async with house(A) as here:
        slow = here.scheduler.submit(request("slow", "a"), 60.0)
        quick = here.ask("a", "quick")
        await here.work()
        for index in range(7):
            here.group.tokens("slow", index, index)
            here.group.tokens("quick", index, index)
        here.group.tokens("slow", 7, 7, finish="length")
        here.group.tokens("quick", 7, 7, finish="length")
        await settle()
        assert quick.tokens == list(range(8))
        assert here.status("a").running == 0, "what nobody has read yet holds no place in the batch"
        assert [token async for chunk in slow for token in chunk.tokens] == list(range(8))


# ---- bounds


@virtual_time
async def test_a_full_inbox_refuses_new_work_but_takes_every_report() -> None:
    async with house(A, inbox_limit=3) as here:
        client = here.ask("a", "r")
        await here.work()
        arrivals = [here.ask("a", max_tokens=1) for _ in range(5)]
        here.group.started("r")
        here.group.tokens("r", 0, 1, finish="stop")
        with pytest.raises(Refused) as refused:
            await here.scheduler.load("a")
        assert (refused.value.reason, refused.value.retry_after) == ("queue_full", 1.0)
        await here.work()
        assert client.tokens == [1]
        errors = [arrival.error for arrival in arrivals]
        assert errors[:3] == [None] * 3
        assert [error.reason for error in errors[3:] if error is not None] == ["queue_full"] * 2
        assert all(here.is_served(arrival) for arrival in arrivals[:3])


# ---- jobs


@virtual_time
async def test_a_job_whose_asker_went_away_goes_on() -> None:
    async with house(A) as here:
        asker = asyncio.create_task(here.scheduler.load("a"))
        await settle()
        asker.cancel()
        await here.work()
        assert asker.cancelled()
        assert here.status("a").state == "resident"
        assert here.scheduler.is_live()


@virtual_time
async def test_a_load_that_fails_is_refused_with_the_reason() -> None:
    async with house(A) as here:
        asker = asyncio.create_task(here.scheduler.load("a"))
        await settle()
        here.group.fail_page_in("no such file")
        await settle()
        await here.work()
        with pytest.raises(Refused, match="no such file") as refused:
            await asyncio.wait_for(asker, 600)
        assert refused.value.reason == "load_failed"


# ---- status


@virtual_time
async def test_a_load_that_was_given_up_and_goes_on_later_is_timed_from_then_on() -> None:
    async with house(served("a", 6)) as here:
        client = here.ask("a")
        await settle()
        client.answer.cancel()
        await settle()
        here.group.cancel()
        await here.work()
        resident = here.status("a").resident_pages
        assert 0 < resident < 6
        assert here.diary.loads == []
        await pass_time(3600)
        await here.answered("a")
        (load,) = here.diary.loads
        assert load.pages == 6 - resident
        assert load.seconds < 1


@virtual_time
async def test_the_status_of_a_model_tells_the_truth() -> None:
    async with house(A) as here:
        status = here.status("a")
        assert (status.state, status.resident_pages, status.total_pages) == ("absent", 0, 4)
        assert status.last_used is None
        client = here.ask("a")
        await settle()
        assert here.status("a").state == "loading"
        here.group.page_in()
        await settle()
        status = here.status("a")
        assert (status.resident_pages, status.resident_bytes) == (2, 2 * PAGE_BYTES)
        await here.work()
        status = here.status("a")
        assert (status.state, status.group, status.running, status.waiting) == ("resident", "g0", 1, 0)
        assert status.resident_bytes == status.total_bytes == 4 * PAGE_BYTES
        assert status.kv_frames == 1
        assert status.last_load is not None
        assert status.last_load.pages == 4
        assert status.last_load.at >= WALL
        await pass_time(1)
        await here.finish(client, 1)
        await pass_time(7)
        assert here.status("a").last_used == pytest.approx(WALL + asyncio.get_running_loop().time() - 7)


@virtual_time
async def test_a_page_out_for_memory_is_told_of_with_the_age_of_its_model() -> None:
    async with house(A, B) as here:
        await here.answered("a")
        await pass_time(30)
        here.ask("b")
        await here.work()
        (page_out,) = here.diary.page_outs
        model, pages, frames, reason, age = page_out
        assert (model, reason) == ("a", "memory")
        assert pages == frames > 0
        assert age == pytest.approx(30)


@virtual_time
async def test_workers_are_those_of_all_groups() -> None:
    async with house(A, groups=[FakeGroup("g0"), FakeGroup("g1")]) as here:
        assert [worker.group for worker in here.scheduler.workers()] == ["g0", "g1"]


# ---- what is expected of models changes; encoders


@virtual_time
async def test_a_time_to_live_that_changes_under_a_request_holds_from_its_end() -> None:
    model = served("a", 2)
    async with house(model) as here:
        client = here.ask("a")
        here.scheduler.change_model(replace(model, ttl=0.0))  # in the same turn: it must not go before it was used
        await here.work()
        assert here.status("a").state == "resident"
        await here.finish(client, 1)
        await here.work()
        assert here.status("a").state == "absent"
        here.scheduler.change_model(replace(model, ttl=30.0))
        await here.answered("a")
        await pass_time(29)
        assert here.status("a").state == "resident"
        await pass_time(2)
        await here.work()
        assert here.status("a").state == "absent"
        here.scheduler.change_model(served("gone", 1))  # one that is not known


@virtual_time
async def test_vectors_come_as_one_report_and_need_no_kv() -> None:
    encoder = replace(served("e", 2), kv_bytes_per_token=0)
    async with house(encoder) as here:
        answer = here.scheduler.submit(EmbeddingRequest("v", "e", ((1, 2), (3,))), 60.0)
        reading = asyncio.ensure_future(_reports(answer))
        await here.work()
        assert not any(isinstance(command, GrantKv) for post in here.group.posts for command in post)
        here.group.started("v")
        here.group.tokens("v", 0, finish="stop", vectors=(b"12", b"3"))
        await settle()
        (report,) = await asyncio.wait_for(reading, 1)
        assert report.vectors == (b"12", b"3")
        assert here.scheduler.room("e") is None


async def _reports(answer: LiveAnswer) -> list[Tokens]:
    return [report async for report in answer]
