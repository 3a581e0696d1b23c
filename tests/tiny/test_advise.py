"""`speculon advise` on a random model: its rounds are the engine's own, its answer is what was planted, its
file loads.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from speculon import LLM, SamplingParams
from speculon.advise import report as advise_report
from speculon.advise import run as advise_module
from speculon.advise import trial as check_module
from speculon.advise.advice import Advice
from speculon.advise.answer import answer
from speculon.advise.maths import Cascade, Fit, TimedRound, best, total, walk
from speculon.advise.measure import CYCLES, HALF, PLAIN, RUNS, ks_to_time, request_at, time_rounds
from speculon.advise.plan import AdvisePlan
from speculon.advise.prompts import Split
from speculon.advise.run import advise, cascades_of
from speculon.advise.trial import Candidate, Result, Trial
from speculon.bench.measure import Measurement, measure
from speculon.bench.workloads import Case
from speculon.cli import app
from speculon.config import EngineConfig
from speculon.control.acceptance import Acceptance
from speculon.control.policies import Policies
from speculon.core import Draft, Sequence
from speculon.demo import corpus
from speculon.errors import BenchError, InvalidParameter, NeverFits, TooLong
from speculon.proposers import registry
from speculon.proposers.compose import Proposers
from tests.pure.test_advise import rounds_of
from tests.tiny.conftest import build
from tests.tiny.folders import CONTEXT, make_folder, make_library
from tests.tiny.scripted import Scripted

K = 4
SMALL = ["--max-tokens", "24", "--concurrency", "1,2", "--num-speculative-tokens", str(K), "--repeats", "1"]
PROMPTS = ["def add(left, right):\n", "class Stack:\n", "for value in values:\n", "raise ValueError(name)\n"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("advise") / "model")


@pytest.fixture(scope="module")
def stranger(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter of the same vocabulary that knows nothing of the target."""
    path = tmp_path_factory.mktemp("advise") / "stranger"
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    tokenizer.save_pretrained(path)
    build(
        "llama", seed=9, vocab_size=len(tokenizer), max_position_embeddings=CONTEXT, eos_token_id=2
    ).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def own(folder: Path) -> LLM:
    """The target is its own draft."""
    return LLM(
        str(folder), prefix_cache=False, speculation={"draft": str(folder), "num_speculative_tokens": K}
    )


@pytest.fixture(scope="module")
def strange(folder: Path, stranger: Path) -> LLM:
    return LLM(
        str(folder), prefix_cache=False, speculation={"draft": str(stranger), "num_speculative_tokens": K}
    )


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_library(tmp_path / "library")
    monkeypatch.setattr(corpus, "stdlib_root", lambda: root)


