"""Prediction layers in a target's checkpoint change no token, and their rows are those of the formula."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from speculon.core.config import SamplingParams
from speculon.runtimes.torch.drafters.mtp import load as mtp_load
from speculon.runtimes.torch.drafters.mtp.network import Module as MtpModule
from speculon.runtimes.torch.drafters.mtp.network import MtpHead
from speculon.runtimes.torch.drafters.mtp.proposer import Mtp
from speculon.runtimes.torch.kv.draft_pages import DraftPages
from tests.rounding import assert_near
from tests.tiny.mtp_forms import FORMS, Texts, target_of, true_states, watch_mtp, written, wrong_rows
from tests.tiny.requests import GREEDY, MODES, OFF, accepted_lengths
from tests.tiny.scripted import Key, Request, Result, drain, make_engine, texts_of

KS = (1, 3, 7)
BOTH = ("qwen3_next", "mimo, three modules")
SETTINGS: dict[str, dict[str, Any]] = {
    "prompts in chunks": {"max_batch_tokens": 7},
    "a page each token": {"block_size": 1},
    "few pages": {"num_blocks": 24, "max_num_seqs": 8},
    "no prefix cache": {"prefix_cache": False, "max_num_seqs": 3},
    "stock layers": {"fuse": False},
}
CHOSEN = list(zip(SETTINGS, cycle(BOTH), strict=False))
CHOSEN_LAYOUTS = list(zip(FORMS, cycle(KS), strict=False))


@pytest.fixture(autouse=True)
def prepared(request: pytest.FixtureRequest) -> None:
    """A test's checkpoint and its plain texts are made once, before the first test that has them."""
    params = getattr(request.node, "callspec", None) and request.node.callspec.params
    if params and "form" in params:
        plain(params["form"], params.get("mode", "greedy"), 9 if "setting" in params else 0)


@cache
def requests_of(mode: str, shared: int = 0) -> tuple[Request, ...]:
    chance = random.Random(7)
    common = [chance.randrange(3, 96) for _ in range(shared)]
    requests = []
    for i, length in enumerate((5, 21, 1, 9)):
        prompt = common + [chance.randrange(3, 96) for _ in range(length)]
        params = SamplingParams(
            max_tokens=24 - 3 * i, seed=50 + i // 2, ignore_eos=True, **MODES[mode][i % 2]
        )
        requests.append(Request(prompt, params, OFF, f"q{i}"))
    return tuple(requests)


def write(
    form: str, requests: tuple[Request, ...], speculation: dict[str, Any], **settings: Any
) -> dict[Key, Result]:
    engine = make_engine(target_of(form), speculation=speculation, **settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, None, request.id)
    return drain(engine)


@cache
def plain(form: str, mode: str, shared: int = 0) -> Texts:
    """What is written for each of the requests alone and without speculation."""
    texts: dict[Key, list[int]] = {}
    for request in requests_of(mode, shared):
        texts |= texts_of(write(form, (request,), {"method": "off"}))
    return texts


def whole(form: str, mode: str, shared: int = 0) -> Texts:
    """Prompt and text of each."""
    texts = plain(form, mode, shared)
    return {(r.id, 0): [*r.prompt, *texts[r.id, 0]] for r in requests_of(mode, shared)}


def ask(k: int) -> dict[str, Any]:
    return {"method": "mtp", "num_speculative_tokens": k}


@pytest.mark.parametrize(("form", "k"), CHOSEN_LAYOUTS)
def test_every_layout_gives_the_rows_of_the_formula(form: str, k: int) -> None:
    watch = watch_mtp(plain(form, "greedy"))
    results = write(form, requests_of("greedy"), ask(k))
    assert texts_of(results) == plain(form, "greedy")
    assert accepted_lengths(results) >= set(range(min(k, 3) + 1))
    assert not wrong_rows(watch, written(form), whole(form, "greedy"))
    assert len(watch.rounds) > 10


@pytest.mark.parametrize(("setting", "form"), CHOSEN)
def test_no_setting_changes_a_row(setting: str, form: str) -> None:
    watch = watch_mtp(plain(form, "greedy", 9))
    results = write(form, requests_of("greedy", 9), ask(4), **SETTINGS[setting])
    assert texts_of(results) == plain(form, "greedy", 9)
    if setting == "few pages":
        assert any(result.stats.preemptions for result in results.values())
    assert not wrong_rows(watch, written(form), whole(form, "greedy", 9))


