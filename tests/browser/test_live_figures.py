"""While a long answer is written, the pages follow it about once a second."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Page

from tests.browser.conftest import KEY, log_in
from tests.server.outside import LOCAL_HTTP, REAL, Outside, started

LOOKS, PAUSE = 160, 250  # at most so many looks at the pages, and ms between two
DISTINCT = 4  # texts of each figure
# of the overview's table of methods and of the list of requests: cell -> its place in the row
OF_METHOD = {"rounds": 1, "drafted": 2, "accepted": 3}
OF_REQUEST = {"seconds": 4, "tokens": 5, "account": 6}


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Outside]:
    """The demo model, which drafts one token a round: an answer takes as long as it can."""
    options = ("--admin", "--model", "demo", "--draft", "demo-draft", "--method", "draft_model")
    options += ("--policy", "fixed", "--num-speculative-tokens", "1", "--threads", "1")
    with started(tmp_path, *options, program=REAL, SPECULON_SERVE__ADMIN_KEY=KEY) as server:
        server.ready()
        yield server


@contextmanager
def streaming(url: str, tokens: int) -> Iterator[None]:
    """Reads answers of so many tokens, one after the other, until the block ends."""
    body = {
        "model": "demo",
        "prompt": "import os\n",
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
    }
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60, **LOCAL_HTTP) as answer:
                for line in answer.iter_lines():
                    assert not line.startswith("data: {") or "choices" in json.loads(line[6:]), line
                    if done.is_set():
                        break

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield
    finally:
        done.set()
        reading.join()


def cells(page: Page, places: dict[str, int]) -> dict[str, str]:
    """Of the first row of its table; empty where there is none."""
    texts = page.locator("tbody tr").first.locator("td").all_inner_texts()
    return {name: texts[at] if at < len(texts) else "" for name, at in places.items()}


def check_that_pages_follow(overview: Page, requests: Page, looks: int = LOOKS) -> None:
    seen: dict[str, set[str]] = {}
    for _ in range(looks):
        number = overview.get_by_text("Tokens generated").locator("xpath=following-sibling::*").inner_text()
        shown = {"tokens generated": number, **cells(overview, OF_METHOD)}
        for name, text in (shown | {f"row {n}": t for n, t in cells(requests, OF_REQUEST).items()}).items():
            seen.setdefault(name, set()).add(text)
        if min(map(len, seen.values())) >= DISTINCT:
            break
        overview.wait_for_timeout(PAUSE)
    assert not (still := {name: texts for name, texts in seen.items() if len(texts) < DISTINCT}), still
    assert any("drafts accepted" in text for text in seen["row account"])


def test_the_pages_follow_an_answer_while_it_is_written(browser: Browser, real: Outside) -> None:
    context = browser.new_context(locale="en-GB")
    overview, requests = context.new_page(), context.new_page()
    log_in(overview, real.url())
    requests.goto(real.url() + "/admin/requests")
    with streaming(real.url(), 1900):
        check_that_pages_follow(overview, requests)
    with pytest.raises(AssertionError, match="rounds"):  # the twin: without an answer nothing moves
        check_that_pages_follow(overview, requests, looks=24)
    context.close()
