"""Runs a case with speculation, and each of its requests alone without, and says what differs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from speculon.core.types import TokenLogprobs, acceptance_rule
from speculon.decoding.sampling import ScoredRow, perturbed, weigh
from speculon.decoding.sequence import Event, Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.engine.scheduler import AGE, StepPlan
from speculon.runtimes.torch.kv import slots
from tests.differential import build as torch_build
from tests.differential.build import METHOD, Asked, Texts, requests_of, with_prediction, with_stop_string
from tests.differential.factors import DRAFTERS, Case
from tests.tiny import forms
from tests.tiny.account import check_account, unknown_to
from tests.tiny.scripted import Key, Result, assert_nothing_held, drain

Results = dict[Key, Result]


class Build(Protocol):
    """The module of a runtime with what its cases are made of: `build.py` here is that of torch."""

    def tokenizer_of(self, case: Case) -> Tokenizer: ...

    def plain_engine(self, case: Case) -> Engine: ...

    def speculative_engine(self, case: Case, asked: list[Asked], speculation: dict[str, Any]) -> Engine: ...

    def use_drafters(self, case: Case, truth: Texts, texts: Texts) -> dict[str, Any]:
        """Makes what a case drafts with known, and returns the settings for it."""
        ...

    def has_equal_bits(self, case: Case, asked: Asked, engine: Engine) -> bool:
        """Whether the runtime promises the bits of plain decoding to this request."""
        ...

    def call_of(self, engine: Engine) -> tuple[Any, str]:
        """The method by which the runtime computes rows: an object, and its name there."""
        ...

    def stock_logits(self, case: Case, asked: Asked, tokens: list[int]) -> Tensor:
        """What transformers' own forward gives after each of these tokens [T, V], in fp32."""
        ...

    def tolerance(self, case: Case, asked: Asked, tokens: list[int]) -> float:
        """How far apart two right log-probabilities after these tokens may be, nat."""
        ...


@dataclass
class Outcome:
    """What a case gave, besides being right."""

    drafted: Counter[str] = field(default_factory=Counter)  # by method, with its name among the factors
    accepted: Counter[str] = field(default_factory=Counter)
    preemptions: int = 0
    cached: int = 0
    ties: int = 0
    equal_bits: int = 0  # texts to which equal bits were promised, drafts and all


