"""The comparison with other engines: pairs, texts that differ, modes that did not speculate, and the loop of
a worker.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from recipes.peers.figures import Record, Row, cut, row

ENGINES = Path(__file__).parents[2] / "recipes/peers/engines"
STOCK, OURS = ("transformers", "off"), ("speculon", "off")
PLAIN = Record("code", 1, 0, 0, "speculon", "off", 2.0, [[1, 2, 3, 4]], drafted=0, accepted=0, calls=4)
NGRAM = replace(PLAIN, engine="vllm", mode="ngram:8", seconds=1.0, drafted=6, accepted=2, calls=None)


def figures(*records: Record, greedy: bool = True) -> Row:
    """Of the last record's mode."""
    last = records[-1]
    return row(("code", 1), (last.engine, last.mode), list(records), greedy, STOCK, OURS)


def test_speed_is_a_median_over_pairs_of_the_same_group_and_repeat():
    plain = [replace(PLAIN, group=i, seconds=seconds) for i, seconds in enumerate((2.0, 4.0, 100.0))]
    fast = [replace(NGRAM, group=i, seconds=seconds) for i, seconds in enumerate((1.0, 1.0, 1.0))]
    found = figures(*plain, *fast)
    assert (found.to_ours, found.to_stock, found.to_own) == (4.0, None, None)
    assert found.tokens_per_second == 4.0


@pytest.mark.parametrize("tokens, different", [([[1, 2, 3, 4]], 0), ([[1, 2, 3, 5]], 1), ([[1, 2, 3]], 1)])
def test_a_wrong_text_is_counted(tokens: list[list[int]], different: int):
    assert figures(PLAIN, replace(NGRAM, tokens=tokens)).different == different


def test_what_cannot_be_compared_is_not_called_equal():
    assert figures(PLAIN, NGRAM, greedy=False).different is None
    assert figures(NGRAM).different is None


@pytest.mark.parametrize(
    "drafted, calls, silent",
    [
        pytest.param(6, None, False, id="drafts are counted"),
        pytest.param(0, None, True, id="no drafts are counted"),
        pytest.param(None, 3, False, id="calls brought more than their number"),
        pytest.param(None, 4, True, id="calls brought one token each"),
        pytest.param(None, None, False, id="nothing is counted"),
    ],
)
def test_a_mode_that_did_not_speculate_is_found(drafted: int | None, calls: int | None, silent: bool):
    assert figures(PLAIN, replace(NGRAM, drafted=drafted, calls=calls)).silent is silent


def test_an_engine_is_compared_with_its_own_modes():
    plain = replace(PLAIN, engine="vllm")
    plugged = replace(NGRAM, mode="speculon:16", seconds=0.5, tokens=[[1, 2, 3, 5]])
    found = figures(plain, NGRAM, plugged)
    assert (found.to_own, found.to_lookup, found.unlike_own, found.different) == (4.0, 2.0, 1, None)


def test_a_mode_that_drafts_nothing_is_not_called_silent():
    assert not figures(PLAIN, replace(NGRAM, mode="nothing:16", drafted=0, accepted=0)).silent


def test_plain_decoding_is_never_silent():
    assert not figures(PLAIN).silent


def test_a_text_ends_before_its_first_stop_token():
    assert cut([5, 0, 6, 2], (2, 0)) == [5]
    assert cut([5, 6], (2, 0)) == [5, 6]


@pytest.mark.parametrize(
    ("method", "k", "options"),
    [
        ("off", None, {"method": "off", "policy": "fixed"}),
        (
            "draft_model",
            4,
            {"method": "draft_model", "num_speculative_tokens": 4, "policy": "fixed", "draft": "some/draft"},
        ),
        ("auto", None, {"method": "auto", "draft": "some/draft"}),
    ],
)
def test_our_modes_with_a_number_are_fixed(
    method: str, k: int | None, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(ENGINES)
    ours, worker = importlib.import_module("ours"), importlib.import_module("worker")
    settings = worker.Settings(
        method, k, "some/target", "some/draft", threads=1, context=8, texts=1, eos=(0,)
    )
    assert ours.speculation_of(settings) == {"prompt_lookup_min": 1, "suffix_pools": 0, **options}


def test_a_worker_answers_refuses_and_keeps_its_lines_clean(tmp_path: Path):
    script = tmp_path / "engine.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ENGINES)!r})\n"
        "from worker import Answer, serve\n"
        "class Echo:\n"
        "    packages = ()\n"
        "    def __init__(self, settings): print('noise')\n"
        "    def write(self, ask):\n"
        "        print('more noise')\n"
        "        if ask.temperature: raise ValueError('greedy only')\n"
        "        return Answer(ask.prompts)\n"
        "    def close(self): pass\n"
        "serve(Echo)\n"
    )
    settings = {
        "method": "off",
        "k": None,
        "target": "",
        "draft": "",
        "threads": 1,
        "context": 8,
        "texts": 1,
        "eos": [0],
    }
    asks = [{"prompts": [[1]], "max_tokens": 1, "temperature": temperature} for temperature in (0, 1)]
    done = subprocess.run(
        [sys.executable, script, json.dumps(settings)],
        input="".join(json.dumps(ask) + "\n" for ask in asks),
        capture_output=True,
        text=True,
        check=True,
    )
    ready, answer, refusal = map(json.loads, done.stdout.splitlines())
    assert ready == {"versions": {}}
    assert answer["tokens"] == [[1]] and answer["seconds"] >= 0
    assert refusal == {"refused": "ValueError: greedy only"}