@pytest.mark.parametrize("form", ["mimo, three modules", "qwen3_5"])
def test_switched_off_and_on_it_continues_where_it_was(form: str) -> None:
    """Under `solo` the long sequence has drafts while it is alone, none in a batch, and drafts again."""
    params = SamplingParams(max_tokens=60, ignore_eos=True, **GREEDY)
    long = Request(requests_of("greedy")[1].prompt, params, OFF, "long")
    alone = texts_of(write(form, (long,), {"method": "off"}))
    watch = watch_mtp({**plain(form, "greedy"), **alone})
    engine = make_engine(target_of(form), speculation={**ask(3), "policy": "solo"})
    engine.add_request(long.prompt, long.params, None, long.id)
    events = []
    for step in range(400):
        if step == 4:
            for request in requests_of("greedy")[:2]:
                engine.add_request(request.prompt, request.params, None, request.id)
        events += engine.step()
        if not engine.has_work:
            break
    tokens = [token for event in events if event.request_id == "long" for token in event.tokens]
    assert tokens == alone["long", 0]
    assert not wrong_rows(watch, written(form), {("long", 0): [*long.prompt, *tokens]})
    sizes = [len(rows.states) for rows in watch.rows if rows.key == ("long", 0)]
    assert max(sizes[form.count("three") * 2 + 1 :]) > 8, f"drafting never paused: {sizes}"


@pytest.mark.parametrize("form", ["deepseek, two modules", "mimo"])
def test_a_prefix_hit_loses_no_row(form: str) -> None:
    """Rows of full pages are found again; those of a request that did not draft are read from its taps."""
    first, params = list(range(3, 60)), SamplingParams(max_tokens=8, ignore_eos=True, **GREEDY)
    texts = []
    for before in ({"method": "mtp"}, OFF):
        watch = watch_mtp()
        engine = make_engine(target_of(form), speculation=ask(3))
        for name, speculation in (("first", before), ("second", {"method": "mtp"})):
            engine.add_request([*first, 7], params, speculation, name)
            results = drain(engine)
        assert results["second", 0].stats.cached_tokens == 56
        texts.append(results["second", 0].tokens)
        rows = [rows for rows in watch.rows if rows.key == ("second", 0)]
        assert (min(row.start for row in rows) >= 56) == (before is not OFF)
        assert not wrong_rows(watch, written(form), {("second", 0): [*first, 7, *texts[-1]]})
    assert texts[0] == texts[1]


def test_pages_before_all_windows_are_released() -> None:
    """Both modules' rows are those of the formula, but for the first after released ones: their windows are
    cut, and so are those that module 1 reads.
    """
    params = SamplingParams(max_tokens=24, ignore_eos=True, **GREEDY)
    prompt = [random.Random(i).randrange(3, 96) for i in range(90)]
    request = Request(prompt, params, OFF, "long")
    alone = texts_of(write("windows", (request,), {"method": "off"}))
    watch = watch_mtp(alone)
    engine = make_engine(target_of("windows"), speculation=ask(4), prefix_cache=False)
    engine.add_request(prompt, params, None, "long")
    released, tokens = 0, list[int]()
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.tokens]
        pages = map(engine.runtime.space.of, engine.scheduler.running)
        released = max([released, *(its.released for its in pages)])
    assert tokens == alone["long", 0]
    assert released > 8
    for rows in watch.rows[:2]:
        assert rows.start == 21 + rows.module
        rows.start, rows.states = rows.start + 8, rows.states[8:]
    assert not wrong_rows(watch, written("windows"), {("long", 0): [*prompt, *tokens]})


@pytest.mark.parametrize("acceptance", ["matching", "rejection"])
def test_drafts_carry_their_distribution_where_it_is_used(acceptance: str) -> None:
    engine = make_engine(target_of("qwen3_5"), speculation=ask(3))
    params, seen = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1), []
    proposer: Any = engine.proposers.find("mtp")
    propose = proposer.propose

    def note(*args: Any) -> Any:
        drafts = propose(*args)
        seen.extend(draft.probs for draft in drafts)
        return drafts

    proposer.propose = note
    engine.add_request([5, 6, 7], params, {**ask(3), "acceptance": acceptance}, "r")
    drain(engine)
    if acceptance == "matching":
        assert set(seen) == {None}
    for probs in seen if acceptance == "rejection" else ():
        torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)))


