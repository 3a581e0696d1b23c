"""`speculon check` on a random model: green as it is, red for every planted fault, and never green for having
seen nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon import verify as verifying
from speculon.batch import Batch
from speculon.check import run as gate
from speculon.check import sampled as check_sampled
from speculon.check.arms import watched, whole
from speculon.check.chart import lay_out
from speculon.check.exact import Divergence, Margin, judge, noise
from speculon.check.plan import CheckPlan, named
from speculon.check.run import Findings, check, tokens_asked
from speculon.cli import app
from speculon.commands import check as command
from speculon.config import SpeculationConfig
from speculon.core import Span, Verdict
from speculon.engine import engine as engine_module
from speculon.errors import InvalidParameter, TooLong
from speculon.llm import Completion
from speculon.sampling import Draw, Row, sample
from tests.tiny.folders import make_folder

PROMPTS = (
    "def add(left, right):\n    return left",
    "class Stack:\n    class Stack",
    "for value in self.values:\n for value",
)
SMALL: dict[str, Any] = {
    "prompts": PROMPTS,
    "samplers": (SamplingParams(),),
    "max_tokens": 16,
    "runs": 64,
    "positions": 4,
    "cases": 1,
    "control": 0.9,
}
TINY = {**SMALL, "runs": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("check") / "model")


@pytest.fixture(scope="module")
def draft(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target with a head that is a little wrong: it agrees often, not always."""
    path = tmp_path_factory.mktemp("check") / "draft"
    AutoTokenizer.from_pretrained(folder).save_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        noise = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(3))
        model.lm_head.weight.add_(noise * 0.5 * model.lm_head.weight.std())
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(folder: Path, draft: Path) -> LLM:
    fixed = SpeculationConfig(
        method="draft_model", policy="fixed", draft=str(draft), num_speculative_tokens=3
    )
    return LLM(str(folder), speculation=fixed)


@pytest.fixture(scope="module")
def sound(llm: LLM) -> Findings:
    return check(llm, CheckPlan(**SMALL))


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # no speculon.toml of whoever runs the tests


def test_a_sound_engine_passes(sound: Findings) -> None:
    assert (sound.outcome, sound.problems, sound.gaps) == ("passed", [], [])
    kinds = [one.kind for one in sound.same]
    assert kinds == ["plain", "speculation", "speculation", "control", "speculation", "control"]
    for one in sound.same:
        assert one.texts == (3 if one.label.startswith("greedy") else 4)
        assert bool(one.failures) == (one.kind == "control"), one.label
        assert one.identical + len(one.ties) + len(one.failures) == one.texts
    null, matching, matching_control, rejection, rejection_control = sound.sampled
    assert not null.confirmed and not matching.confirmed and not rejection.confirmed
    assert matching_control.found and rejection_control.found
    assert (
        min(
            matching.work.rounds,
            matching.work.accepted,
            rejection.work.by_rejection,
            rejection_control.work.planted,
        )
        > 0
    )
    assert matching.work.by_rejection == null.work.rounds == matching.work.planted == 0
    assert matching.runs == (128, 64) and matching.cells == 5 == CheckPlan(**SMALL).cells


def test_the_margin_in_fp32_is_the_law_and_what_moves_is_measured(sound: Findings) -> None:
    assert not sound.margin.half and sound.margin.limit == 1e-4
    assert 0 < sound.margin.largest < 1e-4 and len(sound.margin.moved) > 60
    assert Margin([0.01, 0.3], half=True).limit == 0.3 and Margin([], half=True).limit == 1e-4


# planted faults: each must be red, and where only one part can see it, that part


def credulous(spans: list[Span], logits: Tensor, draw: Draw | None = None) -> verifying.Outcomes:
    """Every draft stands, whatever the target says."""
    tokens, outcomes = iter(sample(*verifying.rows_of(spans, logits), draw) if spans else ()), {}
    for span in spans:
        *_, bonus = islice(tokens, len(span.draft.tokens) + 1)
        outcomes[span.row] = (*span.draft.tokens, bonus), len(span.draft.tokens)
    return outcomes


def one_off(spans: list[Span], logits: Tensor, draw: Draw | None = None) -> verifying.Outcomes:
    """The correction is read from the row before, where there is one."""
    outcomes, first = match(spans, logits, draw), 0
    tokens = sample(*verifying.rows_of(spans, logits), draw) if spans else []
    for span in spans:
        kept, accepted = outcomes[span.row]
        if 0 < accepted < len(span.draft.tokens):
            outcomes[span.row] = (*kept[:-1], tokens[first + accepted - 1]), accepted
        first += len(span.draft.tokens) + 1
    return outcomes


match = verifying.match


