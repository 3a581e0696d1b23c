"""One prompt with two methods, as an administrator compares them."""

from __future__ import annotations

from collections.abc import Iterator

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from speculon.operations.admin.ui.playground import first_difference
from tests.browser.conftest import KEY, log_in
from tests.server.outside import LOCAL_HTTP, REAL, Outside, started

KEYS = {"SPECULON_SERVE__ADMIN_KEY": KEY, "SPECULON_SERVE__API_KEY": "planted-api-key"}
SCRIPT = "<script>window.planted = 1</script><img src=x onerror='window.planted = 1'>"
K = "Draft tokens per round (K)"


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outside]:
    """The demo model, behind an API key that the page's reader does not know."""
    arguments = ("--model", "demo", "--admin")
    with started(tmp_path_factory.mktemp("playground"), *arguments, program=REAL, **KEYS) as server:
        server.ready()
        yield server
        assert server.end() == 0, server.stderr
        assert "Traceback" not in server.stderr, server.stderr


def opened(browser: Browser, server: Outside) -> Page:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    page.get_by_role("link", name="Playground").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Playground")
    return page


def choose(page: Page, side: str, method: str) -> None:
    page.locator(f"[data-side={side}]").get_by_label("Method").click()
    page.get_by_role("option", name=method, exact=True).click()


def fill(page: Page, prompt: str, tokens: str) -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Max tokens").fill(tokens)


def asked(server: Outside) -> int:
    return server.stderr.count("/v1/completions")


def test_two_methods_give_the_same_text(browser: Browser, real: Outside) -> None:
    page = opened(browser, real)
    fill(page, "def add(a, b):\n    return a + b\n\ndef add(a, b):\n    return", "48")
    choose(page, "right", "ngram")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-verdict]")).to_contain_text("Same text", timeout=60000)
    left, right = page.locator("[data-side=left]"), page.locator("[data-side=right]")
    expect(left.locator(".sp-accepted[data-d]")).to_have_count(0)
    marked = right.locator(".sp-accepted[data-d]").count()
    assert marked > 0
    expect(right.locator("[data-figure=accepted]")).to_have_text(str(marked))
    assert float(right.locator("[data-figure=per_call]").inner_text()) > 1
    expect(left.locator("[data-figure=per_call]")).to_have_text("1.00")
    for side in (left, right):
        assert float(side.locator("[data-figure=speed]").inner_text().replace(",", "")) > 0
    without_key = httpx.post(real.url() + "/v1/completions", json={"prompt": "a"}, **LOCAL_HTTP)
    assert without_key.status_code == 401
    check_method_in_the_overview(page, real, marked)
    page.context.close()


def check_method_in_the_overview(page: Page, server: Outside, accepted: int) -> None:
    """Its line of the table, and its line of the chart: tokens per target call are its own."""
    page.goto(server.url() + "/admin/")
    row = page.get_by_role("row").filter(has=page.get_by_role("cell", name="ngram", exact=True))
    cells = row.get_by_role("cell")
    expect(cells.nth(3)).to_have_text(str(accepted))
    rounds, drafted = (int(cells.nth(column).inner_text()) for column in (1, 2))
    assert 0 < rounds <= drafted and drafted >= accepted
    per_call = float(cells.nth(5).inner_text())
    assert 1 + accepted / rounds - 1 < per_call <= 1 + accepted / rounds + 0.005
    with pytest.raises(AssertionError):  # the twin: another method has no line
        expect(page.get_by_role("cell", name="eagle3", exact=True)).to_be_visible(timeout=500)


@pytest.mark.parametrize(("field", "value"), [(K, "0"), ("Max tokens", "-1")])
def test_a_wrong_value_runs_nothing(browser: Browser, server: Outside, field: str, value: str) -> None:
    page, before = opened(browser, server), asked(server)
    fill(page, "a", "8")
    page.get_by_label(field, exact=True).first.fill(value)
    page.get_by_role("button", name="Run").click()
    expect(page.get_by_text("Not run: ")).to_be_visible()
    expect(page.get_by_text("A whole number from 1 to ")).to_be_visible()
    page.wait_for_timeout(300)
    expect(page.locator("[data-side] [data-d]")).to_have_count(0)
    assert asked(server) == before
    page.context.close()


def test_an_error_of_the_server_is_told_in_each_side(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    fill(page, "a", "1000000")
    page.get_by_role("button", name="Run").click()
    for side in ("left", "right"):
        expect(page.locator(f"[data-side={side}] [role=alert]")).to_contain_text("Status 400")
    expect(page.locator("[data-verdict]")).to_have_text("")
    page.context.close()


def test_markup_of_prompt_and_answer_is_text(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    fill(page, f"say:{SCRIPT}", "200")  # the script's answer is what follows
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-verdict]")).to_contain_text("Same text", timeout=20000)
    expect(page.locator("[data-side=left] [data-d]")).to_have_count(len(SCRIPT))
    assert page.evaluate("window.planted") is None
    page.evaluate(
        "markup => { document.body.appendChild(document.createElement('p')).innerHTML = markup }", SCRIPT
    )
    page.wait_for_function("window.planted === 1")  # the twin: as markup it runs
    page.context.close()


def test_sampling_without_a_seed_promises_nothing(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    fill(page, "a", "8")
    page.get_by_label("Temperature").fill("1")
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-verdict]")).to_contain_text("may differ")
    page.context.close()


def test_a_page_that_closes_ends_its_request(browser: Browser, server: Outside) -> None:
    page = opened(browser, server)
    fill(page, "a", "900")  # seconds of work for the scripted engine
    page.get_by_role("button", name="Run").click()
    expect(page.locator("[data-side=left] [data-d]").first).to_be_visible()
    page.wait_for_timeout(500)
    assert " 499 " not in server.stderr  # the twin: an open page keeps its request
    page.context.close()
    server.wait_for(lambda: " 499 " in server.stderr, 20)


def test_the_first_difference() -> None:
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2], [1, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
