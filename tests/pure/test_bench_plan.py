"""The plan of a benchmark: modes, workloads, sizes, and the order of its measurements."""

from __future__ import annotations

from collections import Counter

import pytest

from speculon.core.config import MAX_DRAFTS, USUAL_DRAFTS, RequestSpeculation, SamplingParams
from speculon.core.errors import InvalidParameter, UnknownMethod
from speculon.measure.bench.plan import AGAIN, MODES, BenchPlan, Mode, parse_mode
from speculon.measure.bench.run import alternate
from speculon.measure.bench.workloads import Case, groups_of, parse

FIXED_4 = {"method": "draft_model", "num_speculative_tokens": 4, "policy": "fixed"}


@pytest.mark.parametrize(
    ("text", "options", "policies"),  # the policy where the engine is set to goodput, and to adaptive
    [
        ("off", {"method": "off", "policy": "fixed"}, ("fixed", "fixed")),
        ("draft_model:4", FIXED_4, ("fixed", "fixed")),
        ("draft_model:4/rejection", {**FIXED_4, "acceptance": "rejection"}, ("fixed", "fixed")),
        ("auto", {"method": "auto"}, ("goodput", "adaptive")),
        ("auto/matching", {"method": "auto", "acceptance": "matching"}, ("goodput", "adaptive")),
        ("auto:8/solo", {"method": "auto", "num_speculative_tokens": 8, "policy": "solo"}, ("solo", "solo")),
        (
            "auto/goodput/rejection",
            {"method": "auto", "policy": "goodput", "acceptance": "rejection"},
            ("goodput", "goodput"),
        ),
    ],
)
def test_a_mode_is_a_method_with_a_number_a_policy_and_a_rule(
    text: str, options: dict[str, object], policies: tuple[str, str]
) -> None:
    mode = parse_mode(text)
    assert (mode.label, dict(mode.speculation)) == (text, options)
    assert (mode.policy("goodput"), mode.policy("adaptive")) == policies
    RequestSpeculation(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "ngram:0",
        f"ngram:{MAX_DRAFTS + 1}",
        "ngram:x",
        "ngram:4:4",
        f"ngram:{'9' * 5000}",
        ":4",
        "ngram/random",
        "ngram//fixed",
        "ngram/fixed:4",
        "ngram:4/matching/matching",
        "ngram/rejection/fixed",
        "auto+adaptive",
    ],
)
def test_a_mode_that_is_none_is_named_with_the_form(text: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        BenchPlan(modes=(text,))
    assert (error.value.name, error.value.value) == ("modes", text)
    form = f"must be METHOD[:K][/POLICY][/RULE]: K is from 1 to {MAX_DRAFTS}"
    policies = f"policies are {', '.join(USUAL_DRAFTS)}, rules matching, rejection, block"
    assert f"{form}, {policies}" in str(error.value)


@pytest.mark.parametrize("text", ["off:4", "off/matching", "off/fixed"])
def test_plain_decoding_has_neither_a_number_nor_a_policy_nor_a_rule(text: str) -> None:
    with pytest.raises(
        InvalidParameter, match=f"modes = '{text}': off must have neither K nor a policy nor a rule"
    ):
        BenchPlan(modes=(text,))


def test_plain_decoding_runs_under_no_policy_that_learns() -> None:
    every = {mode.label: mode for mode in BenchPlan().compared}
    assert {every[label].policy("goodput") for label in ("off", AGAIN)} == {"fixed"}
    assert every["off"].speculation == every[AGAIN].speculation == {"method": "off", "policy": "fixed"}
    learning = [label for label, mode in every.items() if mode.policy("goodput") != "fixed"]
    assert learning == ["auto/adaptive", "auto:8/solo", "auto"]


@pytest.mark.parametrize(
    ("text", "temperature"),
    [
        ("code", 0),
        ("prose@0.7", 0.7),
        ("mixed", None),
        ("mixed@1", 1),
        ("warm", 0),
    ],
)
def test_a_workload_has_a_temperature(text: str, temperature: float | None) -> None:
    assert parse(text)[1] == temperature


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("poems@1", "workloads = 'poems@1': must be one of code, edit, prose, mixed, warm"),
        ("prose@", "NAME@TEMPERATURE"),
        ("prose@warm", "NAME@TEMPERATURE"),
        ("prose@-1", r"temperature = -1.0: .*greater than or equal to 0"),
        ("prose@nan", "temperature = nan"),
    ],
)
def test_a_temperature_that_cannot_be(text: str, message: str) -> None:
    with pytest.raises(InvalidParameter, match=message):
        BenchPlan(workloads=(text,))


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"modes": ("zzz:4",)}, UnknownMethod),
        ({"workloads": ("poems",)}, InvalidParameter),
        ({"workloads": ()}, InvalidParameter),
        ({"prompts": 4}, InvalidParameter),  # fewer than the 8 at once
        ({"concurrency": (0,)}, InvalidParameter),
        ({"repeats": 0}, InvalidParameter),
        ({"modes": ("ngram:4", "ngram:4")}, InvalidParameter),
        ({"max_tokens": 0}, InvalidParameter),
        ({"prompts": 15}, InvalidParameter),  # 8 users with two edits each
    ],
)
def test_a_plan_that_cannot_be(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        BenchPlan(**fields)  # type: ignore[arg-type]


def followers(blocks: list[str]) -> Counter[str]:
    return Counter(block[i : i + 2] for block in blocks for i in range(len(block) - 1))


@pytest.mark.parametrize("n", [2, 3, 8, 11])
def test_every_mode_follows_every_other_one_equally_often(n: int) -> None:
    rows = 2 * n if n % 2 else n
    labels = "abcdefghijk"[:n]
    order = [mode.label for _, _, mode in alternate(1, rows, [Mode(label) for label in labels])]
    blocks = ["".join(order[i : i + n]) for i in range(0, len(order), n)]
    assert all(sorted(block) == list(labels) for block in blocks)
    found = followers(blocks)
    assert len(found) == n * (n - 1) and set(found.values()) == {rows // n}
    assert Counter(block[0] for block in blocks) == dict.fromkeys(labels, rows // n)
    assert n < 4 or max(followers(blocks[:4]).values()) <= 2  # from the first rows on


def test_a_planted_rotation_is_seen_to_let_the_same_one_follow() -> None:
    assert followers(["abc", "bca", "cab"]) == {"ab": 2, "bc": 2, "ca": 2}


def test_the_bar_knows_how_many_measurements_there_will_be() -> None:
    plan = BenchPlan(
        workloads=("code", "prose"), modes=("ngram:4",), concurrency=(1, 4), prompts=10, repeats=2
    )
    assert plan.measurements == 2 * (3 * (1 + 2 * 10) + 3 * (1 + 2 * 2))


@pytest.mark.parametrize("prompts", [16, 33])
def test_users_of_a_loop_are_written_side_by_side_and_their_edits_one_after_the_other(prompts: int) -> None:
    plan = BenchPlan(workloads=("warm",), prompts=prompts, repeats=1)
    edits = plan.size(context=1000).edits
    cases = [Case(f"{i % edits}", [1], SamplingParams(), user=f"user {i // edits}") for i in range(prompts)]
    for concurrency in plan.concurrency:
        groups = groups_of(cases, concurrency)
        assert len(groups) == plan.groups("warm", concurrency) >= 2
        assert all(
            len({case.user for case in group}) == concurrency and len({case.name for case in group}) == 1
            for group in groups
        )
        for user in {case.user for case in cases}:
            mine = [case.name for group in groups for case in group if case.user == user]
            assert mine in ([], [str(i) for i in range(edits)])


def test_cases_without_a_user_are_taken_as_they_come() -> None:
    cases = [Case(name, [1], SamplingParams()) for name in "abcde"]
    assert [[case.name for case in group] for group in groups_of(cases, 2)] == [["a", "b"], ["c", "d"]]


def test_the_usual_modes_are_those_that_something_drafts_for() -> None:
    lacking = {"draft_model": "no_drafter"}.get
    assert BenchPlan().at_hand(lambda method: None) == BenchPlan()
    assert BenchPlan().at_hand(lacking).modes == tuple(mode for mode in MODES if "draft_model" not in mode)
    assert "draft_model:4" in MODES