@pytest.fixture
def as_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft costs as much as a plain step; nothing is noisy."""
    plant(monkeypatch, draft=1.0)


def plant(monkeypatch: pytest.MonkeyPatch, also: tuple[str, ...] = ("ngram",), **costs: float) -> None:
    timed: list[TimedRound] = rounds_of(**costs, also=also)
    monkeypatch.setattr(advise_module, "time_rounds", lambda *_: timed)


def cases(llm: LLM, temperature: float = 0.0, max_tokens: int = 40) -> list[Case]:
    params = [
        SamplingParams(temperature=temperature, seed=i, max_tokens=max_tokens) for i in range(len(PROMPTS))
    ]
    return [Case(text, llm.tokenizer.encode(text), p) for text, p in zip(PROMPTS, params, strict=True)]


def split(llm: LLM, **more: Any) -> Split:
    some = cases(llm, **more)
    return Split.of({"prompts": some})


def cli(folder: Path, *arguments: str, stdin: str | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(
        app, ["advise", "--model", str(folder), *arguments], input=stdin, catch_exceptions=False
    )
    return done.exit_code, done.stdout, done.stderr


def prompts() -> list[str]:
    return [part for prompt in PROMPTS for part in ("--prompt", prompt)]


# rounds


def engine_rounds(llm: LLM, some: list[Case], method: str, k: int) -> tuple[int, int, int, Measurement]:
    """(decoding calls, drafts, accepted drafts) of the engine itself, one text at a time."""
    made = [measure(llm, [case], request_at(method, k)) for case in some]
    calls = sum(one.stats.target_calls - 1 for one in made)  # the first token came with the prompt
    drafts = sum(one.stats.drafted_at.total() for one in made)
    return calls, drafts, sum(one.stats.accepted for one in made), made[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_rounds_walked_are_those_of_the_engine(strange: LLM, own: LLM, temperature: float) -> None:
    """For every method, joined ones too, and every K, from one plain pass: as many calls, drafts and accepted
    drafts.
    """
    for llm in (strange, own):
        some = cases(llm, temperature)
        cascades, _ = cascades_of(llm, AdvisePlan(k=K))
        assert [cascade.methods for cascade in cascades] == [
            ("suffix",),
            ("ngram",),
            ("draft_model",),
            ("suffix", "draft_model"),
        ]
        written = record_drafts(llm, some, ["suffix", "ngram", "draft_model"], K, 3, lambda n: None)
        for cascade in cascades:
            for k in (1, 3, K):
                done = total(walk(one.trace, cascade.methods, k, Acceptance(fade=1.0)) for one in written)
                found = engine_rounds(llm, some, cascade.name, k)
                assert (done.rounds, done.drafts, done.accepted) == found[:3], (cascade, k)
                assert done.drafts > 0 or cascade.name in ("suffix", "ngram")


def test_a_walk_at_another_k_is_found_out(own: LLM) -> None:
    """The twin: drafts of one text that are walked for another K than the engine ran do not give its counts."""
    written = record_drafts(own, cases(own), ["draft_model"], K, 4, lambda n: None)
    wrong = total(walk(one.trace, ("draft_model",), K - 1, Acceptance(fade=1.0)) for one in written)
    assert (wrong.rounds, wrong.drafts) != engine_rounds(own, cases(own), "draft_model", K)[:2]


def test_looking_leaves_no_trace(own: LLM) -> None:
    before = [measure(own, [case], {"method": "off"}).token_ids for case in cases(own)]
    looked = record_drafts(own, cases(own), ["suffix", "draft_model"], K, 2, lambda n: None)
    time_rounds(own, cases(own), ["suffix", "draft_model"], [1, 2], [1, 2], lambda n: None)
    assert type(own.engine.policy) is Policies and type(own.engine.proposers) is Proposers
    own.engine.check_integrity()
    assert own.engine.pool.available == own.engine.pool.num_blocks
    assert [measure(own, [case], request_at("draft_model", K)).token_ids for case in cases(own)] == before
    assert [text.tokens for text in looked] == [len(tokens) for (tokens,) in before]


# times


def test_every_round_is_timed_as_often_as_said(own: LLM) -> None:
    ks, batches, runs = ks_to_time(K), (1, 3), RUNS * CYCLES
    timed = time_rounds(own, cases(own), ["suffix", "draft_model"], ks, batches, lambda n: None)
    found = Counter((one.sequences, one.drafting, one.rows) for one in timed)
    for batch in batches:
        assert found[batch, 0, 0] == PLAIN * runs
        assert [found[batch, batch, batch * k] for k in ks[1:]] == [runs] * (len(ks) - 1)
        assert found[batch, batch, batch * ks[0]] == runs + 2 * RUNS  # and the first proposal of each method
    assert sum(n for (batch, drafting, _), n in found.items() if 0 < drafting < batch) == HALF * runs
    calls = [call for one in timed for name, call in one.proposals.items() if name == "draft_model"]
    assert min(call.ms for call in calls) > 0 and min(one.ms for one in timed) > 0
    # a whole batch of prompts
    assert max(call.unread for call in calls) > 3 * min(len(case.prompt) for case in cases(own)) - 3
    fit = Fit.of(timed, Random(0))
    assert fit.readers == {"draft_model"} and fit.misfit(timed) < 0.5


def test_what_cannot_be_timed_is_refused(folder: Path, own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    small = LLM(str(folder), prefix_cache=False, num_blocks=6)
    with pytest.raises(NeverFits, match=r"4 sequences at once need \d+ KV pages, the pool has 6"):
        time_rounds(small, cases(small), ["suffix"], [1], [4], lambda n: None)
    short = LLM(str(folder), prefix_cache=False, max_context=16)
    with pytest.raises(TooLong, match="the context is 16: lower K"):
        time_rounds(short, cases(short), ["suffix"], [1], [1], lambda n: None)


def test_a_method_that_fails_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(Scripted):
        def propose(self, *_: Any) -> Any:
            raise ZeroDivisionError

    monkeypatch.setattr(registry, "_registered", {"broken": lambda config, target: Broken({})})
    llm = LLM(str(folder), prefix_cache=False)
    with pytest.raises(BenchError, match="one of suffix, ngram, broken failed"):
        advise(llm, split(llm), AdvisePlan((1,), k=2, method="broken", repeats=0))


# answers


def advised(llm: LLM, **more: Any) -> Advice:
    return advise(llm, split(llm, **more), AdvisePlan(k=K, repeats=0))


def test_a_drafter_that_never_hits_is_advised_against(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On texts at which lookups find nothing, either.

    A row costs a twentieth of a step: here it would cost nothing.
    """

    class Liar(Scripted):
        def _draft(self, seq: Sequence, k: int) -> Draft:
            return Draft((seq.tokens[-1],) * k, ("liar",) * k)

    plant(monkeypatch, ("ngram", "liar"), draft=0.01)
    monkeypatch.setattr(registry, "_registered", {"liar": lambda config, target: Liar({})})
    llm = LLM(str(folder), prefix_cache=False, speculation={"num_speculative_tokens": K})
    never = SamplingParams(temperature=30.0, seed=1, max_tokens=40)
    some = [Case(text, llm.tokenizer.encode(text), never) for text in PROMPTS]
    advice = advise(llm, Split.of({"prompts": some}), AdvisePlan((1, 2), k=K, method="liar", repeats=0))
    said = answer(advice)
    assert (
        not advice.helps
        and advice.settings == {"method": "off"}
        and said[0].startswith("No: leave speculation off")
    )
    assert all((one.acceptance.rate() or 0) < 0.1 and one.ratio < 1 for one in advice.at(1, "liar"))
    assert any("`liar` pays from" in line and "not even a free draft pays" in line for line in said)


