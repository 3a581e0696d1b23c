"""Twenty-four pieces of code, 64 tokens each: generate, plain, and n-gram drafts with K of 1, 4 and 16, alone
and batched.
"""

from __future__ import annotations

import pytest

from tests.tiny.demo_texts import (
    CONCURRENCY,
    GOODPUT,
    MISSING,
    TIE,
    TOKENS,
    Demo,
    Speculation,
    report,
    speculation_modes,
)

PROMPTS = 24
ALLOWED = 1  # text that may differ, at a tie
OFF: list[Speculation] = [{"method": "off"}]
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(MISSING, reason="the demo weights are not in this checkout"),
]


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(count=PROMPTS)


@pytest.fixture(scope="module")
def plain(demo: Demo) -> list[list[int]]:
    return demo.write(1, OFF)[0]


def check(
    name: str, demo: Demo, ours: list[list[int]], truth: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    found = demo.differences(ours, truth)
    with capsys.disabled():
        print(f"\n{report(name, found, PROMPTS)}", flush=True)
    assert all(len(text) == TOKENS for text in ours)
    assert len(found) <= ALLOWED and all(difference.gap < TIE for difference in found)


def test_plain_output_is_that_of_generate(
    demo: Demo, plain: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    check("plain against generate", demo, plain, demo.by_generate(), capsys)


def test_a_plain_batch_writes_what_each_writes_alone(
    demo: Demo, plain: list[list[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    check(f"plain, {CONCURRENCY} at once", demo, demo.write(CONCURRENCY, OFF)[0], plain, capsys)


@pytest.mark.parametrize("concurrency", [1, CONCURRENCY])
@pytest.mark.parametrize(("name", "speculation"), list(speculation_modes()))
def test_drafts_change_no_token(
    demo: Demo,
    plain: list[list[int]],
    name: str,
    speculation: list[Speculation],
    concurrency: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    texts, accepted = demo.write(concurrency, speculation)
    check(f"{name}, {concurrency} at once, {accepted} drafts accepted", demo, texts, plain, capsys)
    assert accepted > PROMPTS


@pytest.mark.parametrize("concurrency", [1, CONCURRENCY])
def test_under_goodput_it_changes_no_token(
    demo: Demo, plain: list[list[int]], concurrency: int, capsys: pytest.CaptureFixture[str]
) -> None:
    texts, accepted = demo.write(concurrency, GOODPUT)
    check(f"policy goodput, {concurrency} at once, {accepted} drafts accepted", demo, texts, plain, capsys)


def test_a_changed_token_is_seen(demo: Demo, plain: list[list[int]]) -> None:
    wrong = [[*text[:20], (text[20] + 1) % 100, *text[21:]] for text in plain[:8]]
    for truth in (plain[:8], demo.by_forward(wrong)):
        assert sum(difference.gap >= TIE for difference in demo.differences(wrong, truth)) > 6
