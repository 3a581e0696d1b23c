"""Suffix decoding equals counting by brute force; its store keeps its bounds, its keys apart, and what was committed alone."""

from __future__ import annotations

import json
import os
import random
import stat
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.config import SpeculationConfig
from speculon.errors import ConfigError
from speculon.proposers import pools as store
from speculon.proposers import suffix
from speculon.proposers.base import TargetFacts
from speculon.proposers.pools import END, LONGEST, LOOKS, SEED, Pools, Trail, key_of
from speculon.proposers.suffix import LEAD, Limits, Suffix
from tests.builders import make_sequence

VOCAB = 50
FACTS = TargetFacts(VOCAB, 1000)
Guess = tuple[list[int], list[float]]


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(pools: int = 4, tokens: int = 64, ttl: float = 10.0, clock: Clock | None = None) -> Pools:
    return Pools(pools, tokens, ttl, VOCAB, clock or Clock())


# the same by brute force


def brute(own: list[int], answers: list[list[int]], k: int, limits: Limits) -> Guess:
    """Reads every text from every place, the newest first, as often as it likes."""
    places = [(own, at) for at in range(len(own) - 1, 0, -1)]
    places += [(text, at) for text in reversed(answers) for at in range(len(text) - 1, 0, -1)]
    for length in range(min(LONGEST, len(own)), SEED - 1, -1):
        after = [
            ((text[at:] * k)[:k] if text is own else text[at : at + k])
            for text, at in places
            if at >= length and text[at - length : at] == own[-length:]
        ]
        first = [what[0] for what in after]
        if first and max(map(first.count, first)) >= limits.min_hits:
            return most_frequent(after, length, k, limits)
    return [], []


def most_frequent(after: list[list[int]], length: int, k: int, limits: Limits) -> Guess:
    draft: list[int] = []
    confidence = []
    while len(draft) < min(k, max(1, int(limits.factor * length))):
        i = len(draft)
        nexts = [what[i] for what in after if what[:i] == draft and len(what) > i]
        best = max(nexts, key=nexts.count, default=END)
        if best == END or nexts.count(best) < max(limits.min_hits, limits.min_probability * len(after)):
            break
        draft.append(best)
        confidence.append(nexts.count(best) / (len(nexts) + 1 / (length + i)))
    return draft, confidence


def propose(own: list[int], answers: list[list[int]], k: int, limits: Limits, cuts: list[int] | None = None) -> Guess:
    """By the proposer, for a text that has grown in pieces which end at `cuts`."""
    proposer = Suffix(limits, make(tokens=1000))
    for answer in answers:
        proposer.pools.add(str(key_of("me", [])), answer)
    seq = make_sequence(own[:1], max_tokens=100, pool="me")
    proposer.admit(seq)
    for cut in sorted({1, *(cuts or ()), len(own)}):
        seq.tokens = own[:cut]
        (draft,) = proposer.propose([seq], [k], lease=None)  # type: ignore[arg-type]
    assert set(draft.sources) <= {"suffix"}
    return list(draft.tokens), list(draft.confidence or ())


texts = st.lists(st.integers(1, 4), min_size=1, max_size=30)
limits = st.builds(Limits, st.sampled_from([0.4, 1.0, 2.5]), st.sampled_from([0.0, 0.1, 0.5, 1.0]), st.integers(1, 3))


@given(
    texts, st.lists(texts, max_size=3).filter(lambda said: sum(map(len, said)) < LOOKS - 4), st.integers(1, 9), limits, st.data()
)
def test_it_drafts_what_counting_by_brute_force_does(
    own: list[int], answers: list[list[int]], k: int, limits: Limits, data: st.DataObject
) -> None:
    cuts = data.draw(st.lists(st.integers(1, len(own)), max_size=4))
    assert propose(own, answers, k, limits, cuts) == brute(own, answers, k, limits)


def check_long_texts(seed: int) -> None:
    chance = random.Random(seed)
    own, *answers = ([chance.choice([1, 1, 2, 3]) for _ in range(chance.randrange(20, 90))] for _ in range(4))
    for end in range(2, len(own), 3):
        for wanted in (Limits(), Limits(8.0, 0.3), Limits(1.0, 0.0, 2)):
            assert propose(own[:end], answers, 8, wanted) == brute(own[:end], answers, 8, wanted)