# a correction alone: too few
@pytest.mark.parametrize(("fault", "in_distribution"), [(credulous, True), (one_off, False)])
def test_a_wrong_match_fails(
    llm: LLM, fault: Any, in_distribution: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verifying, "match", fault)
    found = check(llm, CheckPlan(**SMALL if in_distribution else TINY))
    assert found.outcome == "failed"
    said = " ".join(found.problems)
    assert "greedy, alone: " in said and "greedy, in a crowd: " in said and "same seed: " in said
    assert "matching: " in said or not in_distribution
    assert "plain" not in said


def test_a_coin_that_always_falls_well_fails_in_distribution_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """q in place of p, and only where drafts are judged by rejection."""
    monkeypatch.setattr(verifying, "flip", lambda p, q, rows: torch.ones_like(p, dtype=torch.bool))
    found = check(llm, CheckPlan(**SMALL))
    assert found.outcome == "failed" and len(found.problems) == 1
    assert (
        found.problems[0].startswith("rejection: another distribution, twice: ")
        and "p = " in found.problems[0]
    )
    assert found.sampled[3].again is not None and found.sampled[3].again.cells == len(
        found.sampled[3].rejected
    )


def test_noise_of_the_wrong_position_fails_with_the_same_seed_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row's distribution is right, and its token is not the seed's."""
    position = Row.position.fget
    assert position is not None
    monkeypatch.setattr(Row, "position", property(lambda row: position(row) + 50 * bool(row.prefix)))
    found = check(llm, CheckPlan(**TINY))
    assert (
        found.outcome == "failed" and len(found.problems) == 1 and found.problems[0].startswith("same seed: ")
    )


def test_plain_decoding_that_departs_from_itself_is_named(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowd_is_worse(batch: Batch, logits: Tensor, *rest: Any) -> list[Verdict]:
        verdicts = verify(batch, logits, *rest)
        spoilt = len(verdicts) > 1 and all(span.samples and not span.draft.tokens for span in batch.spans)
        return (
            [replace(v, tokens=tuple((t + 1) % 100 for t in v.tokens)) for v in verdicts]
            if spoilt
            else verdicts
        )

    verify = engine_module.verify
    monkeypatch.setattr(engine_module, "verify", crowd_is_worse)
    found = check(llm, CheckPlan(**TINY))
    assert any(said.startswith("greedy, plain in a crowd: 3 of 3 texts differ") for said in found.problems)


# what is no pass


def test_no_speculation_is_no_pass(folder: Path) -> None:
    idle = LLM(
        str(folder),
        speculation={"method": "ngram", "policy": "fixed", "prompt_lookup_min": 32, "prompt_lookup_max": 32},
    )
    found = check(idle, CheckPlan(**TINY))
    assert found.outcome == "inconclusive" and not found.problems
    assert (
        sum("no round was speculative (reasons: no_match" in said for said in found.gaps)
        == len(found.gaps)
        > 5
    )


def test_a_control_that_is_not_found_is_no_pass(llm: LLM) -> None:
    found = check(llm, CheckPlan(**{**SMALL, "runs": 16, "positions": 3, "control": 0.2}))
    assert found.outcome == "inconclusive" and not found.problems
    assert any("planted errors were not found; ask for more runs" in said for said in found.gaps)


def test_drafts_that_are_always_right_leave_nothing_to_plant(folder: Path) -> None:
    itself = LLM(str(folder), speculation={"method": "draft_model", "policy": "fixed", "draft": str(folder)})
    found = check(itself, CheckPlan(**TINY))
    assert found.outcome == "inconclusive" and any("every draft was right" in said for said in found.gaps)


def test_a_margin_that_says_nothing_is_no_pass() -> None:
    assert gate.margin_gaps(Margin([1.5], half=True)) and not gate.margin_gaps(Margin([0.5], half=True))


# the parts


def test_a_changed_token_is_judged_by_its_regret(llm: LLM) -> None:
    prompt = llm.tokenizer.encode(PROMPTS[0])
    plain = llm.generate(
        [prompt], SamplingParams(temperature=0, max_tokens=12, logprobs=2), speculation={"method": "off"}
    )[0]
    assert plain.logprobs
    (best, high), (second, low) = plain.logprobs[5].top
    texts = [[*plain.token_ids[:5], second, *plain.token_ids[6:]], plain.token_ids[:7], plain.token_ids]
    wrong, short = judge(llm, [prompt] * 3, [plain.token_ids] * 3, texts)
    assert (wrong.text, wrong.at, wrong.plain, wrong.token) == (0, 5, best, second)
    assert wrong.regret == pytest.approx(high - low, abs=1e-4) and wrong.regret_of_plain == pytest.approx(
        0, abs=1e-6
    )
    assert short == Divergence(1, 7, plain.token_ids[7], None, None, None)


def test_the_noise_of_a_seed_is_what_the_engine_draws_with(llm: LLM) -> None:
    """argmax p / E over the likeliest tokens, computed here, is the token that was written."""
    prompt = llm.tokenizer.encode(PROMPTS[1])
    params = SamplingParams(temperature=0.7, max_tokens=6, seed=11, n=2, logprobs=100)
    for n, one in enumerate(llm.generate([prompt], params, speculation={"method": "off"})[0].outputs):
        for position, logprobs in enumerate(one.logprobs or ()):
            tokens, logp = zip(*logprobs.top, strict=True)
            race = torch.tensor(logp) - 0.7 * torch.tensor(noise(11, n, position, *tokens)).log()
            assert tokens[int(race.argmax())] == one.token_ids[position]


def test_a_stop_token_belongs_to_the_text() -> None:
    assert whole(Completion(token_ids=[5, 6], stop=2)) == [5, 6, 2]
    assert whole(Completion(token_ids=[5, 6], stop="\n")) == whole(Completion(token_ids=[5, 6])) == [5, 6]


def test_planting_ends_with_its_arm(llm: LLM) -> None:
    before = dict(vars(llm.engine))
    with pytest.raises(ZeroDivisionError), watched(llm.engine, 1.0, CheckPlan().chance("x")):
        assert "ask_target" in vars(llm.engine)
        raise ZeroDivisionError
    assert vars(llm.engine).keys() == before.keys()


def test_no_two_arms_share_a_seed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int | None] = []
    generate = llm.generate

    def spy(prompts: Any, params: Any, **rest: Any) -> Any:
        if isinstance(params, list) and params[0].max_tokens == SMALL["positions"]:
            seen.extend(p.seed for p in params)
        return generate(prompts, params, **rest)

    monkeypatch.setattr(llm, "generate", spy)
    monkeypatch.setattr(check_sampled, "MAX_SAMPLES", 12)
    check(llm, CheckPlan(**TINY))
    assert len(seen) == len(set(seen)) >= 6 * 2 and None not in seen


def test_half_precision_is_judged_by_what_was_measured(folder: Path, draft: Path) -> None:
    fixed = {"method": "draft_model", "policy": "fixed", "draft": str(draft)}
    coarse = LLM(str(folder), dtype="bfloat16", speculation=fixed)
    found = check(
        coarse,
        CheckPlan(**{**TINY, "samplers": (SamplingParams(top_p=0.9), SamplingParams(temperature=0.8))}),
    )
    assert found.margin.half and found.margin.limit == found.margin.largest > 1e-3
    assert not found.problems
    assert found.same[4].texts == 4  # of the sampler without a filter: rounding at a filter's edge is no tie


@pytest.mark.parametrize(
    "wrong",
    [
        {"runs": 15},
        {"positions": 1},
        {"seeds": 65},
        {"prompts": ("a", "a")},
        {"prompts": ("",)},
        {"samplers": (SamplingParams(temperature=0),)},
        {"samplers": (SamplingParams(seed=3),)},
        {"control": 0.0},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        CheckPlan(**wrong)


def test_a_plan_in_words_and_numbers() -> None:
    plan = CheckPlan()
    assert plan.cells == 4 * 3 * 13 and 1 / (1 + plan.permutations) < 0.05 / plan.cells
    assert named(plan.samplers[1]) == "T 0.8, top_p 0.95" and len(set(plan.prompts)) == 16
    assert plan.chance("a").random() == plan.chance("a").random() != plan.chance("b").random()
    assert CheckPlan(seed=1).chance("a").random() != plan.chance("a").random()


def test_what_is_written_is_what_was_announced(llm: LLM) -> None:
    done: list[int] = []
    plan = CheckPlan(**TINY)
    found = check(llm, plan, done.append)
    again = 16 * 4 * sum((2 if one.kind == "plain" else 3) for one in found.sampled if one.again)
    assert sum(done) == tokens_asked(plan) + again


# the command


def speculon(folder: Path, *arguments: str) -> Any:
    sizes = [
        "--prompt",
        PROMPTS[0],
        "--prompt",
        PROMPTS[1],
        "--max-tokens",
        "16",
        "--runs",
        "64",
        "--positions",
        "4",
    ]
    sizes += ["--sampler", '{"temperature": 1.0}', "--quick", "--cases", "1"]
    return CliRunner().invoke(
        app, ["check", "--model", str(folder), *sizes, *arguments], catch_exceptions=False
    )


def drafting(draft: Path) -> Iterator[str]:
    yield from ("--method", "draft_model", "--draft", str(draft))


def test_the_command_passes_and_writes(folder: Path, draft: Path, tmp_path: Path) -> None:
    done = speculon(folder, *drafting(draft), "--json", "--out", str(tmp_path / "new"))
    report = json.loads(done.stdout)
    assert (done.exit_code, done.stderr, report["outcome"]) == (0, "", "passed"), (
        report["problems"],
        report["gaps"],
    )
    assert json.loads((tmp_path / "new" / "check.json").read_text()) == report
    assert (tmp_path / "new" / "check.png").read_bytes().startswith(b"\x89PNG")
    said = (tmp_path / "new" / "report.md").read_text()
    assert (
        said.startswith("**passed: ")
        and "| same seed, planted errors |" in said
        and "| rejection, planted errors |" in said
    )
    assert report["model"]["speculation"] == {
        "method": "draft_model",
        "policy": "fixed",
        "num_speculative_tokens": 4,
    }
    assert report["plan"]["samplers"] == [{"temperature": 1.0}] and report["plan"]["runs"] == 64
    assert all(len(one["p"]) == 5 for one in report["sampled"])


FIXED = {"method": "suffix", "policy": "fixed"}


def test_the_command_checks_fixed_drafts_unless_another_policy_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    said: dict[str, Any] = {"block_size": 8, "speculation": {"method": "suffix"}}
    assert command.with_drafts(said) == {"block_size": 8, "speculation": FIXED}
    assert command.with_drafts({}) == {"speculation": {"policy": "fixed"}}
    asked = {"speculation": {"policy": "adaptive"}}
    assert command.with_drafts(asked) == asked
    (tmp_path / "speculon.toml").write_text('[speculation]\npolicy = "solo"\n')
    assert command.with_drafts(said) == said
    (tmp_path / "speculon.toml").unlink()
    monkeypatch.setenv("SPECULON_SPECULATION__POLICY", "goodput")
    assert command.with_drafts(said) == said


def test_the_command_fails_and_says_why(folder: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifying, "match", credulous)
    done = speculon(folder, *drafting(draft))
    assert done.exit_code == 1 and "texts differ by more than a tie, the first: text " in done.stdout
    assert "failed: texts depart from the target's by more than rounding or chance" in done.stdout


def test_the_command_does_not_pass_without_having_speculated(folder: Path) -> None:
    done = speculon(folder, "--method", "ngram", "--prompt-lookup-min", "32", "--prompt-lookup-max", "32")
    assert done.exit_code == 1 and "no round was speculative" in done.stdout and "not enough: " in done.stdout


@pytest.mark.parametrize(
    ("arguments", "kind", "words"),
    [
        pytest.param(
            ["--method", "off"],
            "InvalidParameter",
            "method = 'off': there is no speculation to check",
            id="off",
        ),
        pytest.param(
            ["--num-speculative-tokens", "0"],
            "InvalidParameter",
            "num_speculative_tokens = 0",
            id="no drafts",
        ),
        pytest.param(["--method", "draft_model"], "InvalidParameter", "no_drafter", id="no draft"),
        pytest.param(["--method", "zzz"], "UnknownMethod", "known are", id="a method"),
        pytest.param(["--runs", "3"], "InvalidParameter", "runs = 3: must be at least 16", id="runs"),
        pytest.param(
            ["--sampler", '{"temperature": 0}'],
            "InvalidParameter",
            "greedy texts are checked apart",
            id="greedy",
        ),
        pytest.param(["--sampler", "[1]"], "InvalidParameter", "must be a JSON object", id="a sampler"),
        pytest.param(["--prompt-file", "none.txt"], "InvalidParameter", "none.txt", id="no file"),
        pytest.param(["--max-tokens", "1020"], "TooLong", "max_tokens 1020", id="too long"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    folder: Path, arguments: list[str], kind: str, words: str
) -> None:
    done = speculon(folder, *arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{kind}: ") and words in done.stderr and done.stderr.count("\n") == 1
    machine = speculon(folder, *arguments, "--json")
    assert (machine.exit_code, json.loads(machine.stdout)["error"]["type"]) == (2, kind)


def test_the_picture_shows_every_arm(sound: Findings) -> None:
    left, right = lay_out(sound, "a title").axes
    labels = [text.get_text() for text in left.get_legend().get_texts()]
    assert labels[0] == "chance" and sorted(labels[1:]) == sorted(one.label for one in sound.sampled)
    planted = sum(
        p.regret is not None for one in sound.same if one.kind == "control" for p in one.divergences
    )
    assert f"planted errors: {planted}" in [text.get_text() for text in right.get_legend().get_texts()]


def test_too_long_a_prompt_is_refused_before_anything_is_written(llm: LLM) -> None:
    with pytest.raises(TooLong, match="positions 12 "):
        check(llm, CheckPlan(prompts=("x " * 510,), max_tokens=2, positions=12))
