"""The status page, in a real browser, over a scripted scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from selenium.webdriver.common.keys import Keys

from scheduler.interface import GroupMemory, Holding, LoadRecord, ModelDecision
from server.board import ASSETS
from swapper.errors import Refused
from swapper.pager import SourceBytes
from tests.server.browser import CHROMIUM, DRIVER, Browser, browser
from tests.server.conftest import ServerThread, config, publish

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason="needs the packages chromium and chromium-driver")

NAMES = ("smol", "tuned", "org/base")


@pytest.fixture(scope="module")
def chrome() -> Iterator[Browser]:
    with browser() as running:
        yield running


@pytest.fixture
def house(tmp_path: Path, smollm2: Path) -> Iterator[ServerThread]:
    """A daemon of three models, whose memory holds two, and a sibling's pages once."""
    with ServerThread(config(tmp_path)) as server:
        for name in NAMES:
            publish(server.store, name, smollm2)
        server.call(server.catalog.refresh())
        holdings = (Holding(("smol", "tuned"), "weights", 20), Holding(("smol",), "weights", 6),
                    Holding(("tuned",), "loading", 4), Holding(("smol",), "kv", 3))  # fmt: skip
        server.scheduler.maps["default"] = GroupMemory("default", 1, True, 48, 2 << 20, holdings)
        yield server


@pytest.fixture
def page(house: ServerThread, chrome: Browser) -> Iterator[Browser]:
    chrome.open(house.url)
    chrome.until(lambda: len(chrome.all("#rows tr")) == len(NAMES))
    yield chrome
    complaints = chrome.complaints()
    chrome.leave()
    assert complaints == []


def button(page: Browser, action: str, model: str) -> str:
    return f'button[aria-label="{action} {model}"]'


def state_of(page: Browser, model: str) -> str:
    script = """
        const rows = [...document.querySelectorAll("#rows tr")];
        const row = rows.find((row) => row.querySelector("th").textContent === arguments[0]);
        return row.querySelector(".state").textContent;
    """
    return str(page.run(script, model))


def test_it_shows_models_and_whose_the_memory_is(page: Browser) -> None:
    assert page.one("#health").text == "live"
    assert page.one("#resident").text == "0 of 3"
    kinds = {kind: len(page.all(f".map .cell{kind}")) for kind in (".weights", ".shared", ".loading", ".kv")}
    assert kinds == {".weights": 26, ".shared": 20, ".loading": 4, ".kv": 3}
    assert len(page.all(".map .cell")) == 48
    described = page.one(".map").get_attribute("aria-label")
    assert described == "Frames of group default: smol 29, tuned 24, of 48"


def test_pages_that_arrive_turn_to_colour_where_they_were_awaited(page: Browser, house: ServerThread) -> None:
    def places(kind: str) -> list[int]:
        script = (
            f"return [...document.querySelectorAll('.map .cell')].flatMap((c, i) => c.matches('{kind}') ? [i] : [])"
        )
        return [int(place) for place in page.run(script)]

    awaited = places(".loading")
    group = house.scheduler.maps["default"]
    arrived = tuple(replace(one, use="weights") if one.use == "loading" else one for one in group.holdings)
    house.scheduler.maps["default"] = replace(group, holdings=arrived)
    page.until(lambda: not places(".loading"))
    assert set(awaited) <= set(places(".weights"))


def test_a_click_loads_pins_and_evicts_and_the_page_follows(page: Browser, house: ServerThread) -> None:
    page.one(button(page, "load", "smol")).click()
    page.until(lambda: state_of(page, "smol") == "resident")
    page.one(button(page, "pin", "smol")).click()
    page.until(lambda: page.one(button(page, "pin", "smol")).get_attribute("aria-pressed") == "true")
    assert page.one(button(page, "evict", "smol")).get_attribute("aria-disabled") == "true", "what is pinned stays"
    page.one(button(page, "pin", "smol")).click()
    page.until(lambda: page.one(button(page, "evict", "smol")).get_attribute("aria-disabled") == "false")
    page.one(button(page, "evict", "smol")).click()
    page.until(lambda: state_of(page, "smol") == "absent")
    assert house.scheduler.jobs == [(action, "smol") for action in ("load", "pin", "unpin", "evict")]


def test_a_name_with_a_slash_can_be_acted_on(page: Browser, house: ServerThread) -> None:
    page.one(button(page, "load", "org/base")).click()
    page.until(lambda: state_of(page, "org/base") == "resident")


def test_a_refusal_is_said_in_its_own_words(page: Browser, house: ServerThread) -> None:
    house.scheduler.refusals["pin"] = Refused("no_memory", "The pins do not fit together.")
    page.one(button(page, "pin", "tuned")).click()
    page.until(lambda: page.all("#notices p"))
    assert page.one("#notices p").text == "pin tuned: The pins do not fit together."
    assert any("409" in complaint for complaint in page.complaints())


def test_everything_is_reached_with_the_keyboard(page: Browser, house: ServerThread) -> None:
    page.press("/")
    page.press("tuned")
    page.until(lambda: sum(row.is_displayed() for row in page.all("#rows tr")) == 1)
    page.press(Keys.TAB)
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "load tuned"
    assert page.all(".map.dim .cell.lit"), "the model in focus stands out on the map"
    page.press(Keys.ENTER)
    page.until(lambda: state_of(page, "tuned") == "resident")
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "load tuned", "focus is kept"


