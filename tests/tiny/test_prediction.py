"""A prediction changes no token of the text, whatever it says; what agrees with it costs few target calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from speculon import LLM, SamplingParams
from speculon.core.config import MAX_DRAFTS, EngineConfig, SpeculationConfig
from speculon.core.errors import InvalidParameter
from speculon.core.types import Reason
from speculon.decoding.rounds import grants
from speculon.measure.bench import workloads
from speculon.measure.bench.measure import loops
from speculon.runtimes.torch import step as step_module
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import View
from speculon.runtimes.torch.model.target import TargetOutput
from speculon.speculation.proposers.prediction import Cursor
from tests.engines import engine_on
from tests.tiny.conftest import tiny_target
from tests.tiny.demo_texts import MISSING, TIE, first_difference, gap
from tests.tiny.requests import assert_same, plain, requests_of
from tests.tiny.scripted import Key, Result, run, spell


def one(i: int, fields: dict[str, Any], **settings: Any) -> Result:
    """One of the requests, alone."""
    request = replace(requests_of("greedy")[i], speculation=fields)
    (result,) = run(tiny_target("llama"), [request], **settings).values()
    return result


@pytest.mark.parametrize("at", [1, 6, 7, 20])
def test_a_stop_inside_the_prediction_ends_the_sequence_there(at: int) -> None:
    """What was drafted beyond the stop is counted as rejected; the prediction itself is longer."""
    (request, text) = requests_of("sampled")[0], plain("sampled")["q0", 0]
    stop = spell(text[at : at + 2])
    first = spell(text).index(stop) + 2
    params = request.params.model_copy(update={"stop": (stop,)})
    predicted = replace(request, params=params, speculation={"prediction": text})
    (result,) = run(tiny_target("llama"), [predicted]).values()
    stats = result.stats
    assert result.tokens == text[:first] and result.finish and result.finish.matched == stop
    assert stats.accepted_prediction_tokens <= first - 1
    assert (
        stats.rejected_prediction_tokens
        == stats.drafted_from["prediction"] - stats.accepted_prediction_tokens
        > 0
    )


@pytest.mark.parametrize(
    ("fields", "settings", "reason"),
    [
        pytest.param({"num_speculative_tokens": 0}, {}, Reason.OFF_REQUEST, id="by request"),
        pytest.param({}, {"speculation": {"method": "off"}}, Reason.OFF_CONFIG, id="by config"),
    ],
)
def test_whoever_turns_speculation_off_gets_none(
    fields: dict[str, Any], settings: dict[str, Any], reason: Reason
) -> None:
    text = plain("greedy")["q0", 0]
    result = one(0, {**fields, "prediction": text}, **settings)
    assert result.tokens == text and not result.stats.rounds and set(result.stats.reasons) == {reason}


def test_a_lacking_method_does_not_block_the_prediction() -> None:
    text = plain("greedy")["q0", 0]
    result = one(0, {"method": "draft_model", "prediction": text[:30]})
    assert result.tokens == text and result.stats.accepted_prediction_tokens > 20
    assert set(result.stats.drafted_from) == {"prediction"} and set(result.stats.reasons) <= {
        "no_match",
        "max_tokens",
    }


def test_the_method_drafts_where_the_prediction_has_nothing() -> None:
    text = plain("greedy")["q0", 0]
    result = one(0, {"method": "ngram", "prediction": text[:10]})
    assert result.tokens == text and {"prediction", "ngram"} <= set(result.stats.drafted_from)
    assert one(0, {"method": "prediction", "prediction": text[:10]}).tokens == text
    assert not one(0, {"method": "prediction"}).stats.rounds
    assert not one(0, {"method": "prediction", "prediction": ""}).stats.rounds


def test_a_fault_costs_the_drafts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cursor, "draft", lambda cursor, k: 1 / 0)
    text = plain("greedy")["q0", 0]
    result = one(0, {"method": "ngram", "prediction": text})
    assert (
        result.tokens == text
        and not result.stats.rounds
        and set(result.stats.reasons) <= {"error", "max_tokens"}
    )


def test_a_requests_own_number_bounds_its_drafts() -> None:
    text = plain("greedy")["q0", 0]
    assert max(one(0, {"prediction": text, "num_speculative_tokens": 3}).stats.drafted_at) == 2
    assert max(one(0, {"prediction": text}).stats.drafted_at) > EngineConfig().speculation.most("fixed")
    defaults = SpeculationConfig(num_speculative_tokens=3)  # of the method, and not of a prediction
    assert max(one(0, {"prediction": text, "defaults": defaults}).stats.drafted_at) > 2


def test_text_needs_a_tokenizer_and_ids_are_checked() -> None:
    engine = engine_on(tiny_target("llama"), None, EngineConfig(block_size=4))
    with pytest.raises(InvalidParameter, match="prediction = 'text': a string needs a tokenizer"):
        engine.add_request([5], SamplingParams(max_tokens=4), {"prediction": "text"})
    with pytest.raises(InvalidParameter, match="prediction = 96: token ids must be from 0 to 95"):
        engine.add_request([5], SamplingParams(max_tokens=4), {"prediction": [96]})
    assert not engine.has_work


# the memory estimate covers so many rows


class Counting:
    """A target that remembers the rows of each forward, and how many were scored."""

    def __init__(self) -> None:
        self.inner = tiny_target("llama")
        self.rows: list[int] = []
        self.scored: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def needs(self, rows: int, scored: int, sequences: int) -> Any:
        self.estimated = rows, scored
        return self.inner.needs(rows, scored, sequences)

    def forward(self, batch: Batch, view: View) -> TargetOutput:
        self.rows.append(batch.input_ids.shape[1])
        self.scored.append(len(batch.score_rows))
        return self.inner.forward(batch, view)


def run_long_drafts(target: Any) -> dict[Key, Result]:
    truth = plain("greedy")
    options = {"num_speculative_tokens": MAX_DRAFTS}
    requests = [
        replace(r, speculation={"prediction": truth[r.id, 0], **options}) for r in requests_of("greedy")
    ]
    return run(target, requests, max_num_seqs=8, max_batch_tokens=24)


def test_the_largest_forward_is_the_estimated_one(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Counting()
    assert_same(requests_of("greedy"), run_long_drafts(target), plain("greedy"))
    rows, scored = target.estimated
    assert (rows, scored) == (24 + MAX_DRAFTS, 8 + MAX_DRAFTS)
    assert MAX_DRAFTS < max(target.rows) <= rows and MAX_DRAFTS < max(target.scored) <= scored

    unbounded = Counting()
    monkeypatch.setattr(step_module, "grants", lambda wanted, rows: grants(wanted, 10**6))
    run_long_drafts(unbounded)
    assert max(unbounded.rows) > rows and max(unbounded.scored) > scored


# the shipped model, on texts that do not repeat themselves


@pytest.fixture(scope="module")
def llm() -> LLM:
    if MISSING:
        pytest.skip("the demo weights are not in this checkout")
    return LLM("demo", dtype="float32", device="cpu", speculation={"policy": "fixed"})


@pytest.fixture(scope="module")
def answers(llm: LLM) -> list[tuple[workloads.Case, list[int]]]:
    """Three edits of 150 tokens and more, as the model writes them on this chip; none repeats itself."""
    cases = workloads.build("edit", llm.tokenizer, workloads.Size(40, 512, llm.engine.max_context))
    long = [c for c in cases if 220 < len(llm.tokenizer.encode(c.reference or "")) < 400][:10]
    params = [c.params.model_copy(update={"max_tokens": 340}) for c in long]
    written = llm.generate([c.prompt for c in long], params, speculation={"method": "off"})
    found = [(c, out) for c, out in zip(long, written, strict=True) if out.finish_reason == "stop"]
    whole = [(c, text) for c, out in found if len(text := out.token_ids) >= 150 and not loops(text)][:3]
    assert len(whole) == 3, [len(out.token_ids) for _, out in found]
    return whole


def write(
    llm: LLM, case: workloads.Case, prediction: Any, **options: Any
) -> tuple[list[int], list[tuple[int, int]], Any]:
    """The text, (position, accepted drafts) of each of its rounds, and its account."""
    text: list[int] = []
    rounds = []
    for event in llm.events(case.prompt, case.params, speculation={"prediction": prediction, **options}):
        rounds.append((len(text), len(event.sources)))
        text += event.tokens
        stats = event.stats
    return text, rounds, stats


def assert_equal(ours: list[int], truth: list[int], case: workloads.Case) -> None:
    at = first_difference(ours, truth)
    assert at is None or gap(case.prompt + truth[:at]) < TIE


@pytest.mark.soak
def test_a_prediction_that_comes_true_is_accepted(llm: LLM, answers: Any) -> None:
    for case, truth in answers:
        text, rounds, stats = write(llm, case, llm.tokenizer.decode(truth))
        assert_equal(text, truth, case)
        assert stats.accepted_prediction_tokens >= 0.9 * stats.drafted_from["prediction"]
        # the rest are bonus tokens, one per call
        assert stats.accepted_prediction_tokens >= 0.85 * len(truth)
        assert len(rounds) < len(truth) / 8


LINE = "    # a line that the model does not write\n"


@pytest.mark.soak
@pytest.mark.parametrize(
    "edit",
    [
        pytest.param(lambda lines, at: [*lines[:at], LINE, *lines[at:]], id="a line too many"),
        pytest.param(lambda lines, at: [*lines[:at], *lines[at + 1 :]], id="a line is missing"),
        pytest.param(lambda lines, at: [*lines[:at], LINE, *lines[at + 1 :]], id="another line"),
        pytest.param(
            lambda lines, at: [*lines[:at], lines[at].strip()[:5] + "\n", *lines[at + 1 :]], id="half a line"
        ),
        pytest.param(
            lambda lines, at: ["\n \n", *lines[:at], *lines[at + 3 :]],
            id="a beginning, and three lines missing",
        ),
    ],
)
def test_after_a_wrong_line_it_is_followed_again(
    llm: LLM, answers: Any, edit: Callable[..., list[str]]
) -> None:
    """At least 70 % of what comes after the edit are accepted drafts, from the second round after it on."""
    for case, truth in answers:
        lines = llm.tokenizer.decode(truth).splitlines(keepends=True)
        at = len(lines) // 2
        text, rounds, _ = write(llm, case, "".join(edit(lines, at)), method="prediction")
        assert_equal(text, truth, case)
        again = len(llm.tokenizer.encode("".join(lines[: at + 3]), add_special_tokens=False))
        tail = [(start, accepted) for start, accepted in rounds if start >= again]
        assert sum(accepted for _, accepted in tail) >= 0.7 * (len(truth) - tail[0][0]), (case.name, rounds)
        first = next(i for i, (_, accepted) in enumerate(tail) if accepted)
        assert first <= 2, (case.name, rounds)