def test_the_target_as_its_own_draft_is_advised_against(own: LLM, as_dear: None) -> None:
    advice = advised(own, temperature=30.0)
    one = advice.at(1, "draft_model", K)[0]
    assert one.acceptance.rate() == 1 and one.ratio < 1 and not advice.helps
    assert any(
        line.startswith(
            "By the cost model `draft_model` could not pay even if every draft were accepted (found: 100%)"
        )
        for line in answer(advice)
    )


def test_the_same_draft_at_a_tenth_of_the_cost_is_advised(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the two above: only the cost is another."""
    plant(monkeypatch, draft=0.1)
    advice = advised(own, temperature=30.0)
    assert advice.helps and "draft_model" in advice.chosen.cascade.methods and advice.chosen.k == K


def test_several_candidates_are_measured_in_one_run(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them on the same prompts, each request with its policy, the best prediction and the policy
    `goodput` among them.
    """
    plant(monkeypatch, draft=0.1)
    asked: list[tuple[str, str, str]] = []
    measured = check_module.measure

    def noted(llm: LLM, group: list[Case], speculation: Any) -> Measurement:
        asked.append((group[0].name, speculation["method"], speculation["policy"]))
        return measured(llm, group, speculation)

    monkeypatch.setattr(check_module, "measure", noted)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1,), k=K, repeats=2))
    candidates = [result.candidate for result in advice.trials[0].results]
    assert Candidate(Cascade("auto", ("suffix", "draft_model"))) in candidates and len(candidates) == 5
    by_group = Counter(name for name, *_ in asked)
    # 2 repeats; the other one warms up, too
    assert set(by_group) == {PROMPTS[1], PROMPTS[3]} and by_group[PROMPTS[3]] == 2 * 7
    assert (
        Counter(asked)[PROMPTS[3], "auto", "goodput"] == 2 and Counter(asked)[PROMPTS[3], "off", "fixed"] == 4
    )
    assert {policy for _, _, policy in asked} == {"fixed", "goodput"}


