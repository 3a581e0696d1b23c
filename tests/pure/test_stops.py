"""Each proposal carries why it ended and how long its match was, and keeps both where others cut it or go on
behind it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.config import SpeculationConfig
from speculon.core.types import NO_LIMITS, Draft, Reason, Stop, no_draft
from speculon.decoding.sequence import Sequence
from speculon.speculation.proposers.base import Proposer, TargetFacts
from speculon.speculation.proposers.compose import Proposers, fit
from speculon.speculation.proposers.prediction import LONGEST, Cursor, spell
from speculon.speculation.proposers.registry import TABLE, WITH_WEIGHTS, find_factory
from tests.builders import draft_once, make_sequence

FACTS = TargetFacts(vocab_size=1000, max_context=4096)
TEN = list(range(1, 11))
Outcome = tuple[int, int, Stop | None]  # drafts, tokens matched, why it ended
NO_MATCH = (0, 0, Stop.NO_MATCH)


def outcome(draft: Draft) -> Outcome:
    return len(draft.tokens), draft.match, draft.stop


def drafted(proposer: Proposer, seq: Sequence, k: int) -> Outcome:
    proposer.admit(seq)
    (draft,) = proposer.propose([seq], [k])
    return outcome(draft)


def looked_up(
    method: str, tokens: list[int], k: int = 4, settings: dict[str, Any] | None = None, **fields: Any
) -> Outcome:
    return drafted(
        find_factory(method)(SpeculationConfig(**settings or {}), FACTS), make_sequence(tokens, **fields), k
    )


def forced(*tokens: int) -> Any:
    return SimpleNamespace(forced=lambda: tokens)


LOOKUPS = [
    pytest.param("ngram", [1, 2, 3, 4], {}, NO_MATCH, id="ngram, nothing repeats"),
    pytest.param("ngram", [1, 2, 3, 4, 5, 1, 2, 3], {}, (4, 3, Stop.LIMIT), id="ngram"),
    pytest.param("ngram", [7, 7, 7], {}, (4, 2, Stop.LIMIT), id="ngram, a match at the end repeats itself"),
    pytest.param("suffix", [*TEN, 1, 2, 3], {}, (4, 3, Stop.LIMIT), id="suffix"),
    pytest.param(
        "suffix",
        [*TEN, 1, 2, 3],
        {"settings": {"suffix_max_factor": 1.0}},
        (3, 3, Stop.FACTOR),
        id="suffix, factor",
    ),
    pytest.param(
        "suffix",
        [*TEN, 1, 2, 3],
        {"settings": {"suffix_min_hits": 2}},
        (0, 3, Stop.MIN_HITS),
        id="found once",
    ),
    pytest.param(
        "suffix",
        [1, 2, 8, 3, 1, 2, 8, 4, 1, 2],
        {"settings": {"suffix_min_probability": 0.6}},
        (1, 2, Stop.MIN_PROBABILITY),
        id="suffix, half of what follows",
    ),
    pytest.param("prediction", [5], {"output": [70], "prediction": (1, 2)}, NO_MATCH, id="prediction, lost"),
    pytest.param(
        "prediction",
        [5],
        {"output": [1, 2, 3], "prediction": tuple(TEN)},
        (4, 3, Stop.LIMIT),
        id="prediction",
    ),
    pytest.param(
        "prediction",
        [5],
        {"output": [1, 2], "prediction": (1, 2, 3)},
        (1, 2, Stop.SOURCE_END),
        id="prediction's end",
    ),
    pytest.param(
        "prediction",
        [5],
        {"output": [1, 2], "prediction": (1, 2)},
        (0, 2, Stop.SOURCE_END),
        id="at prediction's end",
    ),
    pytest.param(
        "prediction",
        [5],
        {"k": 20, "output": [70, 1, 2], "prediction": tuple(range(1, 40))},
        (8, 2, Stop.WINDOW),
        id="window",
    ),
    pytest.param("grammar", [5], {}, NO_MATCH, id="grammar, none"),
    pytest.param("grammar", [5], {"grammar": forced()}, (0, 0, Stop.CHOICE), id="grammar, a choice at once"),
    pytest.param("grammar", [5], {"grammar": forced(1, 2)}, (2, 0, Stop.CHOICE), id="grammar, a choice then"),
    pytest.param("grammar", [5], {"grammar": forced(1, 2, 3, 4, 5)}, (4, 0, Stop.LIMIT), id="grammar"),
    pytest.param("synthetic", [5], {}, NO_MATCH, id="synthetic, nothing remembered"),
]


@pytest.mark.parametrize(("method", "tokens", "fields", "expected"), LOOKUPS)
def test_why_and_how_long(method: str, tokens: list[int], fields: dict[str, Any], expected: Outcome) -> None:
    assert looked_up(method, tokens, **fields) == expected


@pytest.mark.parametrize(("k", "expected"), [(3, (3, 0, Stop.LIMIT)), (9, (5, 0, Stop.SOURCE_END))])
def test_a_remembered_sequence_ends(k: int, expected: Outcome) -> None:
    synthetic = find_factory("synthetic")(SpeculationConfig(), FACTS)
    first = make_sequence([5], output=[1, 2, 3, 4, 5])
    synthetic.admit(first)
    synthetic.release(first)
    assert drafted(synthetic, make_sequence([5]), k) == expected


@given(
    st.lists(st.integers(1, 3), max_size=50),
    st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), max_size=40),
)
def test_a_prediction_matches_as_much_as_stands_anywhere(
    prediction: list[int], written: list[list[int]]
) -> None:
    whole, text = spell(prediction), ""
    cursor = Cursor(whole)
    for piece in written:
        cursor.follow(piece)
        text += spell(piece)
        longest = max(n for n in range(min(LONGEST, len(text)) + 1) if text[len(text) - n :] in whole)
        assert cursor.match == longest
        assert cursor.at is None or whole[: cursor.at].endswith(text[len(text) - longest :])


# cut, joined, asked

WHOLE = Draft((1, 2, 3), ("a", "a", "a"), None, (0.5, 0.5, 0.5), 7, Stop.FACTOR)


def test_a_cut_keeps_what_the_proposal_was() -> None:
    assert [outcome(WHOLE.truncated(k)) for k in (9, 2, 0)] == [
        (3, 7, Stop.FACTOR),
        (2, 7, Stop.FACTOR),
        (0, 7, Stop.FACTOR),
    ]


def test_a_cut_may_say_why_and_says_nothing_where_nothing_is_cut() -> None:
    grammar = [outcome(WHOLE.truncated(k, Stop.GRAMMAR)) for k in (3, 2, 0)]
    assert grammar == [(3, 7, Stop.FACTOR), (2, 7, Stop.GRAMMAR), (0, 7, Stop.GRAMMAR)]


def test_a_joined_draft_is_of_its_first_proposal() -> None:
    tail = Draft((4,), ("b",), None, None, 2, Stop.SOURCE_END)
    assert outcome(WHOLE.chain(tail)) == (4, 7, Stop.FACTOR)
    assert outcome(no_draft(Stop.CHOICE).chain(tail)) == (1, 0, Stop.CHOICE)


class Fixed:
    """Drafts what it was given."""

    def __init__(self, draft: Draft):
        self.draft = draft

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        return [self.draft] * len(seqs)

    def __getattr__(self, name: str) -> Any:
        return NO_LIMITS if name == "limits" else lambda *_: None


def proposed(
    monkeypatch: pytest.MonkeyPatch, draft: Draft, k: int = 2, **fields: Any
) -> tuple[list[Outcome], Reason | None]:
    """The proposals of a round in which `fixed` drafts this, and why it is plain."""
    monkeypatch.setattr(
        "speculon.speculation.proposers.registry.registered", {"fixed": lambda config, target: Fixed(draft)}
    )
    proposers = Proposers(SpeculationConfig(method="fixed"), FACTS)
    seq = make_sequence([1, 2, 3], methods=("fixed",), **fields)
    drafted, _ = draft_once(proposers, seq, {"fixed": k})
    assert all((method, most) == ("fixed", k) for method, most, _ in drafted.proposals)
    return [outcome(draft) for _, _, draft in drafted.proposals], drafted.reason


def test_what_the_engine_cuts_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = SimpleNamespace(allows=lambda tokens: len(tokens) - 1)
    assert proposed(monkeypatch, WHOLE)[0] == [(2, 7, Stop.LIMIT)], "more than it was asked for"
    assert proposed(monkeypatch, WHOLE, 3)[0] == [(3, 7, Stop.FACTOR)]
    assert proposed(monkeypatch, WHOLE, 3, grammar=grammar)[0] == [(2, 7, Stop.GRAMMAR)]
    assert proposed(monkeypatch, WHOLE, 1, grammar=grammar) == (
        [(0, 7, Stop.GRAMMAR)],
        Reason.NO_MATCH,
    )


def test_a_grammar_reads_a_continuation_after_the_draft_that_it_continues() -> None:
    def allows(tokens: tuple[int, ...]) -> int:
        return next((i for i, token in enumerate(tokens) if token != TEN[i]), len(tokens))

    seq = make_sequence([5], grammar=SimpleNamespace(allows=allows))
    assert fit(Draft((3, 4, 9), ("b",) * 3), 3, seq, ahead=(1, 2)).tokens == (3, 4)
    assert fit(Draft((1, 2), ("b",) * 2), 3, seq, ahead=(1, 2)).tokens == ()


def test_an_empty_draft_gives_the_round_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for stop in (None, *Stop):
        outcomes, reason = proposed(monkeypatch, no_draft(stop, 3))
        assert outcomes == [(0, 3, stop)]
        assert reason is (Reason.NOT_READY if stop is Stop.NOT_READY else Reason.NO_MATCH)


WRONG = [{"match": 1.5}, {"match": -1}, {"match": True}, {"stop": "limit"}]


@pytest.mark.parametrize("fields", WRONG, ids=str)
def test_a_wrong_match_or_stop_is_a_drafters_fault(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outcomes, reason = proposed(monkeypatch, Draft((1,), ("a",), **fields))
    assert not outcomes and reason is Reason.ERROR and "must be a number of tokens" in caplog.text


def test_a_failed_call_leaves_no_proposal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proposers = Proposers(SpeculationConfig(method="ngram"), FACTS)
    seq = make_sequence([1, 2, 1, 2])
    drafted, _ = draft_once(proposers, seq, {"ngram": 2})
    assert [method for method, _, _ in drafted.proposals] == ["ngram"]
    monkeypatch.setattr(proposers.find("ngram"), "propose", lambda *_: 1 / 0)
    drafted, _ = draft_once(proposers, seq, {"ngram": 2})
    assert drafted.proposals == () and seq.off is Reason.ERROR


def test_every_stop_is_seen_here_or_where_models_draft() -> None:
    seen = {case.values[3][2] for case in LOOKUPS}  # type: ignore[index]
    models = {Stop.CONFIDENCE, Stop.GRAMMAR, Stop.NOT_READY}  # tests/tiny/test_reasons.py, with a model
    assert seen | models == set(Stop) and not seen & models
    assert {"ngram", "suffix", "prediction", "grammar", "synthetic"} == set(TABLE)
    assert {"draft_model", "pard", "eagle3", "dflash", "mtp", "gemma4_assistant"} == set(WITH_WEIGHTS)
