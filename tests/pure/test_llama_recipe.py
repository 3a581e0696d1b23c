"""The comparison with llama-server: ratios of pairs, texts that differ, modes that never drafted, streams."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from recipes.llama.figures import AUTO, OFF, OURS, THEIRS, Line, Turn, lines, markdown, never_drafted
from recipes.llama.servers import DRAFT_TYPES, TYPES, Text, our_flags, read_stream, their_flags

LOOKUP = "ngram-simple"


def turn(engine: str, mode: str, seconds: float = 1.0, **changes: Any) -> Turn:
    fields: dict[str, Any] = {
        "workload": "edit",
        "concurrency": 1,
        "repeat": 0,
        "group": 0,
        "tokens": ["a text"],
        "drafted": 0,
        "accepted": 0,
        "written": 12,
        "prompt_tokens": 100,
        "first": [0.5],
    }
    return Turn(engine=engine, mode=mode, seconds=seconds, **{**fields, **changes})


def line_of(engine: str, mode: str, turns: list[Turn]) -> Line:
    (found,) = (one for one in lines(turns) if (one.engine, one.mode) == (engine, mode))
    return found


def four_modes(repeat: int, theirs: float, lookup: float, off: float, auto: float) -> list[Turn]:
    """One repeat, with the seconds of each mode."""
    return [
        turn(THEIRS, OFF, theirs, repeat=repeat),
        turn(THEIRS, LOOKUP, lookup, repeat=repeat, drafted=8, accepted=6),
        turn(OURS, OFF, off, repeat=repeat),
        turn(OURS, AUTO, auto, repeat=repeat, drafted=10, accepted=9),
    ]


def test_ratios_are_medians_of_pairs_of_one_repeat():
    # in the third repeat the machine was slow, which the median of the pairs does not show
    turns = [*four_modes(0, 4, 2, 6, 1), *four_modes(1, 4, 2, 6, 1), *four_modes(2, 400, 200, 600, 200)]
    found = line_of(OURS, AUTO, turns)
    assert (found.to_stock, found.to_fastest, found.to_ours) == (4.0, 2.0, 6.0)
    assert found.tokens_per_second == pytest.approx(36 / 202)
    assert (found.drafted, found.accepted) == (30, 27)
    assert line_of(OURS, OFF, turns).to_stock == pytest.approx(4 / 6)


def test_the_fastest_of_theirs_may_be_plain_decoding():
    assert line_of(OURS, AUTO, four_modes(0, 2, 4, 6, 1)).to_fastest == 2.0


def test_cells_are_apart_and_ordered():
    edit = [turn(OURS, OFF), turn(THEIRS, OFF, 2)]
    code = [turn(THEIRS, OFF, workload="code"), turn(OURS, OFF, 4, workload="code")]
    found = [(one.workload, one.engine, one.to_stock) for one in lines([*edit, *code])]
    assert found == [("edit", THEIRS, 1), ("edit", OURS, 2), ("code", THEIRS, 1), ("code", OURS, 0.25)]


def test_a_prompt_is_measured_by_its_first_token():
    found = line_of(THEIRS, OFF, [turn(THEIRS, OFF, prompt_tokens=1500, first=[0.5])])
    assert (found.first_ms, found.prompt_per_second) == (500, 3000)
    at_once = turn(THEIRS, OFF, concurrency=2, first=[0.5, 1.5], tokens=["a", "b"])
    found = line_of(THEIRS, OFF, [at_once])
    assert (found.first_ms, found.prompt_per_second) == (1000, None)


def test_a_planted_wrong_text_is_counted():
    turns = four_modes(0, 1, 1, 1, 1)
    assert [one.different for one in lines(turns)] == [0, 0, 0, 0]
    turns[3] = turn(OURS, AUTO, tokens=["another text"])
    assert [one.different for one in lines(turns)] == [0, 0, 0, 1]


def test_a_mode_that_never_drafted_is_named():
    turns = four_modes(0, 1, 1, 1, 1)
    quiet = turn(OURS, AUTO)
    assert never_drafted(lines([*turns[:3], quiet])) == ["speculon auto"]
    assert "drafted nothing in the whole run: speculon auto" in markdown("title", lines([*turns[:3], quiet]))
    # in one cell alone it may: nothing was found there, or drafts did not pay
    elsewhere = [turn(THEIRS, OFF, workload="qa"), turn(OURS, AUTO, workload="qa")]
    assert never_drafted(lines([*turns, *elsewhere])) == []


def test_the_table_has_what_was_measured():
    table = markdown("title", lines(four_modes(0, 4, 2, 6, 1)))
    assert "## edit, one at a time" in table
    assert "| speculon | auto | 12.0 | 500 | 200 | 4.00 | 2.00 | 6.00 | 90% of 10 | 0 of 1 |" in table
    assert "| speculon | off | 2.0 | 500 | 200 | 0.67 | 0.33 | 1.00 |  | 0 of 1 |" in table


# streams

CHOICES = [[{"text": "", "finish_reason": None}], [{"text": "Hé", "finish_reason": None}]]


def stream(*chunks: dict[str, Any]) -> list[tuple[float, bytes]]:
    return [(float(at), json.dumps(chunk).encode()) for at, chunk in enumerate(chunks, 1)]


def test_their_stream_counts_the_stop_token():
    end = {"choices": [{"text": "", "finish_reason": "stop"}], "usage": {"completion_tokens": 3}}
    drafts = {"timings": {"predicted_n": 3, "draft_n": 4, "draft_n_accepted": 1}}
    found = read_stream(THEIRS, stream(*({"choices": some} for some in CHOICES), {**end, **drafts}))
    assert found == Text("Hé", tokens=2, seconds=3.0, first=2.0, drafted=4, accepted=1)
    found = read_stream(THEIRS, stream({**end, "choices": [{"text": "x", "finish_reason": "length"}]}))
    assert found == Text("x", tokens=3, seconds=1.0, first=1.0, drafted=0, accepted=0)


def test_our_stream_ends_with_usage_and_drafts():
    end = {"choices": [{"text": "llo\ufffd", "finish_reason": "length"}], "usage": None}
    last = {"choices": [], "usage": {"completion_tokens": 3}, "speculation": {"drafted": 4, "accepted": 1}}
    found = read_stream(OURS, stream(*({"choices": some, "usage": None} for some in CHOICES), end, last))
    assert found == Text("Héllo", tokens=3, seconds=4.0, first=2.0, drafted=4, accepted=1)


@pytest.mark.parametrize("planted", [{"error": {"message": "no"}}, {"choices": CHOICES[1]}])
def test_a_stream_that_breaks_is_no_text(planted: dict[str, Any]):
    with pytest.raises(RuntimeError):
        read_stream(OURS, stream(planted))


# servers


@pytest.mark.parametrize("mode", [OFF, *TYPES, *DRAFT_TYPES])
def test_both_servers_get_the_same_settings(mode: str):
    args = Namespace(
        server=Path("llama-server"),
        draft=Path("draft.gguf"),
        threads=2,
        sequences=8,
        context=2048,
        kv_cache_type="f16",
        kv_memory_gb=0.5,
        flash_attention="auto",
    )
    theirs, ours = (list(map(str, flags(mode, args))) for flags in (their_flags, our_flags))
    assert value(theirs, "--parallel") == value(ours, "--max-num-seqs") == "8"
    assert int(value(theirs, "--ctx-size")) == 8 * int(value(ours, "--max-context"))
    assert (
        value(theirs, "--cache-type-k") == value(theirs, "--cache-type-v") == value(ours, "--kv-cache-type")
    )
    assert value(theirs, "--flash-attn") == value(ours, "--flash-attention")
    assert {"--no-kv-unified", "--no-cache-prompt"} <= {*theirs} and "--no-prefix-cache" in ours
    assert ("--spec-type" in theirs) == (mode != OFF)
    assert ("--spec-draft-model" in theirs) == (mode in DRAFT_TYPES)
    assert ("--draft" in ours) == (mode != OFF)


def value(flags: list[str], name: str) -> str:
    return flags[flags.index(name) + 1]