def run(case: Case, build: Build = torch_build) -> Outcome:
    """Raises AssertionError where speculation has changed anything that is promised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots, "ALONE", 1)  # snapshots are used, however fast small mixers are
        tokenizer = build.tokenizer_of(case)
        asked, truth = write_plainly(case, tokenizer, build)
        waves = [Wave.of(case, build, asked, truth, number) for number in range(case.shared["waves"])]
        everyone = [one for wave in waves for one in wave.everyone]
        known = {key: result for wave in waves for key, result in wave.truth.items()}
        outputs: Texts = {key: result.tokens for key, result in known.items()}
        texts = {key: [*one.prompt, *outputs[key]] for one in everyone for key in one.keys}
        engine = build.speculative_engine(case, asked, build.use_drafters(case, outputs, texts))
        results = Results()
        for wave in waves:
            results |= wave.run(engine)
    judge = Judge(case, build, engine, tokenizer)
    for one in everyone:
        for key in one.keys:
            judge.check(one, key[1], results[key], known[key])
    check_engine(engine, everyone, results)
    outcome = outcome_of(case, results, judge.ties)
    outcome.equal_bits = sum(judge.has_equal_bits(one) and judge.is_exact(one) for one in everyone)
    return outcome


@contextmanager
def explained(case: Case, folder: str) -> Iterator[None]:
    """Adds to a failure the case, and the line that repeats it."""
    try:
        yield
    except Exception as error:
        seed = f"DIFFERENTIAL_SEED={case.seed} " if case.seed else ""
        test = f"{folder}/test_differential.py::test_case[{case.number}]"
        error.add_note(f"{case}\nagain: {seed}python -m pytest '{test}'")
        raise


def must_be_red(cases: Iterable[Case], build: Build = torch_build) -> None:
    """That one of them shows the mistake that is planted now."""
    for case in (tried := list(cases)):
        try:
            run(case, build)
        except (ImportError, NameError, TypeError, AttributeError):
            raise  # the mistake itself is written wrongly, which proves nothing
        except Exception:
            return
    pytest.fail(f"cases {[case.number for case in tried]} are green")


# plain decoding


def write_plainly(case: Case, tokenizer: Tokenizer, build: Build) -> tuple[list[Asked], Results]:
    """Each request alone in an engine of its own; then it has its stop string and its prediction, too."""
    found, asked = Results(), []
    chance = random.Random(f"{case.seed} {case.number} more")
    for one in requests_of(case):
        results = alone(case, one, build)
        if one.own["end"] == "stop string":
            one = with_stop_string(one, results[one.keys[0]].tokens, tokenizer, chance)
            results = alone(case, one, build)
        if one.own["method"] == "prediction":
            one = with_prediction(one, results[one.keys[0]].tokens, chance)
        found |= results
        asked.append(one)
    return asked, found


def alone(case: Case, asked: Asked, build: Build) -> Results:
    engine = build.plain_engine(case)
    asked.add(engine, {"method": "off"})
    return drain(engine)


# with speculation


@dataclass
class Wave:
    """All requests of a case, through one engine; one more is aborted on the way if the case says so."""

    case: Case
    build: Build
    asked: list[Asked]
    gone: list[Asked]
    truth: Results

    @classmethod
    def of(cls, case: Case, build: Build, asked: list[Asked], truth: Results, number: int) -> Wave:
        named = [replace(one, id=f"{one.id} {number}") for one in asked]
        gone = [replace(asked[0], id=f"gone {number}")] if case.shared["mishap"] == "abort" else []
        known = {(f"{name} {number}", sample): result for (name, sample), result in truth.items()}
        known |= {key: truth[asked[0].id, key[1]] for one in gone for key in one.keys}
        return cls(case, build, named, gone, known)

    @property
    def everyone(self) -> list[Asked]:
        return [*self.asked, *self.gone]

    def run(self, engine: Engine) -> Results:
        results, waiting, mishap = Results(), [*self.gone, *self.asked], self.case.shared["mishap"]
        at_once = len(waiting) if self.case.shared["arrival"] == "together" else 1
        for step in range(4000):
            for one in waiting[:at_once]:
                one.add(engine, one.speculation)
            del waiting[:at_once]
            events = [event for one in self.gone if step == 7 for event in engine.abort(one.id)]
            if mishap == "failed steps" and step % 5 == 3:
                events += self.failing_step(engine)
            if mishap == "preemptions" and step % 20 == 6:
                preempt_youngest(engine)
            for event in [*events, *engine.step()]:
                results.setdefault((event.request_id, event.sample), Result()).take(event)
            if step % 8 == 0:
                engine.check_integrity()
            if not waiting and not engine.has_work:
                return results
        raise AssertionError("still busy after 4000 steps")

    def failing_step(self, engine: Engine) -> list[Event]:
        """A step whose call raises after it has computed: nothing of it may be seen later."""
        owner, name = self.build.call_of(engine)
        call = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> None:
            delattr(owner, name)  # undoing the step may compute, too
            call(*args, **kwargs)
            raise MemoryError("planted")

        setattr(owner, name, failing)
        try:
            return engine.step()
        except MemoryError:
            return []
        finally:
            vars(owner).pop(name, None)


def preempt_youngest(engine: Engine) -> None:
    """As the scheduler does where room runs out, which does not happen while every sequence has its own."""
    if running := engine.scheduler.running:
        engine.scheduler._preempt(max(running, key=AGE), StepPlan(0, 0))


# what must hold


@dataclass
class Judge:
    """Compares results with those of plain decoding, and with what the stock model says."""

    case: Case
    build: Build
    engine: Engine
    tokenizer: Tokenizer
    ties: int = 0

    def check(self, asked: Asked, sample: int, ours: Result, plain: Result) -> None:
        check_account(ours)
        stats = ours.stats
        first = stats.target_calls - stats.rounds - stats.reasons.total()
        assert 0 <= first <= 1 + stats.preemptions, f"{first} calls for the first token after each start"
        where = f"{asked.id}, sample {sample}"
        aborted = ours.finish is not None and ours.finish.reason == "abort"
        if not aborted:
            check_end(asked, ours, self.tokenizer, self.engine.runtime.facts.eos_ids, where)
        if self.case.shared["dtype"] == "float32":
            self.check_numbers(asked, sample, ours, where)
        if not self.is_exact(asked):
            return
        expected = replace(plain, tokens=plain.tokens[: len(ours.tokens)]) if aborted else plain
        same = len(ours.tokens)
        if ours.tokens != expected.tokens:
            same = self.where_tied(asked, sample, ours.tokens, expected.tokens, where)
        elif not aborted:
            assert ours.finish == plain.finish, f"{where}: ended by {ours.finish}, not {plain.finish}"
        self.compare(asked, ours.logprobs[:same], plain.logprobs[:same], where)
        if sample == 0 and not aborted:
            self.compare(asked, ours.prompt_logprobs, plain.prompt_logprobs, where)

    def has_equal_bits(self, asked: Asked) -> bool:
        return self.build.has_equal_bits(self.case, asked, self.engine)

    def is_exact(self, asked: Asked) -> bool:
        """Whether the text is that of plain decoding: not where drafts with a q are judged by it, and not
        without a seed.
        """
        by_q = acceptance_rule(asked.own["acceptance"], asked.params) != "matching"
        has_q = self.case.shared["drafter"] != "none" and asked.own["method"] in ("auto", *DRAFTERS)
        return asked.own["sampling"] != "unseeded" and not (by_q and has_q)

    def where_tied(self, asked: Asked, sample: int, ours: list[int], plain: list[int], where: str) -> int:
        """The first token that differs, if the stock model's own scores are so close there that the order of
        additions decides; nowhere where equal bits are promised.
        """
        at = next((i for i, (a, b) in enumerate(zip(ours, plain, strict=False)) if a != b), -1)
        found = f"{where}: at {at} {ours[max(at, 0) :]}, not {plain[max(at, 0) :]}, of {plain}"
        assert at >= 0 and not self.has_equal_bits(asked), found
        scores = self.scores(asked, sample, plain[: at + 1], filters=False)[-1]
        apart = float((scores[ours[at]] - scores[plain[at]]).abs())
        assert apart < self.tolerance(asked, plain[:at]), f"{found}: {apart:.1e} nat apart"
        self.ties += 1
        return at

    def tolerance(self, asked: Asked, output: list[int]) -> float:
        """How far apart two scores of an output's tokens may be."""
        temperature = asked.params.temperature or 1.0
        return self.build.tolerance(self.case, asked, [*asked.prompt, *output]) / min(temperature, 1.0)

    @torch.inference_mode()
    def scores(self, asked: Asked, sample: int, output: list[int], filters: bool) -> Tensor:  # [n, V]
        """What each token of an output is chosen by, from the stock model's logits: noise included, without a
        grammar, with the filters or without.
        """
        seq = self.admitted(asked, sample)
        rules = replace(seq.request.rules, filters=filters and seq.request.rules.filters)
        rows = [ScoredRow(seq, rules, tuple(output[:i])) for i in range(len(output))]
        logits = self.build.stock_logits(self.case, asked, [*asked.prompt, *output])[-len(output) - 1 : -1]
        return perturbed(weigh(logits, rows), rows)

    def admitted(self, asked: Asked, sample: int) -> Sequence:
        off, adapter = {"method": "off"}, asked.own["adapter"]
        given = asked.prompt, asked.params, off
        return self.engine.admission.admit("again", *given, images=asked.images, adapter=adapter)[sample]

    def check_numbers(self, asked: Asked, sample: int, result: Result, where: str) -> None:
        """Tokens and log-probabilities are those of the stock model, whatever was drafted."""
        tokens, start = [*asked.prompt, *result.tokens], len(asked.prompt)
        if self.is_exact(asked) and asked.params.structured is None and result.tokens:
            scores = self.scores(asked, sample, result.tokens, filters=True)
            behind = scores.amax(-1) - scores.gather(-1, torch.tensor(result.tokens)[:, None])[:, 0]
            reason = f"{where}: not what the stock model would write, by {behind.tolist()}"
            assert behind.max() < self.tolerance(asked, result.tokens), reason
        if not (result.logprobs or result.prompt_logprobs):
            return
        expected = self.build.stock_logits(self.case, asked, tokens).log_softmax(-1)
        bound = self.build.tolerance(self.case, asked, tokens)
        for at, found in [*enumerate(result.prompt_logprobs, 1), *enumerate(result.logprobs, start)]:
            row = expected[at - 1]
            best = row.topk(len(found.top)).values.tolist()
            pairs = [
                (found.logprob, float(row[found.token])),
                *zip(dict(found.top).values(), best, strict=True),
            ]
            assert found.token == tokens[at], f"{where}: place {at} has {found.token}, not {tokens[at]}"
            off = max(abs(a - b) for a, b in pairs)
            assert off < bound, f"{where}: log-probabilities at {at} are off by {off:.1e}"

    def compare(
        self, asked: Asked, ours: list[TokenLogprobs], plain: list[TokenLogprobs], where: str
    ) -> None:
        """The same tokens, and the same numbers, bit for bit, where the runtime promises it."""
        assert [one.token for one in ours] == [one.token for one in plain], where
        if self.has_equal_bits(asked):
            assert ours == plain, f"{where}: log-probabilities differ"


