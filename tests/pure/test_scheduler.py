from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest

from speculon.core.config import SamplingParams
from speculon.core.errors import EmptyPrompt, InvalidParameter, NeverFits, TooLong
from speculon.core.types import Ask, Decision, Finish, Load, Reason, Verdict
from speculon.decoding.rounds import Drafted, Judged, Span
from speculon.decoding.sequence import Event, Sequence
from speculon.engine.admission import check_request
from speculon.engine.scheduler import Scheduler
from speculon.runtimes.base import Facts
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.speculation.control.fixed import Fixed
from tests.builders import decisions, make_sequence

LOAD = Load(1, 0, 10)


def run(
    scheduler: Scheduler, spans: list[Span], token: int = 7, finish: Collection[Sequence] = ()
) -> list[Event]:
    """Computes a plan as the engine would, every sampled sequence writing `token`."""
    pool, judged = scheduler.space, list[Judged]()
    assert isinstance(pool, BlockPool)
    for span in spans:
        pool.extend(span.seq, span.end)
        done = Finish("length") if span.seq in finish else None
        verdict = Verdict((token,) if span.samples else (), finish=done)
        span.seq.advance(span.end, verdict.tokens, 0)
        pool.cut_to_committed(span.seq)
        judged.append(Judged(Drafted(span), verdict))
    return scheduler.free_ended(judged)[0]


def test_a_long_prompt_comes_in_chunks_and_decoding_goes_first():
    scheduler = Scheduler(BlockPool(64, 4), 8, max_batch_tokens=10)
    short, long = make_sequence([1] * 3), make_sequence([2] * 25)
    scheduler.add([short])
    scheduler.add([long])
    lengths = []
    for _ in range(4):
        spans = scheduler.plan()
        lengths.append([(span.seq is long, span.length) for span in spans])
        run(scheduler, spans)
    assert lengths == [
        [(False, 3), (True, 7)],
        [(False, 1), (True, 9)],
        [(False, 1), (True, 9)],
        [(False, 1), (True, 1)],
    ]


LONG, STEP = 200, 16  # tokens of a long prompt, rows of a step


def first_steps(scheduler: Scheduler, seqs: list[Sequence], late: list[Sequence] = []) -> list[int]:  # noqa: B006
    """The step in which each sequence writes its only token; `late` ones come after the first step."""
    first: dict[Sequence, int] = {}
    for seq in seqs:
        scheduler.add([seq])
    for step in range(1000):
        spans = scheduler.plan()
        assert sum(span.length for span in spans) <= STEP
        done = {span.seq for span in spans if span.samples}
        run(scheduler, spans, finish=done)
        scheduler.check_integrity()
        first |= dict.fromkeys(done, step)
        for seq in late if not step else ():
            scheduler.add([seq])
        if len(first) == len(seqs) + len(late):
            return [first[seq] for seq in (*seqs, *late)]
    raise AssertionError("a prompt never ran")


def long_prompts(count: int = 6) -> list[Sequence]:
    return [make_sequence([10 + i] * LONG) for i in range(count)]


@pytest.mark.parametrize(
    ("tokens", "steps"),
    [
        pytest.param([1] * 4, 1, id="in the next step"),
        pytest.param([1] * 24, 3, id="in half of the rows"),
        pytest.param([2] * LONG + [3] * 4, 1, id="what is in pages is not counted"),
    ],
)
def test_a_short_prompt_does_not_wait_for_long_ones(tokens: list[int], steps: int):
    before = first_steps(Scheduler(BlockPool(999, 4), 8, STEP), long_prompts())
    scheduler = Scheduler(BlockPool(999, 4), 8, STEP)
    first_steps(scheduler, [make_sequence([2] * LONG)])
    *after, short = first_steps(scheduler, long_prompts(), [make_sequence(tokens)])
    assert short == steps
    assert sum(after) <= 1.05 * sum(before) and after == sorted(after)