@pytest.mark.parametrize("seed", range(3))
def test_long_texts_whose_every_place_is_looked_at(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOOKS", 10**6)
    check_long_texts(seed)


@pytest.mark.parametrize(
    ("own", "answers", "expected"),
    [
        pytest.param([1, 2, 3, 4], [], [], id="nothing repeats"),
        pytest.param([1, 2, 8, 1, 2, 9, 1, 2], [], [9, 1, 2, 9], id="the newest among equals"),
        pytest.param([1, 2, 8, 1, 2, 8, 1, 2, 9, 1, 2], [], [8, 1, 2, 9], id="most often wins over the newest"),
        pytest.param([5, 1, 2, 8, 1, 2, 9, 5, 1, 2], [], [8, 1, 2, 9, 5, 1], id="longest wins over most often"),
        pytest.param([7, 7, 7], [], [7, 7, 7, 7], id="a match at the end repeats itself"),
        pytest.param([1, 2], [[1, 2, 3, 4]], [3, 4], id="an earlier answer"),
        pytest.param([1, 2], [[1, 2], [3, 4]], [], id="not beyond an answer's end"),
        pytest.param([2, 3], [[1, 2], [3, 4]], [], id="nor across it"),
        pytest.param([1, 2, 3, 1, 2], [[1, 2, 4], [1, 2, 4]], [4], id="answers outvote the text"),
        pytest.param([1, 2, 3, 1, 2], [[1, 2, 4]], [3, 1, 2, 3], id="the text is newer than answers"),
    ],
)
def test_what_is_drafted(own: list[int], answers: list[list[int]], expected: list[int]) -> None:
    assert propose(own, answers, 8, Limits(2.0))[0] == expected == brute(own, answers, 8, Limits(2.0))[0]


def shortest(found: Any, min_hits: int) -> Any:
    return min(length for length, _ in found) if found else 0, [what for _, what in found]


def oldest(following: Any, i: int) -> Any:
    return COUNT(following[::-1], i)


def across(trail: Trail, at: int, k: int) -> Any:
    return [token for token in trail.tokens[at:] if token != END][:k]


def late(trail: Trail, tokens: Any) -> None:
    EXTEND(trail, tokens[1:] if trail.end else tokens)


COUNT, EXTEND, FORGET, EXPIRE, WRITE = suffix.count, Trail.extend, Trail._forget, Pools._expire, Pools._write


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (suffix, "choose", shortest),
        (suffix, "count", oldest),
        (Trail, "_from", across),
        (Trail, "extend", late),
        (store, "LOOKS", 3),
    ],
)
def test_another_way_to_choose_is_found_out(where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LOOKS", 10**6)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises((AssertionError, IndexError)):
        check_long_texts(0)


def test_a_search_looks_at_so_many_places_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    trail = Trail(10_000)
    trail.extend([1, 2, 3] * 1000)
    assert len(trail.after([1, 2], 4)) == LOOKS
    assert len(Trail(4).after([1, 2], 4)) == len(trail.after([1], 4)) == len(trail.after([], 4)) == 0


# the store


def check_bounds(operations: list[tuple[str, int, int]], path: Path | None = None) -> None:
    """Against a dictionary that is searched as a whole: sizes, keys and ages after every operation."""
    clock, most, tokens, ttl = Clock(), 3, 40, 10.0
    pools, model = make(most, tokens, ttl, clock), dict[str, tuple[list[int], float]]()
    for what, key_number, n in operations:
        key = f"k{key_number}"
        if what == "wait":
            clock.now += n / 4
            model = {k: v for k, v in model.items() if clock.now - v[1] <= ttl}
        elif what == "add":
            kept = [*range(1, n % VOCAB + 1), END][-tokens:]
            old, _ = model.pop(key, ([], 0.0))
            over = len(old) + len(kept) - tokens
            model[key] = [*old[max(over, tokens // 8) :], *kept] if over > 0 else [*old, *kept], clock.now
            pools.add(key, list(range(1, n % VOCAB + 1)))
            while len(model) > most:
                del model[min(model, key=lambda k: (model[k][1], list(model).index(k)))]
        elif what == "after":
            if key in model:
                model[key] = model.pop(key)[0], clock.now
            pools.after(key, [1, 2], 4)
        elif what == "delete":
            assert pools.delete(key) == (model.pop(key, None) is not None)
        elif path is not None:
            pools.save(path)
            pools = make(most, tokens, ttl, clock)
            pools.load(path)
        assert pools.sizes == {k: len(v[0]) for k, v in model.items()}
        assert {k: list(p.trail.tokens) for k, p in pools._pools.items()} == {k: v[0] for k, v in model.items()}
        assert len(pools.sizes) <= most and all(size <= tokens for size in pools.sizes.values())


operation = st.tuples(st.sampled_from(["add", "add", "after", "delete", "wait", "save"]), st.integers(0, 5), st.integers(0, 49))
BUSY = [("add" if i % 3 else "wait", i % 5, i % 49) for i in range(60)]


@given(st.lists(operation, max_size=60))
def test_bounds_hold_under_any_operations(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, int, int]]
) -> None:
    check_bounds(operations, tmp_path_factory.getbasetemp() / "pools.json")


def unlimited(pools: Pools, key: str, tokens: Any, used: float) -> None:
    most, pools._most = pools._most, 10**6
    WRITE(pools, key, tokens, used)
    pools._most = most


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (Trail, "_forget", lambda trail, over: None),
        (Pools, "_expire", lambda pools: None),
        (Pools, "_write", unlimited),
        (Pools, "_write", lambda pools, key, tokens, used: WRITE(pools, "k0", tokens, used)),
        (Pools, "delete", lambda pools, key: key in pools._pools),
    ],
    ids=["tokens", "age", "pools", "keys", "deletion"],
)
def test_a_bound_that_does_not_hold_is_found_out(where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = [*BUSY, ("add", 1, 5), ("delete", 1, 0)]
    check_bounds(operations)
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(AssertionError):
        check_bounds(operations)


def test_an_answer_longer_than_a_pool_leaves_its_end() -> None:
    trail = Trail(20)
    trail.extend(list(range(45)))
    assert list(trail.tokens) == list(range(25, 45)) and trail.end == 45
    assert list(trail.after([29, 30], 3)[0][1]) == [31, 32, 33] and not trail.after([3, 4], 3)


def test_what_is_forgotten_is_not_found() -> None:
    trail = Trail(64)
    for i in range(40):
        trail.extend([i, i + 1, 77])
        assert len(trail.tokens) <= 64
        for length, what in trail.after([i, i + 1], 2):
            assert length == 2 and what[0] == 77
    assert not trail.after([3, 4], 2) and trail.after([39, 40], 2)


def check_isolation() -> None:
    """A name, another name, a prompt and a name that reads like its digest's input; and whoever wants none."""
    prompt, said = [1, 2, 3], [5, 6, 7, 8, 9]
    for name, sees in [("me", True), ("you", False), (None, False), ("", False), (f"prompt {prompt}", False)]:
        proposer = Suffix.build(SpeculationConfig(), FACTS)
        write(proposer, "me", prompt, said)
        assert bool(draft(proposer, name, [*prompt, 5, 6], 3)) == sees, name


def write(proposer: Suffix, pool: str | None, prompt: list[int], answer: list[int]) -> None:
    seq = make_sequence(prompt, pool=pool)
    proposer.admit(seq)
    for token in answer:
        proposer.propose([seq], [4], lease=None)  # type: ignore[arg-type]
        seq.tokens.append(token)
    proposer.release(seq)


def draft(proposer: Suffix, pool: str | None, tokens: list[int], prompt_len: int) -> tuple[int, ...]:
    seq = make_sequence(tokens[:prompt_len], output=tokens[prompt_len:], pool=pool)
    proposer.admit(seq)
    (found,) = proposer.propose([seq], [4], lease=None)  # type: ignore[arg-type]
    proposer._trails.pop(seq.id)
    return found.tokens


def test_keys_do_not_see_each_other() -> None:
    check_isolation()


def test_one_pool_for_all_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "key_of", lambda name, prompt: "all")
    with pytest.raises(AssertionError):
        check_isolation()


