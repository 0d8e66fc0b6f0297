"""The page of `braid view` and the report file in headless Chromium. Screenshots go to the folder in the
variable SCREENSHOTS, else to pytest's temporary folder."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.inspection.browser import CHROMIUM, Browser

from braid.inspection.view.answers import Answers
from braid.inspection.view.report import write_report
from braid.inspection.view.server import Server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed"),
]
HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def run(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose first trajectory of round 2 says HOSTILE, in two tokens."""
    folder = shutil.copytree(trained / "seed1", tmp_path_factory.mktemp("page") / "seed1")
    file = folder / "samples/round_000002.jsonl"
    first, *others = file.read_text().splitlines(keepends=True)
    record = json.loads(first)
    turn = record["turns"][0]
    texts = [HOSTILE[:20], HOSTILE[20:]]
    turn |= {"output_text": HOSTILE, "token_texts": texts, "output_ids": [1, 2], "logprobs": [-0.5, -2.0]}
    record["training"] = {"advantages": [1.5, -0.5], "old_logprobs": [-0.5, -2.1]}
    file.write_text(json.dumps(record, ensure_ascii=False) + "\n" + "".join(others))
    return folder


@pytest.fixture(scope="module")
def address(run: Path, trained: Path) -> Iterator[str]:
    answers = Answers([run, shutil.copytree(trained / "seed2", run.with_name("seed2"))])
    server = Server(answers)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.url
    server.shutdown()
    thread.join()
    server.server_close()
    answers.close()


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    one = Browser(tmp_path_factory.mktemp("profile"))
    yield one
    one.close()


@pytest.fixture
def browser(shared_browser: Browser) -> Iterator[Browser]:
    """The browser; the page must report no error."""
    shared_browser.problems.clear()
    yield shared_browser
    assert shared_browser.evaluate("document.title") != "taken"
    assert shared_browser.problems == []


TEXT = "document.body.innerText"
CHARTS = "document.querySelectorAll('.chart canvas').length"


@pytest.mark.parametrize(
    ("place", "ready"),
    [
        ("curves", f"{CHARTS} > 3"),
        ("rollouts/0/round/1/0", "document.querySelectorAll('.policy span').length > 0"),
        ("change/0", f"{TEXT}.includes('paired bootstrap')"),
        ("timeline/0/round/1", "document.querySelectorAll('.lane i').length > 3"),
        ("videos/0", f"{TEXT}.includes('no videos')"),
        ("config", f"{TEXT}.includes('run.seed')"),
    ],
)
def test_each_tab_shows_its_part(
    browser: Browser, address: str, tmp_path: Path, place: str, ready: str
) -> None:
    folder = Path(os.environ.get("SCREENSHOTS", tmp_path))
    folder.mkdir(parents=True, exist_ok=True)
    browser.open(f"{address}#{place}")
    browser.wait_for(ready)
    for width in (1280, 800):
        for is_dark in (False, True):
            name = f"{place.split('/')[0]}_{width}_{'dark' if is_dark else 'light'}.png"
            browser.picture(folder / name, width=width, is_dark=is_dark)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), width


def test_hostile_text_is_shown_as_text(browser: Browser, address: str) -> None:
    browser.open(f"{address}#rollouts/0/round/2/0")
    shown = browser.wait_for(
        "document.querySelector('.policy span') && document.querySelector('.policy').innerText"
    )
    assert shown.strip() == HOSTILE
    assert browser.evaluate("document.querySelectorAll('main img').length") == 0


def test_tokens_are_coloured_and_say_their_numbers(browser: Browser, address: str) -> None:
    browser.open(f"{address}#rollouts/0/round/2/0")
    browser.wait_for("document.querySelectorAll('.policy span').length == 2")
    first, second = browser.evaluate(
        "[...document.querySelectorAll('.policy span')].map((one) => one.style.background)"
    )
    assert "--plus" in first
    assert "--minus" in second
    browser.evaluate(
        "document.querySelectorAll('.policy span')[1].dispatchEvent(new MouseEvent('mouseover', {bubbles: true}))"
    )
    said = browser.wait_for("document.querySelector('.at-token').innerText.includes('id 2') && " + TEXT)
    assert "advantage -0.5" in said
    assert "ratio 0.90484" in said


def test_the_keyboard_moves_between_tabs_rounds_trajectories_and_groups(
    browser: Browser, address: str
) -> None:
    browser.open(f"{address}#curves")
    browser.wait_for(f"{CHARTS} > 3")
    browser.press("2")
    browser.wait_for("document.querySelectorAll('.item').length > 3")
    for key, at in (("j", 1), ("j", 2), ("k", 1)):
        browser.press(key)
        browser.wait_for(f"document.querySelector('.item.on').dataset.at == '{at}'")
    browser.press("h")
    browser.wait_for("location.hash == '#rollouts/0/round/1'")
    browser.press("l")
    browser.wait_for("location.hash == '#rollouts/0/round/2'")
    browser.press("g")
    browser.wait_for("document.querySelectorAll('.columns .card').length > 1")
    browser.press("/")
    browser.wait_for("document.activeElement.id == 'find'")


def test_filters_narrow_the_list(browser: Browser, address: str) -> None:
    browser.open(f"{address}#rollouts/0/round/2")
    browser.wait_for("document.querySelectorAll('.item').length > 3")
    browser.evaluate(
        "(() => { const box = document.getElementById('find'); box.value = 'ONERROR'; "
        "box.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    browser.wait_for("document.querySelectorAll('.item').length == 1")


def test_a_run_that_goes_on_is_followed(browser: Browser, address: str, run: Path) -> None:
    browser.open(f"{address}#rollouts/0")
    browser.wait_for("document.querySelectorAll('.item').length > 3")
    rounds = browser.evaluate("document.querySelectorAll('select[aria-label=round] option').length")
    shutil.copy(run / "samples/round_000001.jsonl", run / "samples/round_000003.jsonl")
    browser.wait_for(f"document.querySelectorAll('select[aria-label=round] option').length == {rounds + 1}")


def test_a_report_shows_the_same_from_one_file(browser: Browser, run: Path, tmp_path: Path) -> None:
    file = write_report(run, tmp_path / "run.html")
    browser.open(f"file://{file}#curves")
    browser.wait_for(f"{CHARTS} > 3")
    browser.press("2")
    browser.wait_for("document.querySelectorAll('.item').length > 3")
    browser.press("g")
    browser.wait_for("document.querySelectorAll('.columns .card').length > 1")
    for key, text in (("3", "paired bootstrap"), ("4", "trajectories over"), ("6", "run.seed")):
        browser.press(key)
        browser.wait_for(f"{TEXT}.includes('{text}')")
    browser.open(f"file://{file}#rollouts/0/round/2/0")
    browser.wait_for(f"{TEXT}.includes('onerror')")
