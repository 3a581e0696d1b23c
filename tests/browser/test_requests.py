"""Requests and their tokens, as a reader sees them."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from playwright.sync_api import Browser, Page, expect

from speculon.operations.admin.schemas import RequestView, TokenRow
from speculon.operations.admin.ui import token_view
from speculon.operations.admin.ui.requests import account
from speculon.operations.admin.ui.token_view import FATES, html_of, visible
from speculon.operations.admin.ui.words import UiWords
from tests.browser.conftest import log_in
from tests.server.outside import LOCAL_HTTP, Outside


def test_markup_in_tokens_is_escaped() -> None:
    for text in ("<script>alert(1)</script>", '"><img src=x onerror=alert(1)>'):
        row = TokenRow(id=1, text=text, fate="plain", source=text, position=0, logprob=None, rank=None)
        shown = html_of([row], UiWords("en"))
        assert "<script" not in shown and "<img" not in shown
        assert shown.count("<") == 2  # the span, and its end


def test_markup_that_is_not_escaped_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin."""
    monkeypatch.setattr(token_view, "escape", lambda text, **options: text)
    with pytest.raises(AssertionError):
        test_markup_in_tokens_is_escaped()


def test_the_account_has_rounds_only_where_there_were_some() -> None:
    ended = {"method": "ngram", "rounds": 2, "drafted": 8, "accepted": 6, "tokens_per_target_call": 4.0}
    view = RequestView.model_construct(speculation={**ended, "saved_ms": 35.4})
    words = UiWords("en")
    text = "ngram: 2 rounds, 6 of 8 drafts accepted, 4.00 tokens per target call, 35 ms saved"
    assert account(view, words) == text
    view = RequestView.model_construct(speculation={"method": "off", "reasons": {"off_request": 3}})
    assert account(view, words) == "off"
    running = RequestView.model_construct(speculation={**ended, "rounds": 0})
    assert account(running, words) == "ngram"


def test_whitespace_is_visible() -> None:
    assert visible(" a\t\n") == "·a⇥↵\n"


def check_marks(page: Page, fates: list[str]) -> None:
    """Each token has the mark of its fate, as the answer tells it."""
    expect(page.locator(".sp-tokens [data-d]")).to_have_count(len(fates))
    for fate in FATES:
        expect(page.locator(f".sp-{fate}[data-d]")).to_have_count(fates.count(fate), timeout=1000)


def test_a_request_leads_to_its_tokens_and_their_fates(browser: Browser, server: Outside) -> None:
    page = browser.new_context(locale="en-GB").new_page()
    log_in(page, server.url())
    body = {"model": "demo", "prompt": "a", "max_tokens": 8, "speculation": {"explain": True}}
    answer = httpx.post(server.url() + "/v1/completions", json=body, **LOCAL_HTTP).raise_for_status()
    page.goto(server.url() + "/admin/requests")
    page.get_by_role("link", name=answer.json()["id"]).click()
    fates = [token["fate"] for token in answer.json()["choices"][0]["speculation"]["tokens"]]
    assert "accepted" in fates
    check_marks(page, fates)
    page.evaluate("document.querySelectorAll('.sp-accepted').forEach(one => one.className = 'sp-plain')")
    with pytest.raises(AssertionError):  # the twin: marks of accepted tokens are missing
        check_marks(page, fates)
    page.context.close()