def check_end(asked: Asked, result: Result, tokenizer: Tokenizer, eos: frozenset[int], where: str) -> None:
    """Whether a text ends where its request says, by the text itself."""
    params, tokens, finish = asked.params, result.tokens, result.finish
    assert finish is not None and params.max_tokens is not None, where
    stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos)}
    # before min_tokens a grammar may leave nothing but a stop token, which is then a token like others
    meant = tokens if params.structured is None else tokens[params.min_tokens :]
    assert not stops & set(meant), f"{where}: {tokens} has a stop token of {stops}"
    assert len(tokens) <= params.max_tokens, f"{where}: {len(tokens)} tokens of {params.max_tokens}"
    before = tokenizer.decode(tokens[:-1])
    assert not any(stop in before for stop in params.stop), f"{where}: {before!r} went on after {params.stop}"
    if finish.reason == "length":
        assert len(tokens) == params.max_tokens, f"{where}: ended after {len(tokens)}"
        return
    assert finish.reason == "stop", f"{where}: {finish}"
    if isinstance(finish.matched, str):
        assert finish.matched in tokenizer.decode(tokens), f"{where}: {finish}"
        return
    if finish.matched is not None:
        assert finish.matched in stops and len(tokens) >= params.min_tokens, f"{where}: {finish}"
    if asked.own["form"] != "none" and finish.matched in (None, *eos):
        forms.check(asked.own["form"], tokenizer.decode(tokens))


