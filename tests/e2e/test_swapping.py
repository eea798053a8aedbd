"""Trouble that users of such servers have met, made for real and gone well."""

from __future__ import annotations

import re
import time
from concurrent.futures import wait

import pytest

from server.demo.run import PAGE_BYTES
from swapper.geometry import kv_frames
from swapper.image import Image
from tests.e2e.client import Client
from tests.e2e.conftest import IMPATIENT, MAX_QUEUE

A, B, C = "smollm2", "smollm2-late", "smollm2-middle"


def test_an_answer_is_finished_before_its_memory_goes(client: Client) -> None:
    """A is answering and B needs its memory: B waits, A's answer is whole."""
    client.text(A)
    with client.stream(A, max_tokens=60) as pieces:
        next(pieces)
        other = client.start(B)
        assert len(list(pieces)) > 10
    assert other.result(60).status_code == 200


def test_a_long_answer_is_suspended_for_whoever_has_waited_long_enough_and_goes_on_as_if_nothing_had_been(
    client: Client,
) -> None:
    expected = client.text(A, prompt="Once upon a time", max_tokens=120)
    before = client.metric("gswapd_suspension_seconds_count", model=A)
    with client.stream(A, max_tokens=120) as pieces:
        text = next(pieces)
        other = client.start(IMPATIENT)
        for piece in pieces:
            text += piece
            if other.done():
                break
        else:
            raise AssertionError("the other model was not answered before the end of the long answer")
        assert text + "".join(pieces) == expected
    assert other.result(0).status_code == 200
    assert client.metric("gswapd_suspension_seconds_count", model=A) > before


def test_a_request_just_after_an_eviction_began_is_answered(client: Client) -> None:
    expected = client.text(A)
    for _ in range(5):
        assert client.post(f"/admin/models/{A}/evict", wait="false").status_code == 202
        assert client.text(A) == expected


def test_a_client_that_goes_takes_its_sequence_along(client: Client) -> None:
    with client.stream(A, max_tokens=2000) as pieces:
        next(pieces)
        assert client.models()[A]["running"] == 1
    client.until(lambda: client.models()[A]["running"] == 0, seconds=10)


def test_the_idle_clock_starts_at_the_last_finish(client: Client) -> None:
    with client.stream(A, max_tokens=30) as pieces:
        list(pieces)
        ended = time.time()
    client.until(lambda: (client.models()[A]["last_used"] or 0) >= ended - 0.5)


def test_thirty_cold_requests_load_a_model_once(client: Client) -> None:
    client.post(f"/admin/models/{B}/evict").raise_for_status()
    before = client.metric("gswapd_swap_in_seconds_count", model=B)
    answers = [client.start(B, max_tokens=4) for _ in range(30)]
    assert [answer.result(120).status_code for answer in answers] == [200] * 30
    assert client.metric("gswapd_swap_in_seconds_count", model=B) == before + 1


def test_what_is_pinned_stays_and_the_rest_hears_why(client: Client) -> None:
    """Memory is full of what is pinned: 503 at once, with the reason, and the pin holds."""
    client.post(f"/admin/models/{A}/pin").raise_for_status()
    client.until(lambda: client.models()[A]["state"] == "resident")
    began = time.monotonic()
    refused = client.complete(B, max_tokens=500)
    assert refused.status_code == 503
    assert A in refused.json()["error"]["message"]
    assert time.monotonic() - began < 5
    assert client.models()[A]["state"] == "resident"
    assert client.post(f"/admin/models/{A}/evict").status_code == 409


def test_pins_that_do_not_fit_together_are_refused_in_bytes(client: Client) -> None:
    client.post(f"/admin/models/{A}/pin").raise_for_status()
    refused = client.post(f"/admin/models/{B}/pin")
    assert refused.status_code == 409
    assert re.search(r"needs [\d.]+ MB .* can give it [\d.]+ MB", refused.json()["error"]["message"])
    assert not client.models()[B]["pinned"]


