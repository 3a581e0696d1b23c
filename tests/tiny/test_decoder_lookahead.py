"""How many tokens `SpeculativeDecoder` drafts: a number that can be set between rounds, or a controller's."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest

from speculon import SamplingParams, SpeculativeDecoder
from speculon.core.errors import InvalidParameter
from speculon.speculation.control import adaptive as adaptive_module
from speculon.speculation.control.adaptive import Adaptive, AdaptiveConfig, AdaptiveLookahead
from tests.tiny.scripted import assert_nothing_held, proposer_of
from tests.tiny.test_decoder import (
    GREEDY,
    MODES,
    OTHER,
    PROMPT,
    SAME,
    SEEDED,
    K,
    account,
    by_steps,
    make,
    plain,
)
from tests.tiny.test_policies import unknown_to

NGRAM = ("ngram", None)
QUICK = AdaptiveConfig(initial=3, min=1, max=9, alpha=0.5, cooldown_steps=0)
SLOW = AdaptiveConfig(initial=6, min=2, max=7, alpha=0.3, cooldown_steps=2)
CONFIGS = [
    pytest.param(QUICK, id="quick"),
    pytest.param(SLOW, id="slow"),
    pytest.param(AdaptiveConfig(), id="default"),
]
Rounds = list[tuple[int, int, int]]  # lookahead, drafted, accepted


def with_controller(config: AdaptiveConfig, drafter: tuple[str, int | None] = SAME) -> SpeculativeDecoder:
    decoder = make(drafter)
    decoder.adaptive = AdaptiveLookahead(config)
    return decoder


def figures(controller: AdaptiveLookahead | None) -> tuple[int, float, int, int]:
    assert controller is not None
    return controller.lookahead, controller.mean_accepted, controller.observations, controller.updates


def rounds_of(decoder: SpeculativeDecoder, params: SamplingParams) -> tuple[list[int], Rounds]:
    """A sequence by `step`: its output and its rounds."""
    text, rounds = list(PROMPT), []
    while True:
        lookahead, proposed = (
            decoder.lookahead,
            decoder.draft(text, params=params, prompt_len=len(PROMPT)).tokens,
        )
        result = decoder.step(text, params, prompt_len=len(PROMPT))
        assert proposed == result.draft_tokens, "draft() without k proposes what step() verifies"
        text += result.emitted_tokens
        rounds.append((lookahead, len(result.draft_tokens), len(result.accepted_tokens)))
        if result.verdict.finish:
            return text[len(PROMPT) :], rounds


def reference(config: AdaptiveConfig, rounds: Rounds) -> tuple[list[int], AdaptiveLookahead]:
    """What a controller says before each of these rounds and how it ends, by the rules written down once
    more.
    """
    follow, lookaheads = AdaptiveLookahead(config), []
    for _, drafted, accepted in rounds:
        lookaheads.append(follow.lookahead)
        cut_short = drafted < follow.lookahead and accepted == drafted
        if drafted and not (cut_short and accepted < follow.mean_accepted):
            follow.observe(drafted, accepted)
    return lookaheads, follow


def differs(config: AdaptiveConfig, drafter: tuple[str, int | None]) -> bool:
    decoder = with_controller(config, drafter)
    _, rounds = rounds_of(decoder, SEEDED)
    lookaheads, follow = reference(config, rounds)
    return [lookahead for lookahead, _, _ in rounds] != lookaheads or figures(decoder.adaptive) != figures(
        follow
    )


# the controller


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("drafter", [SAME, OTHER, NGRAM], ids=str)
def test_each_step_drafts_what_the_controller_says_and_reports_to_it(
    drafter: tuple[str, int | None], config: AdaptiveConfig
) -> None:
    decoder = with_controller(config, drafter)
    output, rounds = rounds_of(decoder, SEEDED)
    assert output == plain(SEEDED) and not differs(config, drafter)
    room = len(output)
    for lookahead, drafted, accepted in rounds:
        most = min(lookahead, room - 1)
        assert drafted == most or (drafter == NGRAM and drafted < most)
        room -= accepted + 1
    assert (
        max(drafted for _, drafted, _ in rounds) > 2
        and decoder.adaptive
        and decoder.adaptive.observations > 0
    )
    assert_nothing_held(decoder.engine)


def test_a_controller_that_observes_nothing_or_too_much_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(adaptive_module, "counts", lambda *_: True)
        assert differs(QUICK, SAME), "planted: a draft that max_tokens cut short pulls the mean down"
    with monkeypatch.context() as patch:
        patch.setattr(Adaptive, "observe", lambda *_: None)
        assert differs(QUICK, SAME)
    assert not differs(QUICK, SAME)


@pytest.mark.parametrize("config", CONFIGS)
def test_generate_uses_the_same_controller(config: AdaptiveConfig) -> None:
    decoder = with_controller(config)
    assert decoder.generate(PROMPT, GREEDY).token_ids == plain(GREEDY)
    room, rounds, follow = 29, [], AdaptiveLookahead(config)  # the prompt's own row gives the first token
    while room > 0:
        k = min(follow.lookahead, room - 1)
        rounds.append((0, k, k))
        _, follow = reference(config, rounds)
        room -= k + 1
    assert figures(decoder.adaptive) == figures(follow)
    assert decoder.stats.drafted == sum(k for _, k, _ in rounds)


@pytest.mark.parametrize("params", MODES)
def test_a_controller_leaves_the_output(params: SamplingParams) -> None:
    for drafter in (OTHER, NGRAM, ("off", None)):
        decoder = with_controller(QUICK, drafter)
        assert by_steps(decoder, params) == decoder.generate(PROMPT, params).token_ids == plain(params), (
            drafter
        )


def test_samples_of_a_prompt_share_the_controller() -> None:
    decoder = with_controller(QUICK)
    out = decoder.generate(PROMPT, SamplingParams(n=3, seed=1, max_tokens=8, ignore_eos=True))
    assert len({tuple(one.token_ids) for one in out.outputs}) == 3 and figures(decoder.adaptive)[2] > 3
    assert not decoder.engine.policy.of("adaptive").lookaheads  # type: ignore[attr-defined]


def test_the_controller_goes_on_with_the_next_sequence_until_a_reset() -> None:
    decoder = with_controller(QUICK)
    controller = decoder.adaptive
    by_steps(decoder, GREEDY)
    assert controller and (grown := controller.lookahead) > 3
    result = decoder.step([9, 8, 7], GREEDY)
    assert len(result.draft_tokens) == grown and controller.lookahead == grown + 1
    decoder.reset_stats()
    assert decoder.adaptive is controller and figures(controller) == figures(AdaptiveLookahead(QUICK))
    assert len(decoder.step([9, 8, 7], GREEDY).draft_tokens) == 3


def test_draft_and_verify_report_nothing() -> None:
    decoder = with_controller(QUICK)
    decoder.draft(PROMPT, params=GREEDY)
    decoder.verify(PROMPT, plain(GREEDY)[:3], GREEDY)
    assert figures(decoder.adaptive) == figures(AdaptiveLookahead(QUICK))
    assert len(decoder.draft(PROMPT, 7, GREEDY).tokens) == 7, "an explicit k comes first"


def test_an_error_inside_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = with_controller(QUICK)

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine.target, "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            decoder.step(PROMPT, GREEDY)
    assert figures(decoder.adaptive) == figures(AdaptiveLookahead(QUICK))
    assert by_steps(decoder, GREEDY) == plain(GREEDY)


@pytest.mark.parametrize("other", [None, SLOW], ids=["none", "another"])
def test_the_controller_can_be_replaced_inside_a_sequence(other: AdaptiveConfig | None) -> None:
    decoder = with_controller(QUICK)
    former, text = decoder.adaptive, list(PROMPT)
    for _ in range(2):
        text += decoder.step(text, GREEDY, prompt_len=len(PROMPT)).emitted_tokens
    before = figures(former)
    decoder.adaptive = other and AdaptiveLookahead(other)
    result = decoder.step(text, GREEDY, prompt_len=len(PROMPT))
    assert len(result.draft_tokens) == (K if other is None else 6)
    assert figures(former) == before and before[2] == 2, "the former observes nothing more"
    assert decoder.adaptive is None or decoder.adaptive.observations == 1
    decoder.adaptive = former
    assert decoder.lookahead == before[0] and by_steps(decoder, GREEDY) == plain(GREEDY)


def test_another_policy_ends_with_the_sequence_so_far_and_comes_back() -> None:
    decoder, text = make(NGRAM, policy="shadow"), list(PROMPT)
    text += decoder.step(text, GREEDY, prompt_len=len(PROMPT)).emitted_tokens
    assert not unknown_to(decoder.engine)
    decoder.adaptive = AdaptiveLookahead(QUICK)
    assert unknown_to(decoder.engine) and decoder.stats.shadow["ngram"]["rounds"] == 1
    decoder.step(text, GREEDY, prompt_len=len(PROMPT))
    decoder.adaptive = None
    assert unknown_to(decoder.engine) and decoder.step(PROMPT, GREEDY).reason == "shadow"


WRONG = ["adaptive", 4, AdaptiveConfig(), AdaptiveLookahead, {"initial": 4}]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_anything_but_a_controller_is_refused_by_name(wrong: Any) -> None:
    decoder = with_controller(QUICK)
    before = decoder.adaptive
    with pytest.raises(
        InvalidParameter, match=r"^adaptive = .*: takes an AdaptiveLookahead or None$"
    ) as caught:
        decoder.adaptive = wrong
    assert caught.value.name == "adaptive" and caught.value.value is wrong and decoder.adaptive is before


ADAPTIVE = {"policy": "adaptive"}


@pytest.mark.parametrize(
    ("settings", "bounds", "lookahead", "fixed"),
    [
        pytest.param({}, None, K, K, id="fixed"),
        pytest.param({"num_speculative_tokens": None}, None, 4, 4, id="fixed, no number"),
        pytest.param({"policy": "goodput", "num_speculative_tokens": None}, None, 16, 16, id="goodput"),
        pytest.param({**ADAPTIVE, "num_speculative_tokens": None}, (5, 2, 12), 5, 4, id="adaptive"),
        pytest.param({**ADAPTIVE, "num_speculative_tokens": 3}, (3, 2, 3), 3, 3, id="adaptive, 3 at most"),
        pytest.param({**ADAPTIVE, "num_speculative_tokens": 1}, (1, 1, 1), 1, 1, id="adaptive, 1 at most"),
        pytest.param({**ADAPTIVE, "num_speculative_tokens": 0}, None, 0, 0, id="adaptive, none at all"),
        pytest.param(
            {**ADAPTIVE, "adaptive_initial": 7, "adaptive_max": 9},
            (4, 2, 4),
            4,
            4,
            id="adaptive, initial beyond K",
        ),
    ],
)
def test_the_settings_decide_whether_there_is_a_controller(
    settings: dict[str, Any], bounds: tuple[int, int, int] | None, lookahead: int, fixed: int
) -> None:
    decoder = make(**settings)
    config = decoder.adaptive and decoder.adaptive.config
    assert (config and (config.initial, config.min, config.max)) == bounds and decoder.lookahead == lookahead
    assert len(decoder.draft(PROMPT, params=GREEDY).tokens) == lookahead
    decoder.adaptive = None
    assert decoder.lookahead == fixed == len(decoder.draft(PROMPT, params=GREEDY).tokens)


@pytest.mark.parametrize("way", ["step", "generate"])
def test_the_number_of_the_settings_is_the_controllers_limit(way: str) -> None:
    decoder = make(policy="adaptive", num_speculative_tokens=3, adaptive_cooldown_steps=0)
    by_steps(decoder, GREEDY) if way == "step" else decoder.generate(PROMPT, GREEDY)
    assert len(decoder.stats.per_position) == 3 and decoder.acceptance_rate == 1.0


# a number that is set


@pytest.mark.parametrize("params", MODES)
@pytest.mark.parametrize("drafter", [SAME, OTHER, NGRAM, ("auto", 1)], ids=str)
def test_a_lookahead_that_changes_leaves_the_output(
    drafter: tuple[str, int | None], params: SamplingParams
) -> None:
    decoder, text, drafted = make(drafter), list(PROMPT), []
    for k in cycle([3, 0, 1, 9, 64, 2]):
        decoder.lookahead = k
        result = decoder.step(text, params, prompt_len=len(PROMPT))
        text += result.emitted_tokens
        drafted.append((k, len(result.draft_tokens)))
        if result.verdict.finish:
            break
    assert text[len(PROMPT) :] == plain(params)
    assert all(count <= k for k, count in drafted) and any(count for _, count in drafted)
    assert drafter != SAME or [count for _, count in drafted[:4]] == [3, 0, 1, 9]
    assert_nothing_held(decoder.engine)


@pytest.mark.parametrize("k", [0, 1, 7, 20])
def test_a_number_that_is_set_holds_for_every_call(k: int) -> None:
    decoder = make()
    decoder.lookahead = k
    assert decoder.lookahead == k == len(decoder.draft(PROMPT, params=GREEDY).tokens)
    assert decoder.generate(PROMPT, GREEDY).token_ids == plain(GREEDY)
    assert len(decoder.stats.per_position) == k
    decoder.reset_stats()
    assert decoder.lookahead == k == len(decoder.step(PROMPT, GREEDY).draft_tokens)


def test_zero_is_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, truth = make(), plain(GREEDY)
    decoder.lookahead = 0
    drafter = proposer_of(decoder.engine, "draft_model")
    monkeypatch.setattr(drafter, "propose", lambda *_: pytest.fail("nothing is to be drafted"))
    result = decoder.step(PROMPT, GREEDY)
    assert (result.draft_tokens, result.emitted_tokens, result.reason) == ((), (truth[0],), "off_request")
    assert by_steps(decoder, GREEDY) == truth and decoder.tokens_per_target_call == 1.0


def test_a_decoder_that_began_plainly_can_draft_later() -> None:
    decoder = make(num_speculative_tokens=0)
    assert decoder.lookahead == 0 and decoder.step(PROMPT, GREEDY).reason == "off_config"
    decoder.lookahead = 5
    assert decoder.step(PROMPT, GREEDY).accepted_tokens == tuple(plain(GREEDY)[:5])


@pytest.mark.parametrize("wrong", [-1, 65, 4.0, "4", None, True], ids=repr)
def test_a_wrong_number_is_refused_by_name(wrong: Any) -> None:
    decoder = make()
    with pytest.raises(InvalidParameter, match=r"^lookahead = .*: takes an int from 0 to 64$") as caught:
        decoder.lookahead = wrong
    assert caught.value.name == "lookahead" and decoder.lookahead == K


def test_with_a_controller_the_number_cannot_be_set() -> None:
    decoder = with_controller(QUICK)
    with pytest.raises(
        InvalidParameter, match="^lookahead = 4: the controller sets it; set adaptive = None first$"
    ):
        decoder.lookahead = 4
    assert decoder.lookahead == 3
    decoder.adaptive = None
    decoder.lookahead = 6
    assert len(decoder.step(PROMPT, GREEDY).draft_tokens) == 6


# k of one step


@pytest.mark.parametrize(("k", "drafted"), [(0, 0), (1, 1), (7, 7), (64, 29), (None, K)])
def test_a_step_takes_its_own_k(k: int | None, drafted: int) -> None:
    decoder = make()
    result = decoder.step(PROMPT, GREEDY, k=k)
    assert result.draft_tokens == result.accepted_tokens == tuple(plain(GREEDY)[:drafted])
    assert len(decoder.step(PROMPT, GREEDY).draft_tokens) == K == decoder.lookahead, "and only that one"


@pytest.mark.parametrize(("k", "drafted"), [(0, 0), (2, 2), (3, 3), (7, 3), (None, 3)])
def test_beside_a_controller_k_is_a_limit(k: int | None, drafted: int) -> None:
    decoder = with_controller(QUICK)
    assert len(decoder.step(PROMPT, GREEDY, k=k).draft_tokens) == drafted
    assert figures(decoder.adaptive)[2] == (drafted > 0)


@pytest.mark.parametrize("k", [-1, 65])
def test_a_wrong_k_is_refused_and_leaves_nothing(k: int) -> None:
    decoder = make()
    before = account(decoder)
    with pytest.raises(InvalidParameter, match=f"^num_speculative_tokens = {k}: "):
        decoder.step(PROMPT, GREEDY, k=k)
    assert account(decoder) == before
    assert_nothing_held(decoder.engine)