def test_swaps_are_drawn_and_told_as_they_happen(page: Browser, house: ServerThread) -> None:
    sources = {"disk": SourceBytes(3, 60), "alias": SourceBytes(1, 20)}

    async def happen() -> None:
        house.observers.loaded(LoadRecord("smol", "default", time.time() - 2, 1.5, 4, sources, {}))
        house.observers.paged_out("tuned", 4, 2, 0.02, "memory", 12.0)

    house.call(happen())
    page.until(lambda: len(page.all("#happened li")) == 2)
    out, loaded = (entry.text.replace("\n", " ").replace("\u00a0", " ") for entry in page.all("#happened li"))
    assert loaded.endswith("smol paged in 4 pages in 1.5 s from disk 75 %, alias 25 %")
    assert out.endswith("tuned gave up 4 pages to make room, unused for 12.0 s")
    assert len(page.all(".track .bar.in")) == len(page.all(".track .bar.out")) == 1
    assert page.one("#timeline").get_attribute("aria-label") == "1 loads and 1 page-outs in the last two minutes"
    assert page.one("#rate").text == "1"


def test_it_tells_why(page: Browser, house: ServerThread) -> None:
    house.scheduler.decided.append(
        ModelDecision("smol", time.time(), "waiting", "Waits for 3 frames that tuned holds.")
    )
    house.scheduler._change("smol", waiting=1)
    page.until(lambda: page.all("#decisions li"))
    assert page.one("#decisions li").text.endswith("smol Waits for 3 frames that tuned holds.")


def test_a_stream_that_ends_is_taken_up_again_and_nothing_is_told_twice(page: Browser, house: ServerThread) -> None:
    async def happen(model: str) -> None:
        house.observers.loaded(LoadRecord(model, "default", time.time(), 0.5, 4, {}, {}))

    house.call(happen("smol"))
    page.until(lambda: len(page.all("#happened li")) == 1)
    house.call(house.service.events.close())
    house.call(happen("tuned"))
    page.until(lambda: len(page.all("#happened li")) == 2)
    page.until(lambda: page.one("#health").text == "live")


def test_a_daemon_with_a_key_is_asked_with_it(tmp_path: Path, smollm2: Path, chrome: Browser) -> None:
    with ServerThread(config(tmp_path, server={"admin_key": "sesame"})) as server:
        publish(server.store, "smol", smollm2)
        server.call(server.catalog.refresh())
        chrome.open(server.url)
        for key in ("wrong", "sesame"):
            chrome.until(lambda: chrome.one("#key").get_attribute("open"))
            chrome.one("#key-value").send_keys(key + Keys.ENTER)
        chrome.until(lambda: chrome.all("#rows tr"))
        chrome.one(button(chrome, "load", "smol")).click()
        chrome.until(lambda: state_of(chrome, "smol") == "resident")
        assert all("401" in complaint for complaint in chrome.complaints())
        chrome.leave()


@pytest.mark.parametrize("width", [360, 768, 961, 1440])
def test_it_fits_a_phone_a_tablet_and_a_desk(chrome: Browser, house: ServerThread, width: int) -> None:
    chrome.open(house.url, width=width)
    chrome.until(lambda: chrome.all("#rows tr"))
    assert chrome.run("return document.documentElement.scrollWidth") <= width
    assert all(one.is_displayed() for one in chrome.all("#rows button"))
    chrome.leave()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_by_day_and_by_night(chrome: Browser, house: ServerThread, scheme: str) -> None:
    """WCAG's contrast of 4.5 for text, also the quiet one."""
    chrome.open(house.url, scheme=scheme)
    chrome.until(lambda: chrome.all("#rows tr"))
    script = """
        const [element, property, under] = arguments;
        const pixel = (colour) => {
            const context = new OffscreenCanvas(1, 1).getContext("2d");
            context.fillStyle = colour;
            context.fillRect(0, 0, 1, 1);
            return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
        };
        const luminance = (colour) => pixel(colour).map((v) => v / 255)
            .map((v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
            .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
        const [a, b] = [getComputedStyle(element).color, getComputedStyle(under).backgroundColor].map(luminance);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    """
    section = chrome.one("#models")
    for selector in ("#models h2", "#rows th", ".state", ".held span", ".group p span", ".legend"):
        assert chrome.run(script, chrome.one(selector), "color", section) >= 4.5, selector
    chrome.leave()


def test_it_asks_nobody_else_for_anything(page: Browser, house: ServerThread) -> None:
    asked = page.run("return performance.getEntriesByType('resource').map(entry => entry.name)")
    assert asked
    assert [url for url in asked if not url.startswith((house.url, "data:"))] == []


def test_every_part_of_it_is_served_and_nothing_beside(http: httpx.Client) -> None:
    for name, kind in ASSETS.items():
        answer = http.get(f"/page/{name}").raise_for_status()
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert http.get("/page/..%2Fapp.py").status_code == 404
    assert http.get("/page/app.py").status_code == 404


def test_another_sites_page_cannot_act_where_there_is_no_key(http: httpx.Client) -> None:
    foreign = http.post("/admin/models/smol/evict", headers={"Origin": "https://elsewhere.example"})
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (403, "cross_origin")
    own = http.post("/admin/models/smol/evict", headers={"Origin": str(http.base_url).rstrip("/")})
    assert own.status_code == 200