def test_as_many_pages_go_as_are_needed_and_no_more(client: Client, images: dict[str, Image]) -> None:
    for name in (A, B, C):
        client.post(f"/admin/models/{name}/evict").raise_for_status()
    expected = client.text(A)
    hashes = {name: set(images[name].manifest.shards[0].page_hashes(PAGE_BYTES)) for name in (A, B)}
    client.until(lambda: client.metric("gswapd_frames", use="free") == client.metric("gswapd_frames") - len(hashes[A]))
    free = int(client.metric("gswapd_frames", use="free"))

    body = client.complete(B, max_tokens=8).raise_for_status().json()
    kv = kv_frames(body["usage"]["prompt_tokens"] + 8, images[B].manifest.kv_bytes_per_token, PAGE_BYTES)
    missing = len(hashes[B] - hashes[A]) + kv - free
    assert missing > 0
    assert client.models()[A]["resident_pages"] == client.models()[A]["total_pages"] - missing
    assert client.models()[A]["state"] == "partial"

    # A half resident model runs only on pages that are in: the answer is the same.
    assert client.text(A) == expected


def test_admin_calls_may_be_repeated(client: Client) -> None:
    for action in ("load", "load", "pin", "pin", "unpin", "unpin", "evict", "evict"):
        answer = client.post(f"/admin/models/{A}/{action}")
        assert answer.status_code == 200, answer.text
    assert client.models()[A]["state"] == "absent"
    assert client.models()[A]["resident_bytes"] == 0
    assert client.post("/admin/models/nobody/load").status_code == 404


def test_a_damaged_file_fails_its_own_model_only(client: Client, images: dict[str, Image]) -> None:
    client.post(f"/admin/models/{C}/evict").raise_for_status()
    shard = images[C].shard_path(0)
    content = shard.read_bytes()
    try:
        shard.write_bytes(content[: len(content) // 2])
        refused = client.complete(C)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "load_failed"
        assert client.models()[C]["state"] == "failed"
        assert client.models()[C]["resident_pages"] == 0
        assert client.text(A)
    finally:
        shard.write_bytes(content)
    client.until(lambda: client.complete(C).status_code == 200)


def test_a_page_in_is_kept_for_the_request_it_was_made_for(client: Client) -> None:
    """A and B take turns as fast as they can: nobody's pages go before its request ran."""
    answers = [client.start(name, max_tokens=2) for _ in range(6) for name in (A, B)]
    assert [answer.result(120).status_code for answer in answers] == [200] * 12


def test_a_full_queue_says_when_to_come_back(client: Client) -> None:
    client.text(A)
    with client.stream(A, max_tokens=2000) as pieces:
        next(pieces)
        crowd = [client.start(B, max_tokens=1) for _ in range(MAX_QUEUE + 8)]
        client.until(lambda: sum(answer.done() for answer in crowd) >= 8)
        refused = [answer.result() for answer in crowd if answer.done()]
        assert [answer.status_code for answer in refused] == [429] * 8
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
    wait(crowd, 120)
    assert sum(answer.result(0).status_code == 200 for answer in crowd) == MAX_QUEUE


@pytest.mark.timeout(600)
def test_memory_is_flat_over_two_hundred_swaps(client: Client) -> None:
    def cycle(count: int) -> None:
        for index in range(count):
            client.complete((A, B)[index % 2], max_tokens=1).raise_for_status()

    def memory() -> tuple[float, float]:
        """With no page in: then every frame is free."""
        for name in (A, B, C):
            client.post(f"/admin/models/{name}/evict").raise_for_status()
        client.until(lambda: client.metric("gswapd_frames", use="free") == client.metric("gswapd_frames"))
        return (
            client.metric("process_resident_memory_bytes"),
            client.metric("gswapd_worker_resident_memory_bytes"),
        )

    cycle(40)  # allocators and caches reach their working size
    daemon, worker = memory()
    swaps = client.metric("gswapd_swap_in_seconds_count")
    cycle(200)
    # An idle link brings in ahead what is expected next: more swaps than requests, and the first may have been before.
    assert client.metric("gswapd_swap_in_seconds_count") >= swaps + 199
    daemon_after, worker_after = memory()
    assert daemon_after < daemon + 8e6
    assert worker_after < worker + 16e6