@pytest.mark.parametrize("form", ["deepseek", "deepseek, two modules", "glm", "mellum"])
def test_drafts_and_logits_are_those_of_transformers(form: str) -> None:
    """Its own `MtpModel` drafts as many tokens as there are modules."""
    at, prompt = written(form), requests_of("greedy")[1].prompt
    watch = watch_mtp()
    engine = make_engine(target_of(form), speculation=ask(at.form.modules))
    engine.add_request(prompt, SamplingParams(max_tokens=4, ignore_eos=True, **GREEDY), None, "r")
    tokens = drain(engine)["r", 0].tokens
    made = watch.rounds[0]
    ids = [*prompt, *tokens][: made.length]
    paths = [re.escape(at.form.path(module)) for module in range(at.form.modules)]
    at.stock._keys_to_ignore_on_load_unexpected = paths
    model = MtpModel.from_pretrained(at.stock)
    cache = MtpCache(config=at.stock.config.get_mtp_config())
    with torch.inference_mode():
        rows = torch.arange(1, len(ids))[None]
        drafts, logits, _ = model(torch.tensor([ids[1:]]), true_states(at, ids)[None, :-1], None, rows, cache)
    assert tuple(drafts[0].tolist()) == made.drafts
    assert_near(made.logits, logits[0], len(target_of(form).layers) + at.form.modules)


# planted errors: each must show in the rows or in the drafts


def before_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Modules read the target's states as they are before its final norm."""
    patch.setattr(
        Mtp,
        "_states",
        lambda self, module, ranges, before: before.taps([(s, a - 1, b - 1) for s, a, b in ranges]),
    )


def swapped(patch: pytest.MonkeyPatch) -> None:
    load = mtp_load.load_mtp
    patch.setattr(
        "speculon.runtimes.torch.drafters.mtp.proposer.load_mtp",
        lambda config, *rest: load(replace(config, hidden_first=not config.hidden_first), *rest),
    )


def off_by_one(patch: pytest.MonkeyPatch) -> None:
    needs = mtp_load.mtp_needs

    def moved(*args: Any) -> Any:
        made = needs(*args)
        return replace(made, taps=(made.taps[0] - 1,))

    patch.setattr("speculon.runtimes.torch.drafters.mtp.proposer.mtp_needs", moved)


def one_slot_late(patch: pytest.MonkeyPatch) -> None:
    """A row pairs its token with the state of that token."""
    taps = DraftPages.taps
    patch.setattr(
        DraftPages, "taps", lambda self, ranges: taps(self, [(s, a + 1, b + 1) for s, a, b in ranges])
    )


def fed_back_before_the_norm(patch: pytest.MonkeyPatch) -> None:
    call = MtpModule.__call__
    patch.setattr(
        MtpModule, "__call__", lambda self, *args: call(replace(self, norm=torch.nn.Identity()), *args)
    )
    patch.setattr(
        MtpHead,
        "logits",
        lambda self, module, states, size: self.modules[module].head(self.modules[module].norm(states)),
    )


def norms_without_one(patch: pytest.MonkeyPatch) -> None:
    """Zero-centred norms multiply by w instead of 1 + w."""
    patch.setattr(
        mtp_load.ModuleLoader,
        "norm",
        lambda self, norm_class, part: norm_of(self.tensors[f"{part}.weight"]),
    )


def norm_of(weight: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.RMSNorm(len(weight), eps=1e-6)
    made.weight.data = weight
    return made


PLANTED = [before_the_norm, swapped, off_by_one, one_slot_late, fed_back_before_the_norm, norms_without_one]


@pytest.mark.parametrize(
    ("plant", "form"),
    list(zip(PLANTED, cycle(("mimo", "qwen3_5")), strict=False)),
)
def test_planted_errors_show(plant: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    watch = watch_mtp(plain(form, "greedy"))
    results = write(form, requests_of("greedy"), ask(3))
    assert texts_of(results) == plain(form, "greedy"), "the text is the target's, however wrong the drafts"
    assert wrong_rows(watch, written(form), whole(form, "greedy"))