def test_a_long_prompt_has_half_of_the_rows_whatever_comes():
    scheduler = Scheduler(BlockPool(999, 4), 8, STEP)
    scheduler.add([long := make_sequence([1] * LONG)])
    for step in range(2, 2 + 2 * LONG // STEP):
        scheduler.add([make_sequence([step] * (STEP // 2), request_id=f"{step}")])
        run(scheduler, scheduler.plan())
        scheduler.abort(f"{step}")
    assert len(long.tokens) > LONG and len(scheduler.waiting) == 0


@pytest.mark.parametrize("places", [2, 3])
def test_a_short_prompt_leaves_a_place_to_the_first_in_the_queue(places: int):
    scheduler = Scheduler(BlockPool(999, 4), places, STEP)
    for seq in (*long_prompts(2), short := make_sequence([1] * 4)):
        scheduler.add([seq])
    run(scheduler, scheduler.plan())
    assert (short in scheduler.running) == (places == 3)


@pytest.mark.parametrize("pages", [70, 120])
def test_a_short_prompt_leaves_pages_to_those_that_run_and_to_the_first_in_the_queue(pages: int):
    scheduler = Scheduler(BlockPool(pages, 4), 8, STEP)
    for seq in (*long_prompts(2), short := make_sequence([1] * 9)):
        scheduler.add([seq])
    for _ in range(5):
        run(scheduler, scheduler.plan())
    assert (short in scheduler.running) == (pages == 120)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("every", [6, 8, 20])
def test_younger_prompts_leave_the_oldest_the_pages_that_it_needs(every: int, prefix_cache: bool):
    scheduler = Scheduler(BlockPool(52, 4, prefix_cache=prefix_cache), 8, STEP)
    scheduler.add([oldest := make_sequence([1] * 180)])
    for step in range(20):
        if step % every == 0:
            scheduler.add([make_sequence([100 + step] * 8)])
        run(scheduler, scheduler.plan())
    assert oldest.num_output and not oldest.stats.preemptions


def test_the_youngest_gives_its_pages_back_also_if_it_started_first():
    scheduler = Scheduler(BlockPool(60, 4), 8, STEP)
    oldest, second = make_sequence([1] * 60), make_sequence([3] * 50)
    shorts = [make_sequence([10 + i] * 8) for i in range(5)]
    for seq in (oldest, second, *shorts):
        scheduler.add([seq])
    for _ in range(60):
        run(scheduler, scheduler.plan())
    assert not second.stats.preemptions and any(seq.stats.preemptions for seq in shorts)


@pytest.mark.parametrize("tail", [4, 40])
def test_a_prompt_waits_for_pages_that_another_is_filling(tail: int):
    scheduler = Scheduler(BlockPool(999, 4), 8, STEP)
    first, second = make_sequence([1] * LONG + [2] * 80), make_sequence([1] * LONG + [3] * tail)
    early, late = first_steps(scheduler, [first, second])
    assert second.stats.cached_tokens == LONG
    assert late < early if tail == 4 else late <= early + 1


class CountedIndex(dict[Any, int]):
    lookups = 0

    def get(self, *args: Any) -> Any:
        self.lookups += 1
        return super().get(*args)


@pytest.mark.parametrize(
    ("pages", "places"),
    [
        pytest.param(999, 16, id="behind a prefix that is being filled"),
        pytest.param(70, 16, id="without pages"),
        pytest.param(999, 1, id="without places"),
    ],
)
def test_waiting_prompts_look_up_only_what_is_new(pages: int, places: int):
    scheduler, waiting = Scheduler(BlockPool(pages, 4), places, STEP), 12
    scheduler.space._index = index = CountedIndex()
    scheduler.add([oldest := make_sequence([1] * LONG + [2] * 44)])
    for i in range(waiting):
        scheduler.add([make_sequence([1] * LONG + [10 + i] * 40)])
    while not oldest.num_output:
        index.lookups = 0
        spans = scheduler.plan()
        # pages of the last step, and one that is not there, for each; to start, one prompt looks again
        assert index.lookups <= waiting * 2 * (STEP // 4 + 2) + (LONG + 40) // 4
        run(scheduler, spans)
        scheduler.check_integrity()


def test_without_pages_the_youngest_gives_way_and_comes_back():
    pool = BlockPool(6, 4)
    scheduler = Scheduler(pool, 8, 100)
    old, young = make_sequence([1] * 8, max_tokens=16), make_sequence([2] * 8, max_tokens=16)
    scheduler.add([old])
    scheduler.add([young])
    for _ in range(9):
        run(scheduler, scheduler.plan())
        scheduler.check_integrity()
    assert scheduler.running == [old] and list(scheduler.waiting) == [young]
    assert young.stats.preemptions == 1 and young.committed == 0
    run(scheduler, scheduler.plan(), finish={old})
    spans = scheduler.plan()
    assert spans[0].seq is young and spans[0].samples


def test_a_sequence_that_gave_way_comes_back_before_younger_ones():
    """More of them wait than may run at once, so the order of the queue decides."""
    scheduler = Scheduler(BlockPool(6, 4), 2, 100)
    old, young, *later = [make_sequence([1 + i] * 8, max_tokens=16) for i in range(5)]
    for seq in (old, young, *later):
        scheduler.add([seq])
    while not young.stats.preemptions:
        run(scheduler, scheduler.plan())
    assert scheduler.running == [old] and list(scheduler.waiting) == [young, *later]
    run(scheduler, scheduler.plan(), finish={old})
    run(scheduler, scheduler.plan())
    assert scheduler.running[0] is young


def test_nobody_starts_while_an_older_prompt_waits_for_pages():
    scheduler = Scheduler(BlockPool(20, 4), 8, 100)
    old, long, short = make_sequence([1] * 40), make_sequence([2] * 60), make_sequence([3] * 8)
    scheduler.add([old])
    run(scheduler, scheduler.plan())
    for seq in (long, short):  # 9 pages are free: the first needs 15, the second 2
        scheduler.add([seq])
    run(scheduler, scheduler.plan())
    assert scheduler.running == [old]
    run(scheduler, scheduler.plan(), finish={old})
    run(scheduler, scheduler.plan())
    assert long.num_output == short.num_output == 1


def test_a_start_leaves_pages_to_the_prompts_that_run():
    """The third needs 11 pages, and as many are free when the fourth, a shorter one, has begun: it waits."""
    scheduler = Scheduler(BlockPool(24, 4), 8, STEP)
    seqs = [make_sequence([1 + i] * length) for i, length in enumerate((33, 7, 41, 32))]
    for seq in seqs:
        scheduler.add([seq])
    for _ in range(8):
        run(scheduler, scheduler.plan())
    assert [seq.num_output > 0 for seq in seqs] == [True, True, False, True]
    assert not any(seq.stats.preemptions for seq in seqs)


def test_samples_start_from_the_first_one_s_pages():
    scheduler = Scheduler(BlockPool(32, 4), 8, 100)
    samples = [make_sequence([1] * 9, request_id="r") for _ in range(3)]
    scheduler.add(samples)
    run(scheduler, scheduler.plan())
    spans = scheduler.plan()
    assert [(span.seq.id, span.start) for span in spans[1:]] == [(s.id, 8) for s in samples[1:]]
    one, other = (scheduler.space.of(seq).table for seq in samples[:2])  # type: ignore[attr-defined]
    assert other == one[:2]


def test_abort_ends_running_waiting_and_not_yet_started_samples():
    scheduler = Scheduler(BlockPool(32, 4), 8, 100)
    scheduler.add([make_sequence([1] * 9, request_id="r") for _ in range(3)])
    scheduler.add([make_sequence([1] * 9, request_id="other")])
    run(scheduler, scheduler.plan())
    events, ended = scheduler.abort("r")
    assert len(ended) == 3 and all(event.finish and event.finish.reason == "abort" for event in events)
    assert [seq.request.id for seq in scheduler.running] == ["other"]
    scheduler.check_integrity()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, Decision.of([Ask("ngram", 4)]), id="as set"),
        pytest.param({"max_tokens": 3}, Decision.of([Ask("ngram", 2)]), id="no further than max_tokens"),
        pytest.param(
            {"max_tokens": 1}, Decision.plain(Reason.MAX_TOKENS), id="the last token needs no draft"
        ),
        pytest.param(
            {"methods": (), "off": Reason.OFF_REQUEST},
            Decision.plain(Reason.OFF_REQUEST),
            id="off by request",
        ),
        pytest.param(
            {"max_drafts": {"brought": 9, "ngram": 4}},
            Decision.of([Ask("brought", 9), Ask("ngram", 4)]),
            id="each with its own limit",
        ),
        pytest.param(
            {"off": Reason.MEMORY, "max_drafts": {"brought": 9}},
            Decision.of([Ask("brought", 9)]),
            id="a lacking method is no hindrance to what came along",
        ),
    ],
)
def test_the_fixed_policy_says_why_not(fields: dict, expected: Decision):
    assert decisions(Fixed(), [make_sequence([1], **fields)], LOAD) == [expected]


@pytest.mark.parametrize(
    ("prompt", "params", "error", "message"),
    [
        pytest.param([], {}, EmptyPrompt, "no tokens", id="empty"),
        pytest.param(
            [99], {}, InvalidParameter, "prompt = 99: token ids must be from 0 to 9", id="unknown id"
        ),
        pytest.param([1] * 21, {}, TooLong, "prompt 21 > context 20", id="prompt too long"),
        pytest.param(
            [1] * 11,
            {"max_tokens": 10},
            TooLong,
            "prompt 11 \\+ max_tokens 10 > context 20",
            id="answer too long",
        ),
        pytest.param(
            [1] * 10,
            {"max_tokens": 7},
            NeverFits,
            "17 tokens need 5 KV pages of 4 tokens, but the pool has 4",
            id="never fits",
        ),
        pytest.param(
            [1], {"max_tokens": 1, "logit_bias": {10: 1.0}}, InvalidParameter, "logit_bias = 10", id="bias id"
        ),
        pytest.param(
            [1], {"max_tokens": 1, "logprobs": 11}, InvalidParameter, "logprobs = 11", id="logprobs"
        ),
    ],
)
def test_admission_refuses_by_name_and_number(
    prompt: list[int], params: dict, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        facts = Facts("toy", 10, 20, frozenset(), capacity=16)
        check_request(prompt, SamplingParams(**params), facts, BlockPool(4, 4))
