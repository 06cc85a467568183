"""The server as a process of its own: under load, and in a browser."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serve_load import failures, load
from tests.served import BROKEN, drop, serving

pytestmark = pytest.mark.xdist_group("train_run")


@pytest.fixture(scope="module")
def address(reference: Path, photos: Path, env: dict[str, str]) -> Iterator[str]:
    with serving(reference, "--examples", photos, "--upload-mb", "1", env=env) as (address, _):
        yield address


def test_many_clients_at_once(address: str):
    answers = asyncio.run(load(address, clients=20, requests=100))
    assert len(answers) == 100
    assert not failures(answers)


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """The page, which must load nothing from elsewhere and log no error."""
    page = browser.new_page(viewport={"width": 1000, "height": 900})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request", lambda request: request.url.startswith(("data:", "blob:", address)) or problems.append(request.url)
    )
    page.on("console", lambda message: "Content Security" in message.text and problems.append(message.text))
    page.goto(address)
    page.get_by_role("button", name="Example 1:").wait_for()
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("event", ["drop", "paste"])
def test_an_image_is_dropped_or_pasted_and_explained(page: Any, photos: Path, tmp_path: Path, event: str):
    drop(page, (photos / "red/3.png").read_bytes(), event)
    page.locator("#controls").wait_for(state="visible")
    assert page.locator("#bars .name").all_inner_texts()[0] == "red"
    assert not page.locator("#unsure").is_visible()
    assert len(page.locator("#bars li").all()) == 3
    assert page.locator("#status").inner_text().startswith("red, ")
    assert "ms on the server" in page.locator("#latency").inner_text()

    heat, layer, head = page.locator("#heat"), page.get_by_label("Map"), page.get_by_label("Head")
    pictures = [heat.evaluate("canvas => canvas.toDataURL()")]
    assert heat.get_attribute("data-map") == "overall"
    assert head.is_disabled()
    layer.press("ArrowRight")
    assert heat.get_attribute("data-map") == "1.0"
    assert layer.get_attribute("aria-valuetext") == "layer 1 of 1"
    for number in "12":
        head.press("ArrowRight")
        assert heat.get_attribute("data-map") == f"1.{number}"
        pictures.append(heat.evaluate("canvas => canvas.toDataURL()"))
    assert len(set(pictures)) == 3
    page.get_by_label("as the model sees it").check()
    assert page.locator("#image").get_attribute("src").startswith("data:image/png")
    page.screenshot(path=tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 10_000


def test_the_page_says_unsure(browser: Any, reference: Path, photos: Path, env: dict[str, str]):
    with serving(reference, "--threshold", "1", env=env) as (address, _):
        page = browser.new_page()
        page.goto(address)
        page.get_by_text("3 classes").wait_for()
        drop(page, (photos / "red/3.png").read_bytes())
        page.locator("#controls").wait_for(state="visible")
        assert page.locator("#unsure").inner_text().split("\n")[0] == "unsure"
        assert "100.0 % or more" in page.locator("#unsure").inner_text()
        assert page.locator("#status").inner_text().startswith("unsure; red, ")
        assert page.locator("#bars .name").all_inner_texts()[0] == "red"
        weights = page.locator("#bars .name").evaluate_all(
            "all => all.map((each) => getComputedStyle(each).fontWeight)"
        )
        assert set(weights) == {"400"}
        page.close()


def test_the_keyboard_is_enough(page: Any):
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "file"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("#controls").wait_for(state="visible")
    assert page.get_by_role("button", name="Example 1:").get_attribute("aria-pressed") == "true"


@pytest.mark.parametrize(
    ("content", "message"), [(BROKEN["text"], "not an image"), (bytes(2**20 + 1), "upload limit of 1 MB")]
)
def test_a_broken_image_is_explained_in_words(page: Any, photos: Path, content: bytes, message: str):
    drop(page, content)
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert message in alert.inner_text()
    drop(page, (photos / "blue/0.png").read_bytes())
    page.locator("#controls").wait_for(state="visible")
    assert not alert.is_visible()
    assert page.locator("#bars .name").all_inner_texts()[0] == "blue"


def test_every_control_has_a_name(page: Any):
    page.get_by_role("button", name="Example 1:").click()
    page.locator("#controls").wait_for(state="visible")
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, button, img")].filter((each) =>
            !each.labels?.length && !each.hasAttribute("aria-label") && !each.hasAttribute("alt")).length"""
    )
    assert unnamed == 0
    page.set_viewport_size({"width": 320, "height": 700})
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
