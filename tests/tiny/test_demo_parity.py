"""The shipped model generates the same code with transformers, with plain decoding, and with drafts."""

from __future__ import annotations

import pytest

from tests.tiny.demo_texts import CROWD, DRAFTS, GOODPUT, MISSING, TIE, Demo, Speculation, asked

pytestmark = pytest.mark.skipif(MISSING, reason="the demo weights are not in this checkout")
OFF: list[Speculation] = [{"method": "off"}]


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(count=24)


@pytest.fixture(scope="module")
def plain(demo: Demo) -> list[list[int]]:
    return demo.write(CROWD, OFF)[0]


def real_differences(demo: Demo, ours: list[list[int]], truth: list[list[int]]) -> list[object]:
    return [difference for difference in demo.differences(ours, truth) if difference.gap >= TIE]


def test_plain_text_is_that_of_generate(demo: Demo, plain: list[list[int]]) -> None:
    assert not real_differences(demo, plain, demo.by_generate)
    alone, _ = demo.write(1, OFF, count=4)
    assert not real_differences(demo, alone, plain)


@pytest.mark.parametrize(("name", "speculation"), list(asked()))
def test_a_crowd_with_drafts_writes_the_plain_text(
    demo: Demo, plain: list[list[int]], name: str, speculation: list[Speculation]
) -> None:
    texts, accepted = demo.write(CROWD, speculation)
    assert not real_differences(demo, texts, plain)
    assert accepted > 50


@pytest.mark.parametrize("k", DRAFTS)
def test_alone_with_drafts_it_writes_the_plain_text(demo: Demo, plain: list[list[int]], k: int) -> None:
    texts, _ = demo.write(1, [{"method": "ngram", "num_speculative_tokens": k}], count=4)
    assert not real_differences(demo, texts, plain)


@pytest.mark.parametrize(("texts_at_once", "count"), [(CROWD, None), (1, 4)])
def test_under_goodput_it_writes_the_plain_text(
    demo: Demo, plain: list[list[int]], texts_at_once: int, count: int | None
) -> None:
    texts, _ = demo.write(texts_at_once, GOODPUT, count)
    assert not real_differences(demo, texts, plain)


def test_a_changed_token_is_seen(demo: Demo, plain: list[list[int]]) -> None:
    wrong = [[*text[:20], (text[20] + 1) % 100, *text[21:]] for text in plain]
    assert len(real_differences(demo, wrong, plain)) >= 0.8 * len(plain)
