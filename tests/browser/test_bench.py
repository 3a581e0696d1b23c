"""A benchmark from the dashboard: confirmed, run, shown, cancelled."""

from __future__ import annotations

from playwright.sync_api import Browser, Page, expect

from tests.browser.conftest import log_in
from tests.server.outside import Outside

WHOLE_RUN = 120_000  # ms: it loads the model in a process of its own


def opened(browser: Browser, server: Outside) -> Page:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.goto(server.url() + "/admin/bench")
    page.get_by_label("Modes").fill("off,ngram:4")
    page.get_by_label("Prompts").fill("1")
    page.get_by_label("Tokens per answer, at most").fill("4")
    return page


def start(page: Page) -> None:
    page.get_by_role("button", name="Start", exact=True).click()
    page.get_by_role("button", name="Start now").click()


def test_a_refused_option_names_its_value(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    page.get_by_label("Prompts").fill("257")
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("prompts = 257")
    page.context.close()


def test_without_confirmation_nothing_starts(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    page.get_by_role("button", name="Start", exact=True).click()
    expect(page.get_by_text("Requests become slower")).to_be_visible()
    page.get_by_role("button", name="Back").click()
    page.wait_for_timeout(1500)
    expect(page.get_by_role("button", name="Start", exact=True)).to_be_enabled()
    expect(page.get_by_role("status")).to_be_hidden()
    page.context.close()


def test_a_benchmark_is_cancelled(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    start(page)
    expect(page.get_by_role("status")).to_contain_text("running")
    page.get_by_role("button", name="Cancel").click()
    expect(page.get_by_role("status")).to_contain_text("cancelled", timeout=15_000)
    page.context.close()


def test_a_benchmark_ends_with_a_chart_and_its_cells(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    start(page)
    expect(page.get_by_role("status")).to_contain_text("done", timeout=WHOLE_RUN)
    expect(page.get_by_label("Speed, times plain decoding").locator("svg")).to_be_visible()
    for mode in ("off", "ngram:4", "off again"):
        row = page.get_by_role("row").filter(has=page.get_by_role("cell", name=mode, exact=True))
        assert float(row.get_by_role("cell").nth(3).inner_text()) > 0
    page.context.close()
