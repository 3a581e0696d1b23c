"""The shipped model generates the same code with transformers, with plain decoding, and with drafts."""

from __future__ import annotations

import pytest

from tests.tiny.demo_texts import (
    CONCURRENCY,
    DRAFTS,
    GOODPUT,
    MISSING,
    TIE,
    Demo,
    Speculation,
    speculation_modes,
)

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(MISSING, reason="the demo weights are not in this checkout"),
]
OFF: list[Speculation] = [{"method": "off"}]


@pytest.fixture(scope="module")
def demo() -> Demo:
    return Demo(count=8)


@pytest.fixture(scope="module")
def plain(demo: Demo) -> list[list[int]]:
    return demo.write(CONCURRENCY, OFF)[0]


def real_differences(demo: Demo, ours: list[list[int]], truth: list[list[int]]) -> list[object]:
    return [difference for difference in demo.differences(ours, truth) if difference.gap >= TIE]


def test_plain_output_is_that_of_generate(demo: Demo, plain: list[list[int]]) -> None:
    assert not real_differences(demo, plain, demo.by_generate(count=2))
    assert not real_differences(demo, plain, demo.by_forward(plain))
    alone, _ = demo.write(1, OFF, count=2)
    assert not real_differences(demo, alone, plain)


# the soak has the others, too
MIXED = [mode for mode in speculation_modes() if len(mode[1]) > 1]


@pytest.mark.parametrize(("name", "speculation"), MIXED)
def test_a_batch_with_drafts_writes_the_plain_output(
    demo: Demo, plain: list[list[int]], name: str, speculation: list[Speculation]
) -> None:
    texts, accepted = demo.write(CONCURRENCY, speculation)
    assert not real_differences(demo, texts, plain)
    assert accepted > 50


@pytest.mark.parametrize("k", DRAFTS)
def test_alone_with_drafts_it_writes_the_plain_output(demo: Demo, plain: list[list[int]], k: int) -> None:
    texts, _ = demo.write(1, [{"method": "ngram", "num_speculative_tokens": k}], count=2)
    assert not real_differences(demo, texts, plain)


@pytest.mark.parametrize(("concurrency", "count"), [(CONCURRENCY, None), (1, 2)])
def test_under_goodput_it_writes_the_plain_output(
    demo: Demo, plain: list[list[int]], concurrency: int, count: int | None
) -> None:
    texts, _ = demo.write(concurrency, GOODPUT, count)
    assert not real_differences(demo, texts, plain)


def test_a_changed_token_is_seen(demo: Demo, plain: list[list[int]]) -> None:
    wrong = [[*text[:20], (text[20] + 1) % 100, *text[21:]] for text in plain]
    for truth in (plain, demo.by_forward(wrong)):
        assert len(real_differences(demo, wrong, truth)) >= 0.8 * len(plain)