def test_without_a_name_the_same_prompt_finds_its_answers() -> None:
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    long = [i % 7 for i in range(512)]
    write(proposer, None, [*long, 1], [30, 31, 32, 33])
    assert draft(proposer, None, [*long, 2, 30, 31], 513) == (32, 33), "prompts that begin alike for 512 tokens"
    assert draft(proposer, None, [9, *long, 30, 31], 513) == ()


def test_the_prompts_last_tokens_find_an_answers_beginning() -> None:
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    write(proposer, "me", list(range(20)), [40, 41, 42, 43])
    assert draft(proposer, "me", [45, 18, 19], 3) == (40, 41, 42, 43)
    assert sum(proposer.pools.sizes.values()) == LEAD + 4 + 1


@pytest.mark.parametrize("off", [{"pool": ""}, {"pool": "me", "output": []}])
def test_who_wants_no_pool_or_wrote_nothing_leaves_nothing(off: dict[str, Any]) -> None:
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    seq = make_sequence([1, 2, 3], **{"output": [4, 5], **off})
    proposer.release(seq)  # of which it knows nothing
    proposer.admit(seq)
    proposer.release(seq)
    assert not proposer.pools.sizes and not proposer._trails


def test_no_pools_by_settings() -> None:
    proposer = Suffix.build(SpeculationConfig(suffix_pools=0), FACTS)
    write(proposer, "me", [1, 2, 3], [5, 6, 7, 8])
    assert not proposer.pools.sizes and not draft(proposer, "me", [1, 2, 3, 5, 6], 3)