def check_engine(engine: Engine, everyone: list[Asked], results: Results) -> None:
    """Nothing is held, and the counters of the engine are the sums of its requests'."""
    assert_nothing_held(engine)
    assert unknown_to(engine), "a policy remembers a sequence that has ended"
    totals = engine.counters.totals
    for name in ("rounds", "accepted", "target_calls", "emitted", "verified_positions", "preemptions"):
        counted = sum(getattr(result.stats, name) for result in results.values())
        assert getattr(totals, name) == counted, f"{name}: {getattr(totals, name)} of {counted}"
    assert engine.counters.requests == len(everyone)
    assert engine.counters.prompt_tokens == sum(len(one.prompt) for one in everyone)
    ended = Counter(result.finish.reason for result in results.values() if result.finish)
    assert engine.counters.finished == ended


def outcome_of(case: Case, results: Results, ties: int) -> Outcome:
    outcome = Outcome(ties=ties)
    names = {METHOD.get(name, name): name for name in (case.shared["drafter"], "trees")}
    for result in results.values():
        stats = result.stats
        outcome.preemptions += stats.preemptions
        outcome.cached += stats.cached_tokens
        for source, number in stats.drafted_from.items():
            outcome.drafted[names.get(source, source)] += number
            outcome.accepted[names.get(source, source)] += stats.accepted_from[source]
    return outcome
