"""A recurrent or hybrid model drafts: texts are the plain ones, and its states are those of the tokens that
were accepted.
"""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon import LLM, SpeculativeDecoder
from speculon.core.config import SamplingParams
from speculon.core.errors import MemoryExceeded
from speculon.core.types import Reason
from speculon.decoding.sequence import Sequence
from speculon.engine import engine as engine_module
from speculon.runtimes.torch import budget
from speculon.runtimes.torch.drafters.draft_model import model_drafter
from speculon.runtimes.torch.drafters.draft_model.proposer import NAME
from speculon.runtimes.torch.kv.draft_pages import DraftStates
from speculon.runtimes.torch.kv.draft_slots import PER_SEQUENCE, DraftSlots
from speculon.runtimes.torch.kv.states import StateStep
from speculon.runtimes.torch.model.recurrent import Mixer
from tests.tiny.checkpoint import byte_tokenizer
from tests.tiny.conftest import build, tiny_target
from tests.tiny.recurrent import DIFFERENT, RECURRENT, TWO, recurrent_model, recurrent_target, requests
from tests.tiny.recurrent_drafts import (
    POOL,
    check_estimate,
    check_states,
    drafted_requests,
    ids_of,
    plain,
    rejected,
    right_now_and_then,
    serve,
    truth_of,
    use_drafts,
    wrong_now_and_then,
)
from tests.tiny.scripted import Key, Request, Result, make_engine, states_of, texts_of

# without slots for states after each draft: tokens are read again
AGAIN = [(name, False) for name in ("mamba", "mamba2", *TWO)]


# a draft that is the target itself


@pytest.mark.parametrize(("name", "kept"), [*((name, True) for name in DIFFERENT), *AGAIN])
def test_after_rejected_drafts_its_states_are_those_of_the_text(
    name: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kept:
        monkeypatch.setattr(model_drafter, "KEPT_BYTES", 0)
    check_states(name, kept)


@pytest.mark.parametrize("name", ["mamba", "falcon_h1"])
def test_sampled_drafts_with_their_probabilities_are_accepted(name: str) -> None:
    way = {"method": NAME, "acceptance": "rejection", "num_speculative_tokens": 4}
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=20, ignore_eos=True)
    use_drafts(name)
    results = serve(recurrent_target(name), [Request([5, 6, 7], params, way, f"q{i}") for i in range(3)])
    assert rejected(results) == 0


# other targets