def test_a_measurement_overrules_what_was_predicted(own: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Costs are planted at which a draft pays fourfold; the measurement finds otherwise, and the answer says
    so.
    """
    plant(monkeypatch, draft=0.0, row=0.0)
    measured = check_module.result_of

    def half_as_fast(*arguments: Any) -> Any:
        return replace(measured(*arguments), ratio=0.5, low=0.4, high=0.6)

    monkeypatch.setattr(check_module, "result_of", half_as_fast)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1,), k=K, repeats=1))
    said = answer(advice)
    assert best(advice.at(1)).low > 1 and advice.settings == {"method": "off"} and len(advice.trials) == 1
    assert "measured 0.50x (0.40 to 0.60) over plain decoding" in said[0]
    assert "PREDICTION AND MEASUREMENT DISAGREE" in said[1]


@pytest.mark.parametrize("policy, higher", [(True, [2, 4]), (False, [4])])
def test_higher_concurrency_is_measured_where_a_setting_helps(
    own: LLM, monkeypatch: pytest.MonkeyPatch, policy: bool, higher: list[int]
) -> None:
    """A fixed K at the highest at which it is predicted to pay, the policy at each: of it nothing is
    predicted.
    """
    plant(monkeypatch, draft=0.0, row=0.0)

    def found(llm: LLM, batch: int, candidates: Any, *_: Any) -> Trial:
        ratios = {one: 1.5 if (one.k is None) is policy else 1.2 for one in candidates}
        results = (Result(one, ratio, ratio - 0.1, ratio + 0.1, 2.0) for one, ratio in ratios.items())
        return Trial(batch, tuple(results), 1.0, 2, True)

    monkeypatch.setattr(advise_module, "run_trial", found)
    advice = advise(own, split(own, temperature=30.0), AdvisePlan((1, 2, 4), k=K))
    assert [check.concurrency for check in advice.trials] == [1, *higher] and advice.up_to == 4
    assert advice.settings["policy"] == ("goodput" if policy else "fixed") and not any(
        "neither" in s for s in answer(advice)
    )


# the command


def test_it_answers_writes_and_what_it_writes_is_used(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = tmp_path / "mine.toml"
    toml.write_text("block_size = 8\n")
    code, out, err = cli(
        folder,
        *prompts(),
        *SMALL,
        "--temperature",
        "0",
        "--draft",
        str(folder),
        "--write",
        str(toml),
        "--out",
        "new",
        "--json",
    )
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert json.loads((tmp_path / "new" / "advise.json").read_text()) == said
    assert (tmp_path / "new" / "advise.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "new" / "advise.md").read_text()
    assert said["answer"][0] in text and "| 2 | draft_model |" in text and said["toml"] in text
    assert "| draft_model | 100% | 100% | 100% | 100% |" in text and "| target | 2 | " in text
    assert (tmp_path / "new" / "speculon.toml").read_text() == said["toml"] and said["next"].endswith(
        "/mine.toml speculon serve"
    )
    assert {one["method"] for one in said["estimates"]} == {"suffix", "ngram", "draft_model", "auto"}
    assert all(one["low"] <= one["high"] for one in said["estimates"])
    own = next(one for one in said["estimates"] if one["method"] == "draft_model")
    assert own["acceptance"] == 1 and len(said["texts"]) == 2 and said["checks"][0]["held_out"] is True
    assert {"auto"} == {one["method"] for one in said["checks"][0]["results"] if one["policy"] == "goodput"}

    monkeypatch.setenv("SPECULON_CONFIG", str(toml))
    config = EngineConfig()
    assert config.block_size == 8 and config.model == str(folder)
    assert {name: getattr(config.speculation, name) for name in said["settings"]} == said["settings"]
    flags = said["flags"].split()
    done = CliRunner().invoke(
        app, ["generate", "--model", str(folder), "--prompt", "x", "--max-tokens", "2", *flags]
    )
    assert done.exit_code == 0


def test_for_a_person_it_is_words_tables_and_settings(
    folder: Path, library: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advise_report, "find_spec", lambda name: None)
    few = [
        "--workloads",
        "code",
        "--max-tokens",
        "40",
        "--concurrency",
        "1",
        "--num-speculative-tokens",
        "2",
        "--repeats",
        "1",
    ]
    code, out, err = cli(folder, *few)
    assert code == 0 and out.startswith(("Yes: use", "No: leave speculation off"))
    parts = (
        "a target call with",
        "concurrency 1",
        "speculon.toml:",
        "[speculation]",
        "or: --model",
        "auto+goodput",
    )
    for part in (*parts, "next: SPECULON_CONFIG=speculon-advise/speculon.toml speculon serve"):
        assert part in out
    assert "no chart: matplotlib is missing" in err and "wrote speculon-advise/advise.md" in err
    assert not Path("speculon-advise/advise.png").exists()
    monkeypatch.setenv("SPECULON_CONFIG", "speculon-advise/speculon.toml")
    assert EngineConfig().model == str(folder)


def test_files_of_prompts_and_chats(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(
        '"one"\n{"messages": [{"role": "user", "content": "two"}]}\n{"prompt": "three"}\n'
    )
    (tmp_path / "b.txt").write_text("four")
    sizes = ["--max-tokens", "8", "--concurrency", "1", "--num-speculative-tokens", "1", "--repeats", "0"]
    code, out, _ = cli(folder, "--prompt-file", "a.jsonl", "--prompt-file", "b.txt", *sizes, "--json")
    said = json.loads(out)
    assert code == 0 and [text["name"] for text in said["texts"]] == ["a.jsonl 1", "b.txt 4", "a.jsonl 3"]
    assert said["checks"] == [] and set(said["groups"]) == {"a.jsonl", "b.txt"}


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        pytest.param([], "InvalidParameter", "prompt = None: give some by --prompt", id="no prompt"),
        pytest.param(["-p", ""], "InvalidParameter", "prompt = '': is empty", id="an empty one"),
        pytest.param(["-p", "x", "--workloads", "code"], "InvalidParameter", "workloads = 'code'", id="both"),
        pytest.param(
            ["--workloads", "poems"], "InvalidParameter", "workloads = 'poems'", id="no such workload"
        ),
        pytest.param(
            ["--workloads", "code", "--temperature", "1"],
            "InvalidParameter",
            "temperature = 1.0",
            id="two wishes",
        ),
        pytest.param(["--prompt-file", "none.jsonl"], "InvalidParameter", "prompt-file", id="no file"),
        pytest.param(["-p", "x " * CONTEXT], "TooLong", "prompt 2", id="beyond the context"),
        pytest.param(
            ["-p", "x", "--max-tokens", "2000"], "TooLong", "> context 1024", id="an answer beyond it"
        ),
        pytest.param(
            ["-p", "x y", "--max-tokens", "1"], "InvalidParameter", "second token", id="nothing to guess"
        ),
        pytest.param(
            ["-p", "x", "--concurrency", "64"],
            "InvalidParameter",
            "max_num_seqs is 32",
            id="too large a crowd",
        ),
        pytest.param(
            ["-p", "x", "--at-once", "3"], "InvalidParameter", "at_once = 3", id="a crowd not measured"
        ),
        pytest.param(["-p", "x", "--method", "magic"], "UnknownMethod", "magic", id="no such method"),
        pytest.param(
            ["-p", "x", "--num-speculative-tokens", "0"],
            "InvalidParameter",
            "num_speculative_tokens",
            id="no draft",
        ),
        pytest.param(
            ["-p", "x", "--write", "no/such/x.toml"],
            "InvalidParameter",
            "no such folder",
            id="nowhere to write",
        ),
        pytest.param(
            ["-p", "x", "--draft", "other"],
            "ModelError",
            "draft and target disagree",
            id="another vocabulary",
        ),
    ],
)
def test_what_cannot_be_advised_on_is_refused(
    folder: Path,
    tmp_path: Path,
    arguments: list[str],
    kind: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "other" in arguments:
        from tests.tiny.checkpoint import write_checkpoint

        write_checkpoint(tmp_path / "other")
    monkeypatch.setattr(advise_module, "time_rounds", lambda *_: pytest.fail("measured"))
    code, out, _ = cli(folder, *arguments, "--json")
    error = json.loads(out)["error"]
    assert (code, error["type"]) == (2, kind) and message in error["message"]


def test_crowds_and_wishes_of_the_library(own: LLM) -> None:
    with pytest.raises(InvalidParameter, match="max_num_seqs is 32"):
        advise(own, split(own), AdvisePlan((1, 33), k=1))
