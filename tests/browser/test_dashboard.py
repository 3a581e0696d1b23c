"""The dashboard as a reader sees it."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, expect

from speculon.server.admin.ui.words import LANGUAGES, Words
from tests.browser.conftest import KEY, log_in
from tests.server.outside import Outside


def test_the_key_opens_the_pages_and_a_wrong_one_does_not(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url(), "wrong")
    expect(page.get_by_role("alert")).to_have_text("This is not the admin key.")
    log_in(page, server.url())
    expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    page.get_by_role("link", name="Log").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Log")
    expect(page.get_by_role("log")).to_contain_text("401 /admin/")
    page.context.close()


def test_numbers_and_charts_move_under_load(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    chart = page.get_by_label("Tokens/s", exact=True)
    expect(chart.locator("canvas")).to_be_visible()
    tokens = page.get_by_text("Tokens generated").locator("xpath=following-sibling::*")
    before, picture = int(tokens.inner_text().replace(",", "")), chart.screenshot()
    body = {"model": "demo", "prompt": "a", "max_tokens": 8}
    for _ in range(4):
        httpx.post(server.url() + "/v1/completions", json=body, trust_env=False).raise_for_status()
    page.wait_for_timeout(2500)
    assert int(tokens.inner_text().replace(",", "")) > before
    assert chart.screenshot() != picture
    page.context.close()


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_is_shown_and_fits_a_narrow_screen(
    browser: Browser, server: Outside, language: str
) -> None:
    context = browser.new_context(locale=language, viewport={"width": 380, "height": 800})
    page, words = context.new_page(), Words(language)
    page.goto(server.url() + "/admin/login")
    page.get_by_label(words("login.key")).fill(KEY)
    page.get_by_role("button", name=words("login.enter")).click()
    for route, name in (("/", "overview"), ("/log", "log")):
        page.goto(server.url() + "/admin" + route)
        expect(page.get_by_role("heading", level=1)).to_have_text(words(f"shell.{name}"))
        assert page.evaluate("document.documentElement.scrollWidth") <= 380
        expect(page.locator("html")).to_have_attribute("lang", language)
    context.close()


def test_a_language_and_a_theme_are_kept(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    page.get_by_label("Language").click()
    page.get_by_text("한국어").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("개요")
    page.get_by_label(Words("ko")("shell.theme_auto")).click()
    page.get_by_label(Words("ko")("shell.theme_light")).click()
    expect(page.get_by_label(Words("ko")("shell.theme_dark"))).to_be_visible()
    expect(page.locator("body")).to_have_class("desktop no-touch body--dark")
    page.context.close()
