"""What a benchmark computes, without a model: plans, order, tables, loops."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from rich.console import Console

from speculon.bench.cell import Cell, ms_by_rows, overhead, per_text, profile, without_loops
from speculon.bench.measure import Measurement, Step, loops
from speculon.bench.plan import AGAIN, TRANSFORMERS, BenchPlan, Mode, parse_mode
from speculon.bench.plan import MODES as MODES_ASKED
from speculon.bench.quantiles import quartiles
from speculon.bench.rounds import (
    Requirement,
    RoundCosts,
    equal_acceptance,
    mean_step_ms,
    needs,
    reached,
    rounds_of,
)
from speculon.bench.run import alternate
from speculon.bench.tables import (
    accepted,
    by_cell,
    figures,
    markdown,
    notes,
    profile_markdown,
    profile_table,
    rounds_markdown,
    table,
)
from speculon.bench.workloads import Case, parse, side_by_side
from speculon.config import MAX_DRAFTS, USUAL_DRAFTS, RequestSpeculation, SamplingParams
from speculon.core import Decision, Draft, SpanKind, Verdict
from speculon.errors import InvalidParameter, UnknownMethod
from speculon.telemetry import PARTS, RequestStats

ROUNDS = RoundCosts(
    90, 12.5, draft=0.4, target=0.55, rest=0.05, draft_ms_per_position=1.25, tokens_per_target_call=2.5
)
NO_ROUNDS: dict[str, object] = {
    "per_position": [],
    "sources": {},
    "rounds": None,
    "reached": None,
    "needed": [],
}


def make_cell(mode: str = "ngram:4", **fields: object) -> Cell:
    defaults: dict[str, object] = {
        "workload": "code",
        "concurrency": 1,
        "mode": mode,
        "policy": "fixed",
        "texts": 8,
        "tokens": 512,
        "tokens_per_second": 200.0,
        "decode_tokens_per_second": 210.0,
        "ratio": 2.0,
        "ratio_quartiles": (1.5, 2.5),
        "decode_ratio": 2.1,
        "ratio_without_loops": 1.8,
        "texts_without_loops": 6,
        "tokens_per_target_call": 2.5,
        "acceptance_rate": 0.5,
        "per_position": [0.8, 0.5],
        "sources": {"ngram": 1.0},
        "rejection": False,
        "rounds": ROUNDS,
        "reached": 0.75,
        "needed": [Requirement(1.0, 1.25, 0.2071), Requirement(1.5, 1.875, 0.5), Requirement(2.0, 3.5, None)],
        "ms_by_rows": {1: (5.0, 10), 3: (6.0, 30), 5: (7.0, 90)},
        "profile": dict(zip(PARTS, (0.1, 0.0, 1.2, 8.3, 0.3, 0.0, 0.1), strict=True)),
        "overhead": 0.05,
        "looping": 0.25,
        "exact": None,
        "different": 0,
        "tie_nats": [],
        "reasons": {"no_match": 3},
        "diagnosis": None if mode in ("off", AGAIN, TRANSFORMERS) else "pays",
        "per_repeat": [200.0, 200.0],
        "speeds": [[200.0, 200.0], [200.0, 200.0]],
    }
    return Cell(**(defaults | fields))  # type: ignore[arg-type]


LOOP = [*range(100), *list(range(20)) * 3]


@pytest.mark.parametrize(
    ("tokens", "answer"),
    [
        pytest.param([], False, id="nothing"),
        pytest.param(list(range(200)), False, id="no repetition"),
        pytest.param(LOOP, True, id="a period of 20"),
        pytest.param([7] * 17, True, id="the shortest loop there is: 16 twice, one apart"),
        pytest.param([7] * 16, False, id="16 once"),
        pytest.param([*range(16), *range(50, 82), *range(16)], True, id="within 64"),
        pytest.param([*range(16), *range(50, 83), *range(16)], False, id="one token too far apart"),
        pytest.param([*LOOP, *range(200, 264)], False, id="a loop it got out of"),
        pytest.param([*range(100, 115), 0, *range(100, 115), 1], False, id="15 in a row"),
    ],
)
def test_loops(tokens: list[int], answer: bool) -> None:
    assert loops(tokens) is answer


FIXED_4 = {"method": "draft_model", "num_speculative_tokens": 4, "policy": "fixed"}


@pytest.mark.parametrize(
    ("text", "asked", "policies"),  # the policy where the engine is set to goodput, and to adaptive
    [
        ("off", {"method": "off", "policy": "fixed"}, ("fixed", "fixed")),
        ("draft_model:4", FIXED_4, ("fixed", "fixed")),
        ("draft_model:4/fixed", FIXED_4, ("fixed", "fixed")),
        ("draft_model:4/rejection", {**FIXED_4, "acceptance": "rejection"}, ("fixed", "fixed")),
        ("auto", {"method": "auto"}, ("goodput", "adaptive")),
        ("auto/matching", {"method": "auto", "acceptance": "matching"}, ("goodput", "adaptive")),
        ("auto/solo", {"method": "auto", "policy": "solo"}, ("solo", "solo")),
        ("auto:8/solo", {"method": "auto", "num_speculative_tokens": 8, "policy": "solo"}, ("solo", "solo")),
        (
            "auto/goodput/rejection",
            {"method": "auto", "policy": "goodput", "acceptance": "rejection"},
            ("goodput", "goodput"),
        ),
        ("suffix/fixed", {"method": "suffix", "policy": "fixed"}, ("fixed", "fixed")),
    ],
)
def test_a_mode_is_a_method_with_a_number_a_policy_and_a_rule(
    text: str, asked: dict[str, object], policies: tuple[str, str]
) -> None:
    mode = parse_mode(text)
    assert (mode.label, dict(mode.speculation)) == (text, asked)
    assert (mode.policy("goodput"), mode.policy("adaptive")) == policies
    RequestSpeculation(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", USUAL_DRAFTS)
def test_a_mode_may_name_any_policy_there_is(policy: str) -> None:
    # K is the policy's own
    assert parse_mode(f"auto/{policy}").speculation == {"method": "auto", "policy": policy}
    whole = {
        "method": "draft_model",
        "num_speculative_tokens": 4,
        "policy": policy,
        "acceptance": "rejection",
    }
    assert parse_mode(f"draft_model:4/{policy}/rejection").speculation == whole


@pytest.mark.parametrize(
    "text",
    [
        "ngram:",
        "ngram:0",
        f"ngram:{MAX_DRAFTS + 1}",
        "ngram:x",
        "ngram:-1",
        "ngram:4:4",
        f"ngram:{'9' * 5000}",
        ":4",
        "/fixed",
    ]
    + [
        "ngram/luck",
        "ngram/",
        "ngram:4/",
        "ngram//fixed",
        "ngram/fixed:4",
        "ngram:4/matching/x",
        "ngram:4/matching/matching",
    ]
    + ["ngram/rejection/fixed", "auto/solo/adaptive", "auto+adaptive", "auto:8+solo", "auto+auto"],
)
def test_a_mode_that_is_none_is_named_with_the_form(text: str) -> None:
    with pytest.raises(InvalidParameter) as error:
        BenchPlan(modes=(text,))
    assert (error.value.name, error.value.value) == ("modes", text)
    form = f"is not METHOD[:K][/POLICY][/RULE]: K goes from 1 to {MAX_DRAFTS}, policies are {', '.join(USUAL_DRAFTS)}, rules "
    assert form + "matching, rejection" in str(error.value)


@pytest.mark.parametrize("text", ["off:4", "off/matching", "off/fixed", "off:4/fixed"])
def test_plain_decoding_has_neither_a_number_nor_a_policy_nor_a_rule(text: str) -> None:
    with pytest.raises(
        InvalidParameter, match=f"modes = '{text}': off has neither K nor a policy nor a rule"
    ):
        BenchPlan(modes=(text,))


def test_plain_decoding_runs_under_no_policy_that_learns() -> None:
    every = {mode.label: mode for mode in BenchPlan(with_transformers=True).modes_of("code", 1)}
    assert {every[label].policy("goodput") for label in ("off", AGAIN, TRANSFORMERS)} == {"fixed"}
    assert every["off"].speculation == every[AGAIN].speculation == {"method": "off", "policy": "fixed"}
    learning = [label for label, mode in every.items() if mode.policy("goodput") != "fixed"]
    assert learning == ["auto/adaptive", "auto:8/solo", "auto"]


@pytest.mark.parametrize(
    ("text", "temperature"),
    [
        ("code", 0),
        ("prose", 1),
        ("prose@0.7", 0.7),
        ("code@1", 1),
        ("prose@0", 0),
        ("mixed", None),
        ("mixed@1", 1),
        ("warm", 0),
    ],
)
def test_a_workload_has_a_temperature(text: str, temperature: float | None) -> None:
    assert parse(text)[1] == temperature


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("poems@1", "workloads = 'poems@1': known are code, edit, prose, mixed, warm"),
        ("prose@", "NAME@TEMPERATURE"),
        ("prose@warm", "NAME@TEMPERATURE"),
        ("prose@-1", r"temperature = -1.0: .*greater than or equal to 0"),
        ("prose@nan", "temperature = nan"),
    ],
)
def test_a_temperature_that_cannot_be(text: str, said: str) -> None:
    with pytest.raises(InvalidParameter, match=said):
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
        ({"widen": 0}, InvalidParameter),
        ({"max_tokens": 0}, InvalidParameter),
        ({"prompts": 15}, InvalidParameter),  # 8 users with two edits each
    ],
)
def test_a_plan_that_cannot_be(fields: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        BenchPlan(**fields)  # type: ignore[arg-type]


def test_plain_decoding_is_measured_twice_and_transformers_only_where_it_does_the_same() -> None:
    plan = BenchPlan(modes=("ngram:4",), with_transformers=True)
    assert [mode.label for mode in plan.modes_of("code", 1)] == ["off", "ngram:4", TRANSFORMERS, AGAIN]
    assert [mode.label for mode in plan.modes_of("code", 8)] == ["off", "ngram:4", AGAIN]
    assert [mode.label for mode in plan.modes_of("prose", 1)] == ["off", "ngram:4", AGAIN]
    assert [mode.label for mode in plan.modes_of("prose@0", 1)] == ["off", "ngram:4", TRANSFORMERS, AGAIN]
    assert [mode.label for mode in plan.modes_of("code@1", 1)] == ["off", "ngram:4", AGAIN]
    assert [mode.speculates for mode in plan.modes_of("code", 1)] == [False, True, False, False]


def test_modes_alternate_and_nobody_is_always_first() -> None:
    modes = [Mode("a"), Mode("b"), Mode("c")]
    order = [(repeat, group, mode.label) for repeat, group, mode in alternate(2, 3, modes)]
    assert len(set(order)) == len(order) == 18
    blocks = ["".join(label for _, _, label in order[i : i + 3]) for i in range(0, 18, 3)]
    assert blocks == ["acb", "bac", "cba", "bca", "cab", "abc"]


def followers(blocks: list[str]) -> Counter[str]:
    return Counter(block[i : i + 2] for block in blocks for i in range(len(block) - 1))


@pytest.mark.parametrize("n", range(2, 12))
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


@pytest.mark.parametrize("prompts", [16, 30, 33, 40])
def test_users_of_a_loop_are_written_side_by_side_and_their_edits_one_after_the_other(prompts: int) -> None:
    plan = BenchPlan(workloads=("warm",), prompts=prompts, repeats=1)
    edits = plan.size(context=1000).edits
    cases = [Case(f"{i % edits}", [1], SamplingParams(), user=f"user {i // edits}") for i in range(prompts)]
    for crowd in plan.concurrency:
        groups = side_by_side(cases, crowd)
        assert len(groups) == plan.groups("warm", crowd) >= 2
        assert all(
            len({case.user for case in group}) == crowd and len({case.name for case in group}) == 1
            for group in groups
        )
        for user in {case.user for case in cases}:
            mine = [case.name for group in groups for case in group if case.user == user]
            assert mine in ([], [str(i) for i in range(edits)])


def test_cases_without_a_user_are_taken_as_they_come() -> None:
    cases = [Case(name, [1], SamplingParams()) for name in "abcde"]
    assert [[case.name for case in group] for group in side_by_side(cases, 2)] == [["a", "b"], ["c", "d"]]


def test_the_usual_modes_are_those_that_something_drafts_for() -> None:
    lacking = {"draft_model": "no_drafter"}.get
    assert BenchPlan().at_hand(lambda method: None) == BenchPlan()
    assert BenchPlan().at_hand(lacking).modes == tuple(
        mode for mode in MODES_ASKED if "draft_model" not in mode
    )
    assert "draft_model:4" in MODES_ASKED


def test_quartiles() -> None:
    assert quartiles([5.0]) == (5.0, 5.0)
    assert quartiles([4.0, 1.0, 3.0, 2.0, 5.0]) == (2.0, 4.0)


def timed(draft: float, forward: float, step: float) -> dict[str, float]:
    """The profile of a step; what is left is the settling."""
    return dict.fromkeys(PARTS, 0.0) | {
        "propose": draft,
        "forward": forward,
        "settle": step - draft - forward,
    }


def test_steps_with_prompt_tokens_do_not_count_as_decoding() -> None:
    steps = [
        Step(100, 1, 1, False, timed(0, 90, 100)),
        Step(1, 1, 1, True, timed(0.5, 4, 5)),
        Step(5, 1, 3, True, timed(1, 7, 10)),
        Step(5, 1, 2, True, timed(1, 6, 10)),
    ]
    one = Measurement(0.5, [list(range(7))], [""], steps=steps)
    assert one.tokens_per_second == 14
    assert one.decode_tokens_per_second == pytest.approx(6 / 0.025)
    assert ms_by_rows([one]) == {1: (4, 1), 5: (6.5, 2)}
    assert overhead([one]) == pytest.approx((25 - 17 - 2.5) / 25)
    assert profile([one]) == pytest.approx(timed(2.5 / 3, 17 / 3, 25 / 3))
    assert profile([]) == per_text([]) == {} and overhead([]) is None
    pair = Measurement(
        0.5,
        [[1], [2]],
        [""],
        steps=[Step(2, 2, 2, True, timed(1, 6, 8)), Step(1, 1, 1, True, timed(1, 6, 7))],
    )
    # of three, whose last had no other beside it
    assert per_text([pair]) == pytest.approx(timed(2 / 3, 4, 5))
    assert Measurement(0.5, [[1]], [""]).decode_tokens_per_second is None


def test_the_split_of_a_round_is_that_of_the_calls_that_verified_drafts() -> None:
    steps = [
        Step(100, 2, 2, False, timed(5, 90, 100)),
        Step(2, 2, 2, True, timed(9, 4, 15)),  # nothing guessed: none of its time counts
        Step(7, 2, 3, True, timed(3, 12, 16)),  # one text with 4 guesses, one with 1
        Step(5, 2, 5, True, timed(1, 20, 24)),
    ]
    one = Measurement(0.5, [[1], [2]], ["", ""], steps=steps)
    found = rounds_of([one])
    assert found is not None
    assert (found.calls, found.step_ms, found.draft_ms_per_position, found.tokens_per_target_call) == (
        2,
        20,
        4 / 8,
        8 / 4,
    )
    assert (found.draft, found.target, found.rest) == pytest.approx((4 / 40, 32 / 40, 4 / 40))
    assert mean_step_ms([one]) == pytest.approx(55 / 3)
    assert rounds_of([Measurement(0.5, [[1]], [""], steps=steps[:2])]) is None
    assert mean_step_ms([Measurement(0.5, [[1]], [""], steps=steps[:1])]) is None


@pytest.mark.parametrize(
    ("tokens", "k", "a"),
    [
        (1.5, 1, 0.5),
        (1.75, 2, 0.5),
        (1 + 0.9 + 0.81 + 0.729, 3, 0.9),
        (5.0, 4, 1.0),
        (1.0, 4, 0.0),
        (0.4, 4, 0.0),
    ],
)
def test_the_acceptance_that_a_number_of_tokens_needs(tokens: float, k: int, a: float) -> None:
    assert equal_acceptance(tokens, k) == pytest.approx(a, abs=1e-9)


def test_more_than_every_draft_and_the_bonus_is_impossible() -> None:
    assert equal_acceptance(5.001, 4) is None


def test_what_a_round_must_bring_follows_from_its_cost() -> None:
    needed = needs(ROUNDS, plain_ms=10.0, k=2)
    assert [(need.speed, need.tokens_per_target_call) for need in needed] == [
        (1.0, 1.25),
        (1.5, 1.875),
        (2.0, 2.5),
    ]
    assert [need.acceptance for need in needed] == pytest.approx(
        [(2**0.5 - 1) / 2, (4.5**0.5 - 1) / 2, (7**0.5 - 1) / 2]
    )
    assert [need.acceptance is None for need in needs(ROUNDS, plain_ms=6.0, k=2)] == [False, True, True]


def test_acceptance_is_counted_over_the_drafts_that_were_reached() -> None:
    stats = RequestStats()
    rounds = [
        (4, SpanKind.FULL),
        (3, SpanKind.TAIL),
        (0, SpanKind.EARLY),
        (2, SpanKind.STOP),
        (1, SpanKind.EARLY_STOP),
    ]
    for accepted_drafts, kind in rounds:
        draft = Draft((1, 2, 3, 4), ("ngram",) * 4)
        stats.record(
            Decision("ngram", 4), draft, Verdict(tuple(range(accepted_drafts + 1)), accepted_drafts, kind)
        )
    done = stats.speculation()
    assert done is not None and reached(done) == 10 / 13


def written(seconds: float, *texts: list[int], text: str = "") -> Measurement:
    return Measurement(seconds, list(texts), [text] * len(texts))


def test_loops_do_not_count_where_they_flatter() -> None:
    cases = [Case(name, [1], SamplingParams(), "right") for name in "abc"]
    free = list(range(100))
    plain = [[written(1.0, free), written(1.0, LOOP), written(1.0, LOOP, text="right")]] * 2
    fast = [[written(0.5, free), written(0.01, LOOP), written(0.25, LOOP, text="right")]] * 2
    assert without_loops(fast, plain, cases) == {0: [2, 2], 2: [4, 4]}  # a right answer is no loop
    sampled = [[written(0.5, LOOP), *fast[0][1:]]] * 2  # another text than plain's: either may loop
    assert without_loops(sampled, plain, cases) == {2: [4, 4]}


def test_a_ratio_without_loops_needs_texts_written_alone() -> None:
    cases = [Case(name, [1], SamplingParams()) for name in "ab"]
    crowd = [[written(1.0, [1, 2], [3, 4])]]
    assert without_loops(crowd, crowd, cases) == {}


def test_tables_say_what_differs() -> None:
    assert [figures(cell)[6] for cell in (make_cell("off"), make_cell(), make_cell(different=1))] == [
        "-",
        "all",
        "15/16",
    ]
    assert notes(make_cell("off", **NO_ROUNDS)) == []
    assert notes(make_cell(different=1, tie_nats=[2e-6])) == [
        "ngram:4: 80 50 % of the drafts at positions 1 to 2 accepted; accepted tokens from ngram 100%",
        "ngram:4: a round that drafts takes 12.5 ms: drafting 40% (1.25 ms a position), target 55%, rest 5%",
        "ngram:4: needed tok/call (acceptance): 1.25 (21%) for 1x, 1.88 (50%) for 1.5x, 3.50 (impossible) "
        "for 2x; "
        "found 2.50 (75%)",
        "ngram:4: 1 of 16 texts differ from those of off; where greedy ones part, the candidates are at most "
        "2e-06 nat apart",
    ]
    assert accepted(make_cell(per_position=[])) == "-"


def test_where_a_steps_time_goes_is_shown_in_shares_that_add_up() -> None:
    cells = [make_cell("off"), make_cell(), make_cell(TRANSFORMERS, profile={})]
    head, _, *rows = profile_markdown(cells).splitlines()
    assert len(rows) == 2 and all(part in head for part in PARTS)
    assert "| code | 1 | ngram:4 | 10.00 | 1.0% | 0.0% | 12.0% | 83.0% | 3.0% | 0.0% | 1.0% |" in rows
    assert profile_table(cells).row_count == 2
    assert Console(width=100).measure(profile_table(cells)).minimum <= 100


def test_the_markdown_table_has_a_row_per_cell_and_no_ragged_one() -> None:
    lines = markdown([make_cell("off"), make_cell(), make_cell(AGAIN, ratio=0.99)]).splitlines()
    assert len(lines) == 5
    assert len({line.count("|") for line in lines}) == 1
    assert "| 2.00 | 1.80 (6) | 2.50 | 6.0 (3) 7.0 (5) | 5.0% | all | - | 25% | pays |" in lines[3]
    assert "| 25% | - |" in lines[2]


def test_a_rule_that_may_write_other_texts_is_named() -> None:
    said = notes(make_cell("draft_model:4/rejection", different=5, rejection=True))[-1]
    assert said.endswith(
        "5 of 16 texts differ from those of off, as rejection may: the distribution is the same"
    )


def test_the_table_of_rounds_has_a_row_per_mode_that_drafted() -> None:
    crowd = make_cell("auto:4", concurrency=8, needed=[], sources={"ngram": 0.25, "draft_model": 0.75})
    lines = rounds_markdown([make_cell("off", **NO_ROUNDS), make_cell(), crowd]).splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert lines[2].endswith(
        "| 12.5 | 40% | 55% | 5% | 1.25 | 2.50 (75%) | 1.25 (21%) | 1.88 (50%) | 3.50 (impossible) | ngram "
        "100% |"
    )
    assert lines[3].endswith("| 2.50 (75%) | - | - | - | ngram 25%, draft_model 75% |")


def test_a_ratio_without_loops_is_shown_only_where_there_is_one() -> None:
    assert [
        figures(cell)[2] for cell in (make_cell(), make_cell(ratio_without_loops=None, texts_without_loops=0))
    ] == [
        "1.80 (6)",
        "-",
    ]


def test_the_terminal_has_a_table_per_workload_and_crowd() -> None:
    cells = [
        make_cell(mode, concurrency=count) for count in (1, 8) for mode in ("off", "draft_model:4/rejection")
    ]
    tables = [table(some) for some in by_cell(cells)]
    assert [made.title for made in tables] == ["code, one at a time", "code, 8 at once"]
    assert [made.row_count for made in tables] == [2, 2]
    screen = Console(width=80, file=StringIO())
    screen.print(
        tables[1], table([make_cell("off"), make_cell("ngram:4", diagnosis="gated: low_acceptance")])
    )
    said = screen.file.getvalue()  # type: ignore[attr-defined]
    assert said.count("diagnosis") == 2 and "pays" in said and "low_acceptance" in said and "…" not in said