@pytest.mark.parametrize(("name", "kept"), [("mamba2", True), *AGAIN[-2:]])
def test_a_transformer_with_a_recurrent_draft(name: str, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefix hits give the target its pages; the draft reads those tokens itself."""
    if not kept:
        monkeypatch.setattr(model_drafter, "KEPT_BYTES", 0)
    made = drafted_requests()
    truth = truth_of("llama")
    drafts = use_drafts(name, right_now_and_then(ids_of(made, truth)))
    results = serve(tiny_target("llama"), made)
    assert texts_of(results) == texts_of(truth) and rejected(results) > 9
    assert drafts.wrong(ids_of(made, truth)) == []
    assert sum(results[f"again{i}", 0].stats.cached_tokens for i in (1, 3)) > 0
    assert sum(result.stats.preemptions for result in results.values()) > 0


@pytest.mark.parametrize("name", TWO)
def test_a_draft_that_lags_behind_reads_what_it_missed(name: str) -> None:
    """Lookups draft first; requests with and without the draft model are in one batch."""
    ways: list[Any] = ["auto", NAME, "auto", "off", "auto", "ngram"]
    usual = drafted_requests(max_tokens=28)[:6]
    made = [replace(r, speculation={"method": way}) for r, way in zip(usual, ways, strict=True)]
    truth = plain(name, made)
    drafts = use_drafts(name, wrong_now_and_then(ids_of(made, truth), 0.1))
    results = serve(recurrent_target(name), made)
    assert texts_of(results) == texts_of(truth) and drafts.wrong(ids_of(made, truth)) == []
    sources = {source for result in results.values() for source in result.stats.drafted_from}
    assert NAME in sources and sources & {"suffix", "ngram"}


def test_a_draft_that_is_never_verified_is_one_state_behind() -> None:
    way = {"method": NAME, "policy": "shadow"}
    made = [replace(request, speculation=way) for request in drafted_requests()[:5]]
    truth = plain("jamba", made)
    drafts = use_drafts("jamba")
    results = serve(recurrent_target("jamba"), made)
    assert texts_of(results) == texts_of(truth) and drafts.wrong(ids_of(made, truth)) == []
    assert len(drafts.last.noted) > 40


@pytest.mark.parametrize("name", TWO)
def test_rounds_of_a_decoder_are_the_text(name: str) -> None:
    request = requests()[1]
    truth = texts_of(plain(name, [request]))["q1", 0]
    settings: dict[str, Any] = {"block_size": 4, "policy": "fixed", "num_speculative_tokens": 4}
    decoder = SpeculativeDecoder(recurrent_model(name), recurrent_model(name), method=NAME, **settings)
    text = list(request.prompt)
    while len(text) < len(request.prompt) + 12:
        text += decoder.step(text, request.params, prompt_len=len(request.prompt)).emitted_tokens
    written = text[len(request.prompt) :]
    assert written == truth[: len(written)] and decoder.acceptance_rate == 1.0
    assert [*decoder.draft(request.prompt, 4, request.params).tokens] == truth[:4]
    assert decoder.generate(request.prompt, request.params).token_ids == truth
    assert decoder.acceptance_rate == 1.0
    decoder.engine.check_integrity()


# errors inside a step


class Begun:
    """An engine with all requests, stepped by hand."""

    def __init__(self, name: str, share: float = 0.2):
        made = drafted_requests()
        self.truth = truth_of(name)
        self.ids = ids_of(made, self.truth)
        self.drafts = use_drafts(name, wrong_now_and_then(self.ids, share))
        speculation = {"draft": "a model in memory", "num_speculative_tokens": 6}
        self.engine = make_engine(recurrent_target(name), speculation=speculation, **POOL)
        self.results: dict[Key, Result] = {}
        for request in made:
            self.engine.add_request(request.prompt, request.params, request.speculation, request.id)

    @property
    def slots(self) -> DraftSlots:
        return self.engine.runtime.space.draft_slots[NAME]

    def step(self) -> None:
        for event in self.engine.step():
            self.results.setdefault((event.request_id, event.sample), Result()).take(event)
        self.engine.check_integrity()

    def states(self) -> dict[int, tuple[int, list[Tensor]]]:
        """By sequence: how many tokens the draft's state has seen, and its bytes."""
        found = [state for mixer in states_of(self.engine, NAME).states for state in mixer]
        return {
            number: (chain.start, [state[chain.slots[chain.start]].clone() for state in found])
            for number, chain in self.slots.chains.items()
        }


def fail(*args: Any, **kwargs: Any) -> Any:
    raise MemoryError("planted")


@pytest.mark.parametrize("name", TWO)
def test_a_step_that_fails_leaves_no_trace_in_the_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, failed = Begun(name), 0
    for step in range(300):
        if not begun.engine.has_work:
            break
        if step % 3 == 1:
            before = begun.states()
            with monkeypatch.context() as planted, pytest.raises(MemoryError):
                planted.setattr(engine_module, "verify", fail)
                begun.step()
            begun.engine.check_integrity()
            after = begun.states()
            # a sequence that was preempted for this step has no state any more
            assert after.keys() <= before.keys()
            for number, (seen, states) in after.items():
                assert before[number][0] == seen
                assert all(torch.equal(a, b) for a, b in zip(before[number][1], states, strict=True))
            failed += bool(after)
        begun.step()
    assert failed > 5 and texts_of(begun.results) == texts_of(begun.truth)
    assert begun.drafts.wrong(begun.ids) == []


@pytest.mark.parametrize(("error", "name"), list(zip((MemoryError, KeyboardInterrupt), TWO, strict=True)))
def test_an_error_in_the_middle_of_a_draft_costs_drafts_alone(
    name: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error costs the sequences of the call their further drafts, an interrupt those of the step."""
    begun, raised, run_ = Begun(name), 0, Mixer.run
    last = begun.engine.runtime.target.mixers[-1]
    draft_states = states_of(begun.engine, NAME)

    def failing(mixer: Mixer, step: StateStep, call: Any) -> Tensor:
        nonlocal raised
        if mixer is last and step.store is draft_states and draft_calls.pop() == 0:
            raised += 1
            raise error("planted")
        return run_(mixer, step, call)

    monkeypatch.setattr(Mixer, "run", failing)
    chance = random.Random(1)
    for _ in range(400):
        if not begun.engine.has_work:
            break
        # the first call of the draft that fails in this step, if any
        draft_calls = [*[0] * 90, *[1] * chance.randrange(9)]
        with suppress(KeyboardInterrupt):
            begun.step()
        begun.engine.check_integrity()
    assert raised > 2 and texts_of(begun.results) == texts_of(begun.truth)
    assert begun.drafts.wrong(begun.ids) == []


# memory


def test_its_states_are_part_of_the_memory_estimate() -> None:
    target, draft = recurrent_target("falcon_h1"), recurrent_model("mamba")
    speculation = {"method": NAME, "draft": draft, "num_speculative_tokens": 5}
    engine = make_engine(target, speculation=speculation, max_num_seqs=3)
    held = sum(state.nbytes for mixer in states_of(engine, NAME).states for state in mixer)
    slot = recurrent_target("mamba").state_bytes
    assert held == (3 * PER_SEQUENCE + 3 * (5 + 1 - PER_SEQUENCE)) * slot
    assert engine.runtime.estimate.states == held + 6 * target.state_bytes


@pytest.mark.parametrize("name", DIFFERENT)
def test_the_estimate_before_loading_is_that_of_the_loaded_draft(name: str, tmp_path: Path) -> None:
    check_estimate(name, tmp_path)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A transformer and a small recurrent draft; memory stays the same."""
    monkeypatch.setattr(budget, "held_memory", lambda device: 1 << 29)
    monkeypatch.setattr(budget, "free_memory", lambda device: 1 << 33)
    tokenizer = byte_tokenizer()
    for name, model in (("target", "llama"), ("draft", "mamba")):
        settings = RECURRENT[model][1] if model in RECURRENT else {"num_hidden_layers": 4}
        build(model, **{**settings, "vocab_size": len(tokenizer)}).save_pretrained(tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    return tmp_path


def start(folders: Path, **speculation: Any) -> LLM:
    settings = {"policy": "fixed", "method": NAME, "draft": str(folders / "draft"), **speculation}
    return LLM(str(folders / "target"), num_blocks=64, max_num_seqs=4, warmup=False, speculation=settings)


def test_a_folder_of_a_recurrent_draft_fits_to_the_last_byte(
    folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    llm = start(folders)
    memory = llm.engine.runtime.estimate
    assert memory.states > 0 and llm.generate([5, 6, 7], params)[0].speculation.rounds > 0
    expected = start(folders, method="off", draft=None).generate([5, 6, 7], params)[0].token_ids
    assert start(folders, memory_limit_gb=memory.total / 2**30).engine.runtime.estimate.action == "use"
    monkeypatch.setattr(model_drafter, "load_target", fail)  # what does not fit is not loaded
    less = start(folders, memory_limit_gb=(memory.total - 1) / 2**30)
    output = less.generate([5, 6, 7], params)[0]
    assert output.token_ids == expected and set(output.reasons) == {Reason.MEMORY}
    with pytest.raises(MemoryExceeded):
        start(folders, memory_policy="fail", memory_limit_gb=(memory.total - 1) / 2**30)


# planted errors


def nothing_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state after the last draft takes the place of each other one."""
    roll_back = DraftSlots.roll_back

    def last(slots: DraftSlots, seq: Sequence, committed: int) -> int:
        if chain := slots.chains.get(seq.id):
            chain.slots = dict(zip(chain.slots, reversed(chain.slots.values()), strict=True))
        return roll_back(slots, seq, committed)

    monkeypatch.setattr(DraftSlots, "roll_back", last)


def states_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several sequences have a state, each reads that of its neighbour."""
    begin = DraftStates.begin

    def rolled(states: DraftStates, ranges: Any) -> StateStep:
        step = begin(states, ranges)
        going_on = [i for i, span in enumerate(step.spans) if not span.fresh]
        reads = [step.spans[i].read for i in going_on]
        for i, read in zip(going_on, reads[1:] + reads[:1], strict=True):
            step.spans[i] = replace(step.spans[i], read=read)
        return step

    monkeypatch.setattr(DraftStates, "begin", rolled)


def not_from_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence begins with the state that its slot has from an earlier one."""
    begin = DraftStates.begin

    def stale(states: DraftStates, ranges: Any) -> StateStep:
        step = begin(states, ranges)
        step.spans[:] = [replace(span, fresh=False) for span in step.spans]
        return step

    monkeypatch.setattr(DraftStates, "begin", stale)


def one_token_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose number of tokens is right, and which has not read the last accepted one."""
    roll_back = DraftSlots.roll_back

    def late(slots: DraftSlots, seq: Sequence, committed: int) -> int:
        read = slots.chains[seq.id].end if seq.id in slots.chains else 0
        seen = roll_back(slots, seq, committed)
        if 0 < seen == read < committed:
            chain = slots.chains[seq.id]
            chain.slots = {seen + 1: chain.slots.pop(seen)}
            chain.start = seen = seen + 1
        return seen

    monkeypatch.setattr(DraftSlots, "roll_back", late)


PLANTS = [nothing_restored, states_exchanged, not_from_zero, one_token_left_out]
CHOSEN = list(zip(PLANTS, cycle(TWO), strict=False))


@pytest.mark.parametrize(("plant", "name"), CHOSEN)
def test_a_planted_error_changes_drafts_and_no_text(
    plant: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, truth = drafted_requests(), truth_of(name)
    plant(monkeypatch)
    drafts = use_drafts(name, wrong_now_and_then(ids_of(made, truth)))
    results = serve(recurrent_target(name), made)
    assert texts_of(results) == texts_of(truth) and drafts.wrong(ids_of(made, truth))
