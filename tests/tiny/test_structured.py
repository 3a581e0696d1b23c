"""Structured output with drafts: the same tokens as without, and every text has its form."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chi2
from torch import Tensor

from speculon import LLM
from speculon.core.config import SamplingParams
from speculon.speculation.proposers import compose
from tests.tiny import demo_forms
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.demo_texts import MISSING
from tests.tiny.drafting import DRAFT, noisy_draft, use_draft
from tests.tiny.forms import ENDLESS, FORMS, check, engine_of, words
from tests.tiny.scripted import Key, Request, Result, drain, script

OFF = {"method": "off"}
EOS = 2
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "hot": {
        "temperature": 1.5,
        "top_k": 30,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "bad_words": ("e",),
        "logit_bias": {40: 2.0},
    },
}


def write(requests: list[Request], **settings: Any) -> dict[Key, Result]:
    engine = engine_of(**settings)
    for request in requests:
        engine.add_request(request.prompt, request.params, request.speculation, request.id)
    return drain(engine)


def requests_of(mode: str, **more: Any) -> list[Request]:
    """One request for each form, and two without any among them."""
    forms = [(name, form) for name, form in FORMS.items()]
    forms[3:3] = forms[7:7] = [("free", None)]  # type: ignore[list-item]
    return [
        Request(
            [1, *range(20 + i, 24 + 3 * i)],
            SamplingParams(
                max_tokens=70, seed=i, structured=form, ignore_eos=form is None, **MODES[mode], **more
            ),
            OFF,
            f"{name} {i}",
        )
        for i, (name, form) in enumerate(forms)
    ]


@cache
def plain(mode: str) -> dict[Key, Result]:
    """What each of the requests writes without drafts."""
    return write(requests_of(mode))


def spell(result: Result) -> str:
    return words().decode(result.tokens)


def test_forced_tokens_are_drafted_and_save_calls() -> None:
    requests = [one for one in requests_of("sampled") if one.id.startswith(("strings", "nested"))]
    alone = write(requests)
    # with a drafter, by default, with none at hand
    for speculation in ({"method": "ngram"}, {}, {"method": "draft_model"}):
        results = write([replace(one, speculation=speculation) for one in requests])
        for key, result in results.items():
            done = result.stats.speculation()
            assert done and done.by_source["grammar"]["drafted"] == done.by_source["grammar"]["accepted"] > 8
            assert (
                result.stats.target_calls < 0.7 * alone[key].stats.target_calls
                and result.tokens == alone[key].tokens
            )


def test_a_drafter_knows_what_the_grammar_allows_after_its_own_drafts() -> None:
    """The target as its own drafter is always right, though every second token is of other letters."""
    use_draft(tiny_target("llama"))
    engine = engine_of(speculation=DRAFT)
    params = SamplingParams(temperature=0, structured={"regex": "([ab][cd]){8}"})
    engine.add_request([1, 30, 31], params, {"method": "draft_model", "num_speculative_tokens": 4}, "r")
    (result,) = drain(engine).values()
    assert len(spell(result)) == 16
    assert result.stats.target_calls == 4  # the prompt's token, and three times five


def test_samples_have_a_place_of_their_own_in_the_grammar() -> None:
    request = next(one for one in requests_of("sampled", n=3) if one.id.startswith("nested"))
    texts = {spell(result) for result in write([request]).values()}
    assert len(texts) == 3
    for text in texts:
        check("nested", text)


@pytest.mark.parametrize("speculation", [OFF, {"num_speculative_tokens": 0}], ids=str)
def test_who_wants_no_drafts_gets_no_forced_ones(speculation: dict[str, Any]) -> None:
    results = write([replace(one, speculation=speculation) for one in requests_of("sampled")])
    assert not any(result.stats.rounds for result in results.values())


def test_what_the_grammar_refuses_is_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    request = next(one for one in requests_of("sampled") if one.id.startswith("strings"))
    request = replace(request, speculation={"method": "scripted", "num_speculative_tokens": 6})
    truth = plain("sampled")[request.id, 0]
    script({(request.id, 0): truth.tokens}, lies=lambda position: position % 2 == 1)  # ids of any kind
    trimmed = write([request])[request.id, 0]
    script({(request.id, 0): truth.tokens}, lies=lambda position: position % 2 == 1)
    monkeypatch.setattr(compose, "fit", lambda draft, k, seq, ahead: draft)
    whole = write([request])[request.id, 0]
    assert trimmed.tokens == whole.tokens == truth.tokens
    assert trimmed.stats.verified_positions < whole.stats.verified_positions
    assert trimmed.stats.accepted_at.total() == whole.stats.accepted_at.total()


# distribution


def check_forms(acceptance: str, seed: int) -> None:
    """Drafts that carry q, judged against p under the mask."""
    noisy_draft()
    engine = engine_of(speculation=DRAFT)
    for name, form in FORMS.items():
        params = SamplingParams(max_tokens=90, seed=seed, structured=form)
        engine.add_request([1, 30, 31], params, {"method": "draft_model", "acceptance": acceptance}, name)
    for (name, _), result in drain(engine).items():
        if name not in ENDLESS:
            check(name, spell(result))


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_with_q_keep_the_form(acceptance: str) -> None:
    check_forms(acceptance, seed=0)


@pytest.mark.soak
@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_rules_with_q_draw_from_the_law_under_the_mask(acceptance: str) -> None:
    """The 2nd and 3rd of three letters, which were drafted: chi-square against the stock model's own law."""
    noisy_draft()
    letters = [words().encode(c, add_special_tokens=False)[0] for c in "abcdefgh"]
    engine = engine_of(speculation=DRAFT, max_num_seqs=64)
    for seed in range(32):
        params = SamplingParams(
            n=64, max_tokens=4, seed=seed, structured={"regex": "[a-h]{3}"}, temperature=1.3
        )
        engine.add_request(
            [1, 30, 31], params, {"method": "draft_model", "acceptance": acceptance}, f"r{seed}"
        )
    results = drain(engine)
    counts = Counter(tuple(result.tokens[1:]) for result in results.values())
    assert sum(result.stats.accepted for result in results.values()) > 500 and len(results) == 2048

    def law(tokens: list[list[int]]) -> Tensor:  # [N, 8]
        with torch.inference_mode():
            return (tiny_model("llama")(torch.tensor(tokens)).logits[:, -1, letters].double() / 1.3).softmax(
                -1
            )

    start = [1, 30, 31]
    one_letter = [[*start, a] for a in letters]
    first, second = law([start])[0], law(one_letter)
    third = law([[*text, b] for text in one_letter for b in letters]).view(8, 8, 8)
    p = torch.einsum("a,ab,abc->bc", first, second, third)
    expected = {(b, c): float(p[i, j]) * 2048 for i, b in enumerate(letters) for j, c in enumerate(letters)}
    likely = {pair: e for pair, e in expected.items() if e >= 5}
    rest = 2048 - sum(likely.values())
    others = 2048 - sum(counts[pair] for pair in likely)
    statistic = sum((counts[pair] - e) ** 2 / e for pair, e in likely.items()) + (others - rest) ** 2 / max(
        rest, 1e-9
    )
    assert len(likely) > 8 and chi2.sf(statistic, len(likely)) > 1e-3
    shifted = dict(zip(likely, [*list(likely.values())[1:], next(iter(likely.values()))], strict=True))
    # the twin
    assert chi2.sf(sum((counts[pair] - e) ** 2 / e for pair, e in shifted.items()), len(likely)) < 1e-6


# the shipped model


@pytest.mark.skipif(MISSING, reason="the demo weights are not in this checkout")
def test_the_demo_writes_valid_json_of_any_draft() -> None:
    """Ten of the requests that the soak makes two hundred of."""
    llm = LLM("demo", speculation={"policy": "fixed"})
    plainly, drafted = (demo_forms.write(llm, 10, speculation) for speculation in (OFF, {}))
    assert demo_forms.wrong(plainly) == demo_forms.wrong(drafted) == []
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plainly]
    assert sum(one.speculation.accepted for one in drafted if one.speculation) > 100
    cut = [one.text[:-1] for one in drafted]
    assert (
        len(
            demo_forms.wrong(
                [
                    replace(one, outputs=[replace(one.outputs[0], text=t)])
                    for one, t in zip(drafted, cut, strict=True)
                ]
            )
        )
        == 10
    )