def test_a_deleted_key_is_gone() -> None:
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    write(proposer, "me", [1, 2, 3], [5, 6, 7, 8])
    key = str(key_of("me", []))
    assert proposer.pools.delete(key) and not proposer.pools.delete(key)
    assert not draft(proposer, "me", [1, 2, 3, 5, 6], 3)


# files


def test_what_is_saved_is_found_again_and_ages_on(tmp_path: Path) -> None:
    clock, later, path = Clock(), Clock(), tmp_path / "pools.json"
    pools = make(clock=clock)
    pools.add("old", [1, 2, 3])
    clock.now += 4
    pools.add("new", [1, 2, 4])
    pools.save(path)
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600 and os.listdir(tmp_path) == ["pools.json"]

    later.now = -50.0
    again = make(clock=later)
    again.add("new", [1, 2, 5])
    again.load(path)
    assert again.sizes == {"old": 4, "new": 8}
    assert [list(what) for _, what in again.after("new", [1, 2], 1)] == [[5], [4]]
    later.now += 7
    assert again.sizes == {"new": 8}


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda said: said[:-9], id="half a file"),
        pytest.param(lambda said: "[]", id="no table"),
        pytest.param(lambda said: said.replace("pools 1", "pools 2"), id="another format"),
        pytest.param(lambda said: said.replace(f": {VOCAB}", ": 51"), id="another vocabulary"),
        pytest.param(lambda said: said.replace("[1, 2", '["1", 2'), id="text for tokens"),
        pytest.param(lambda said: said.replace("[1, 2", f"[{VOCAB}, 2"), id="a token too large"),
        pytest.param(lambda said: said.replace("[1, 2", "[-2, 2"), id="a token too small"),
        pytest.param(lambda said: said.replace("0.0", "-1"), id="from the future"),
        pytest.param(lambda said: said.replace("0.0", "NaN"), id="no age"),
        pytest.param(lambda said: said.replace('"k"', "5"), id="no key"),
    ],
)
def test_a_file_in_doubt_changes_nothing(change: Callable[[str], str], tmp_path: Path) -> None:
    path, pools = tmp_path / "pools.json", make()
    pools.add("k", [1, 2, 3])
    pools.save(path)
    said = path.read_text()
    assert change(said) != said
    path.write_text(change(said))
    other = make()
    other.add("mine", [1])
    with pytest.raises(ConfigError, match="these are no saved pools"):
        other.load(path)
    assert other.sizes == {"mine": 2}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, pools = tmp_path / "pools.json", make()
    pools.save(path)
    pools.add("k", [1, 2, 3])
    monkeypatch.setattr(os, "fsync", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        pools.save(path)
    assert json.loads(path.read_text())["pools"] == [] and os.listdir(tmp_path) == ["pools.json"]


# threads


def test_threads_leave_a_store_whole(tmp_path: Path) -> None:
    pools, errors = make(pools=3, tokens=40), list[BaseException]()

    def work(number: int) -> None:
        chance = random.Random(number)
        try:
            for i in range(300):
                key = f"k{chance.randrange(5)}"
                pools.add(key, [number] * chance.randrange(1, 12))
                for _, what in pools.after(key, [number, number], 4):
                    assert set(what) <= set(range(8))
                if chance.random() < 0.2:
                    pools.delete(key)
                if i % 100 == 0:
                    pools.save(tmp_path / f"{number}.json")
                    pools.load(tmp_path / f"{number}.json")
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    assert len(pools.sizes) <= 3 and all(size <= 40 for size in pools.sizes.values())
