"""The dashboard as a reader sees it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from speculon.operations.admin.schemas import EngineStatus
from speculon.operations.admin.ui.overview import series_of_engines
from speculon.operations.admin.ui.words import LANGUAGES, UiWords
from tests.browser.conftest import KEY, log_in, soon
from tests.server.outside import LOCAL_HTTP, Outside

QUIET = 2500  # ms: two intervals of the chart, and some


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


def test_a_reader_logs_out_and_another_browser_stays(browser: Browser, server: Outside) -> None:
    pages = [browser.new_context(locale="en-GB").new_page() for _ in range(2)]
    for page in pages:
        log_in(page, server.url())
        expect(page.get_by_role("heading", level=1)).to_have_text("Overview")
    pages[0].get_by_label("Log out").click()
    expect(pages[0].get_by_label("Admin key")).to_be_visible()
    for page, place in zip(pages, ("/admin/login", "/admin/log"), strict=True):
        page.goto(server.url() + "/admin/log")
        expect(page).to_have_url(server.url() + place)
        page.context.close()


def points_of(page: Page) -> dict[str, list[tuple[float, float]]]:
    """Series of the chart of tokens/s, as the browser holds them."""
    # NiceGUI's component holds the chart of the element
    found = page.get_by_label("Tokens/s", exact=True).evaluate(
        "shown => getElement(Number(shown.id.slice(1))).chart.getOption().series"
    )
    return {one["name"]: [tuple(point) for point in one["data"]] for one in found}


def moves_of(page: Page, load: Callable[[], None], tokens: int) -> tuple[int, float]:
    """By how many tokens the number has grown, soon at least by these, and the highest speed among the new
    points of the chart.
    """
    shown = page.get_by_text("Tokens generated").locator("xpath=following-sibling::*")
    page.wait_for_timeout(QUIET)
    assert soon(page, lambda: points_of(page)["Tokens/s"])
    before, last = number_of(shown), max(at for at, _ in points_of(page)["Tokens/s"])

    def speeds() -> list[float]:
        return [speed for at, speed in points_of(page)["Tokens/s"] if at > last]

    load()
    page.wait_for_timeout(QUIET)
    assert soon(page, lambda: number_of(shown) - before >= tokens)
    assert soon(page, lambda: max(speeds(), default=-1) >= min(1, tokens))  # the chart goes on
    return number_of(shown) - before, max(speeds())


def number_of(shown: Locator) -> int:
    return int(shown.inner_text().replace(",", ""))


def test_numbers_and_charts_move_under_load(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    expect(page.get_by_label("Tokens/s", exact=True).locator("svg")).to_be_visible()
    body = {"model": "demo", "prompt": "a", "max_tokens": 8}

    def load() -> None:
        for _ in range(4):
            httpx.post(server.url() + "/v1/completions", json=body, **LOCAL_HTTP).raise_for_status()

    grown, fastest = moves_of(page, load, 32)
    assert grown == 32 and fastest > 0
    assert moves_of(page, lambda: None, 0) == (0, 0)  # the twin: without load nothing moves
    for name in ("Memory by part, MB (estimate)", "Sequences in a plain step, and its ms"):
        expect(page.get_by_label(name).locator("svg")).to_be_visible()
    page.context.close()


def test_memory_and_costs_are_those_of_each_engine() -> None:
    engine = EngineStatus.model_construct(
        memory_bytes={"weights": 4_000_000, "kv": 1}, cost_curve={2: 7.5, 1: 6.0}
    )
    other = EngineStatus.model_construct(memory_bytes={"weights": 1_000_000}, cost_curve={})
    found = series_of_engines({"a": engine, "b": other})
    (weights, kv), models = found["memory"]
    assert (weights["data"], kv["data"], models) == ([4.0, 1.0], [0.0, 0], ["a", "b"])
    assert [(one["name"], one["data"]) for one in found["costs"][0]] == [("a", [[1, 6.0], [2, 7.5]])]


@pytest.mark.parametrize("language", LANGUAGES)
def test_each_language_is_shown_and_fits_a_narrow_screen(
    browser: Browser, server: Outside, language: str
) -> None:
    context = browser.new_context(locale=language, viewport={"width": 380, "height": 800})
    page, words = context.new_page(), UiWords(language)
    page.goto(server.url() + "/admin/login")
    page.get_by_label(words("login.key")).fill(KEY)
    page.get_by_role("button", name=words("login.enter")).click()
    for route, name in (("/", "overview"), ("/models", "models"), ("/playground", "playground")):
        page.goto(server.url() + "/admin" + route)
        expect(page.get_by_role("heading", level=1)).to_have_text(words(f"shell.{name}"))
        check_width(page, 380)
        expect(page.locator("html")).to_have_attribute("lang", language)
    page.evaluate("document.querySelector('.q-page').style.width = '500px'")
    with pytest.raises(AssertionError):  # the twin: what is wider is seen
        check_width(page, 380)
    context.close()


def check_width(page: Page, most: int) -> None:
    """Nothing is wider than the screen; what hides its overflow does not hide it from this."""
    widths = "[...document.querySelectorAll('html, .q-page-container')].map(shown => shown.scrollWidth)"
    assert max(page.evaluate(widths)) <= most


CONTRAST = """shown => {
  const light = text => {
    if (text.startsWith("rgba")) return NaN  // what is behind it would count
    const [r, g, b] = text.match(/[\\d.]+/g).map(v => v / 255)
      .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05 }
  if (!shown.isConnected) return NaN  // a chart has changed meanwhile
  const style = getComputedStyle(shown)
  const [a, b] = [light(style.color), light(style.backgroundColor)]
  return Math.max(a, b) / Math.min(a, b) }"""


CHART_CONTRAST = CONTRAST.replace("style.color", "style.fill").replace(
    "style.backgroundColor", "getComputedStyle(shown.closest('.q-card')).backgroundColor"
)


def has_contrast(shown: Locator, script: str = CONTRAST, seconds: float = 15) -> bool:
    """WCAG 2.2, 1.4.3: 4.5 to 1, soon: the colours come once the page is connected."""
    return soon(shown.page, lambda: shown.evaluate(script) >= 4.5, seconds)


def white_on_light_blue(page: Page) -> None:
    """A planted error."""
    page.add_style_tag(content="body, body.body--dark { --q-primary: #5898d4 !important }")
    page.add_style_tag(
        content="@layer theme { .bg-primary.text-white, .q-badge.bg-primary { color: #fff !important } }"
    )


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_text_of_charts_buttons_and_badges_has_enough_contrast(
    theme: Literal["light", "dark"], browser: Browser, server: Outside
) -> None:
    page = browser.new_context(color_scheme=theme, locale="en-GB").new_page()
    log_in(page, server.url())
    text = page.get_by_label("Tokens/s", exact=True).locator("svg text").first
    expect(page.locator(".body--dark")).to_have_count(int(theme == "dark"))
    assert has_contrast(text, CHART_CONTRAST)
    grey = {"light": "#808080", "dark": "#6a6a6a"}[theme]
    page.add_style_tag(content=f"svg text {{ fill: {grey} !important }}")
    assert not has_contrast(text, CHART_CONTRAST, 2)  # the twin: one grey for both themes
    page.goto(server.url() + "/admin/playground")
    button = page.locator("button.bg-primary").first
    assert has_contrast(button)
    white_on_light_blue(page)
    assert not has_contrast(button, seconds=2)
    page.goto(server.url() + "/admin/models")
    badge = page.locator(".q-badge.bg-primary").first
    assert has_contrast(badge)
    white_on_light_blue(page)
    assert not has_contrast(badge, seconds=2)
    page.context.close()


def test_languages_and_themes_are_chosen_and_kept(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    was, heading = "en", page.get_by_role("heading", level=1)
    for language in ("ko", "ja", "zh", "en", "ko"):
        page.get_by_label(UiWords(was)("shell.language")).click()
        page.get_by_text(LANGUAGES[language], exact=True).click()
        expect(heading).to_have_text(UiWords(language)("shell.overview"))
        was = language
    with pytest.raises(AssertionError):  # the twin: another language is seen
        expect(heading).to_have_text(UiWords("ja")("shell.overview"), timeout=500)
    page.get_by_label(UiWords("ko")("shell.theme_auto")).click()
    page.get_by_label(UiWords("ko")("shell.theme_light")).click()
    expect(page.get_by_label(UiWords("ko")("shell.theme_dark"))).to_be_visible()
    expect(page.locator("body")).to_have_class("desktop no-touch body--dark")
    page.reload()
    expect(heading).to_have_text("개요")
    expect(page.locator("body")).to_have_class("desktop no-touch body--dark")
    page.context.close()
