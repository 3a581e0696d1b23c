"""The store of earlier answers keeps its bounds, its keys and tenants apart, and what was committed alone."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from speculon.core.config import SpeculationConfig
from speculon.speculation.proposers import pools as store
from speculon.speculation.proposers import suffix
from speculon.speculation.proposers.base import TargetFacts
from speculon.speculation.proposers.pools import END, Pools, Trail, key_of
from speculon.speculation.proposers.suffix import LEAD, Suffix
from tests.builders import make_sequence

VOCAB = 50
FACTS = TargetFacts(VOCAB, 1000)
WRITE, FORGET = Pools._write, Pools.forget


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make(pools: int = 4, tokens: int = 64, ttl: float = 10.0, clock: Clock | None = None) -> Pools:
    clock = clock or Clock()
    return Pools(pools, tokens, ttl, VOCAB, clock, date=clock)


def told(pools: Pools) -> list[Any]:
    """Its state, as it comes back from a file."""
    return json.loads(json.dumps(pools.state(), default=list))  # type: ignore[no-any-return]


# the store


def tenant(number: int) -> str:
    return f"t{number % 2}"


def check_bounds(operations: list[tuple[str, int, int]]) -> None:
    """Against a dictionary that is searched as a whole: sizes, keys and ages after every operation."""
    clock, most, tokens, ttl = Clock(), 3, 40, 10.0
    pools, model = make(most, tokens, ttl, clock), dict[str, tuple[list[int], float]]()
    for what, key_number, n in operations:
        key = str(key_of(f"k{key_number}", (), tenant(key_number)))
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
            everybodys = [
                str(key_of(f"k{i}", (), tenant(i))) for i in range(6) if tenant(i) == tenant(key_number)
            ]
            gone = [k for k in ([key] if n % 2 else everybodys) if model.pop(k, None) is not None]
            assert pools.forget(tenant(key_number), f"k{key_number}" if n % 2 else None) == len(gone)
        else:
            saved = told(pools)
            pools = make(most, tokens, ttl, clock)
            pools.restore(saved)
        assert pools.sizes == {k: len(v[0]) for k, v in model.items()}
        assert {key: list(kept) for key, _, kept in pools.state()} == {k: v[0] for k, v in model.items()}
        assert len(pools.sizes) <= most and all(size <= tokens for size in pools.sizes.values())


operation = st.tuples(
    st.sampled_from(["add", "add", "after", "delete", "wait", "save"]), st.integers(0, 5), st.integers(0, 49)
)
BUSY = [("add" if i % 3 else "wait", i % 5, i % 49) for i in range(60)]


@given(st.lists(operation, max_size=60))
def test_bounds_hold_under_any_operations(operations: list[tuple[str, int, int]]) -> None:
    check_bounds(operations)


def unlimited(pools: Pools, key: str, tokens: Any, used: float) -> None:
    most, pools.max_pools = pools.max_pools, 10**6
    WRITE(pools, key, tokens, used)
    pools.max_pools = most


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [
        (Trail, "_forget", lambda trail, over: None),
        (Pools, "_expire", lambda pools: None),
        (Pools, "_write", unlimited),
        (Pools, "_write", lambda pools, key, tokens, used: WRITE(pools, "k0", tokens, used)),
        (Pools, "forget", lambda pools, tenant, name=None: FORGET(pools, tenant, name or "k1")),
        (Pools, "forget", lambda pools, tenant, name=None: FORGET(pools, tenant)),
        (Pools, "restore", lambda pools, state: None),
    ],
    ids=["tokens", "age", "pools", "keys", "deletes one", "deletes all", "restores nothing"],
)
def test_a_bound_that_does_not_hold_is_found_out(
    where: Any, name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = [
        *BUSY,
        *(("add", i, 5) for i in (1, 3)),
        ("save", 0, 0),
        ("delete", 1, 1),
        ("add", 5, 5),
        ("delete", 1, 0),
    ]
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
    """A name, another one, a prompt, a name that reads like its digest's input, whoever wants none; of each
    also another's.
    """
    prompt, answer = [1, 2, 3], [5, 6, 7, 8, 9]
    for name, sees in [("me", True), ("you", False), (None, False), ("", False), (f"prompt {prompt}", False)]:
        for who, mine in [("a", True), ("b", False), ("", False)]:
            proposer = Suffix.build(SpeculationConfig(), FACTS)
            write(proposer, "me", prompt, answer, "a")
            assert bool(draft(proposer, name, [*prompt, 5, 6], 3, who)) == (sees and mine), (name, who)
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    write(proposer, None, prompt, answer, "a")
    assert draft(proposer, None, [*prompt, 5, 6], 3, "a") and not draft(
        proposer, None, [*prompt, 5, 6], 3, "b"
    ), "a prompt's"
    assert not proposer.pools.forget("b") and proposer.pools.forget("a") == 1


def write(proposer: Suffix, pool: str | None, prompt: list[int], answer: list[int], tenant: str = "") -> None:
    seq = make_sequence(prompt, pool=pool, tenant=tenant)
    proposer.admit(seq)
    for token in answer:
        proposer.propose([seq], [4])
        seq.tokens.append(token)
    proposer.release(seq)


def draft(
    proposer: Suffix, pool: str | None, tokens: list[int], prompt_len: int, tenant: str = ""
) -> tuple[int, ...]:
    seq = make_sequence(tokens[:prompt_len], output=tokens[prompt_len:], pool=pool, tenant=tenant)
    proposer.admit(seq)
    (found,) = proposer.propose([seq], [4])
    proposer.trails.pop(seq.id)
    return found.tokens


def test_keys_do_not_see_each_other() -> None:
    check_isolation()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda name, prompt, tenant="", adapter="": "all", id="one pool for all"),
        pytest.param(
            lambda name, prompt, tenant="", adapter="": key_of(name, prompt), id="no tenant in the key"
        ),
        pytest.param(
            lambda name, prompt, tenant="", adapter="": key_of(name, prompt, tenant if name else ""),
            id="in names' keys alone",
        ),
    ],
)
def test_a_shared_pool_is_found_out(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "key_of", wrong)
    with pytest.raises(AssertionError):
        check_isolation()


def test_without_a_name_the_same_prompt_finds_its_answers() -> None:
    proposer = Suffix.build(SpeculationConfig(), FACTS)
    long = [i % 7 for i in range(512)]
    write(proposer, None, [*long, 1], [30, 31, 32, 33])
    assert draft(proposer, None, [*long, 2, 30, 31], 513) == (32, 33), (
        "prompts that begin alike for 512 tokens"
    )
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
    assert not proposer.pools.sizes and not proposer.trails


def test_no_pools_by_settings() -> None:
    proposer = Suffix.build(SpeculationConfig(suffix_pools=0), FACTS)
    write(proposer, "me", [1, 2, 3], [5, 6, 7, 8])
    assert not proposer.pools.sizes and not draft(proposer, "me", [1, 2, 3, 5, 6], 3)


# what is written, to be kept


def test_what_is_told_is_found_again_and_ages_on() -> None:
    clock, later = Clock(), Clock()
    pools = Pools(4, 64, 10.0, VOCAB, clock, date=lambda: clock.now + 1000)
    pools.add("old", [1, 2, 3])
    clock.now += 4
    pools.add("new", [1, 2, 4])
    saved = told(pools)

    later.now = -50.0  # clocks of two processes have nothing in common; dates have
    away = Pools(4, 64, 10.0, VOCAB, later, date=lambda: later.now + 1000 + 154 + 7)
    away.restore(saved)
    assert away.sizes == {"new": 4}, "seven seconds later"
    again = Pools(4, 64, 10.0, VOCAB, later, date=lambda: later.now + 1000 + 154)
    again.add("new", [1, 2, 5])
    again.restore(saved)
    assert again.sizes == {"old": 4, "new": 8}
    assert [list(what) for _, what in again.after("new", [1, 2], 1)] == [[5], [4]]
    later.now += 7
    assert again.sizes == {"new": 8}


def test_a_date_that_is_still_to_come_is_now() -> None:
    pools = make()
    pools.restore([["k", 1e9, [1, 2]]])
    ((_, used, _),) = pools.state()
    assert used == Clock.now


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda key, at, tokens: None, id="no pool"),
        pytest.param(lambda key, at, tokens: [key, at], id="half a pool"),
        pytest.param(lambda key, at, tokens: [key, at, ["1", 2]], id="text for tokens"),
        pytest.param(lambda key, at, tokens: [key, at, [True, 2]], id="truth for tokens"),
        pytest.param(lambda key, at, tokens: [key, at, [VOCAB]], id="a token too large"),
        pytest.param(lambda key, at, tokens: [key, at, [END - 1]], id="a token too small"),
        pytest.param(lambda key, at, tokens: [key, float("nan"), tokens], id="no date"),
        pytest.param(lambda key, at, tokens: [key, 10**400, tokens], id="a date that is no number of ours"),
        pytest.param(lambda key, at, tokens: [5, at, tokens], id="no key"),
    ],
)
def test_a_state_in_doubt_changes_nothing(change: Callable[..., Any]) -> None:
    pools = make()
    pools.add("k", [1, 2, 3])
    (saved,) = told(pools)
    other = make()
    other.add("mine", [1])
    other.restore([saved])
    with pytest.raises(ValueError, match="is not a pool"):
        other.restore([["new", 0, [1]], change(*saved)])
    assert other.sizes == {"mine": 2, "k": 4}


# memory


def weight(config: SpeculationConfig) -> int:
    """Bytes of all pools at their fullest, as Python counts them."""
    store = Pools(config.suffix_pools, config.suffix_pool_tokens, 1e9, VOCAB)
    heaviest = 0
    for number in range(config.suffix_pools + 1):
        for _ in range(24):
            store.add(str(key_of(f"k{number}", ())), [number % VOCAB] * (config.suffix_pool_tokens // 8))
            heaviest = max(heaviest, sum(map(weight_of, store._pools.items())))
    return heaviest


def weight_of(one: tuple[str, Any]) -> int:
    (key, pool), trail = one, one[1].trail
    return sum(map(sys.getsizeof, (key, pool, pool.used, trail, vars(trail), *vars(trail).values())))


@pytest.mark.parametrize("sizes", [(3, 16), (3, 1000), (2, 2**16)])
def test_the_pools_weigh_no_more_than_is_promised(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pools, tokens = sizes
    config = SpeculationConfig(suffix_pools=pools, suffix_pool_tokens=tokens)
    assert 0.4 * config.remembered_bytes < weight(config) <= config.remembered_bytes
    # tokens of 8 bytes
    monkeypatch.setattr(store, "array", lambda kind, *more: array("q" if kind == "i" else kind, *more))
    if tokens > 16:
        assert weight(config) > config.remembered_bytes, "the planted error"
    assert SpeculationConfig(suffix_pools=0).remembered_bytes == 0


# threads


class Guarded(dict[str, Any]):
    """Pools that are touched only by who holds the lock."""

    def __init__(self, owner: Pools):
        super().__init__()
        self._lock = owner._lock

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            assert self._lock.locked(), name
        return super().__getattribute__(name)

    def __iter__(self) -> Any:
        assert self._lock.locked()
        return super().__iter__()

    def __setitem__(self, key: str, value: Any) -> None:
        assert self._lock.locked()
        super().__setitem__(key, value)


def use_all(pools: Pools) -> None:
    pools._pools = Guarded(pools)
    for name in "abcde":  # more than it holds
        pools.add(str(key_of(name, ())), [1, 2, 3])
    pools.after(str(key_of("c", ())), [1, 2], 2)
    assert pools.forget("", "c") == 1 and len(pools.sizes) == 2
    state = told(pools)
    assert pools.forget("") == 2
    pools.restore(state)


def test_nothing_is_touched_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    use_all(make(pools=3))
    for name, wrong in [
        ("forget", lambda pools, *_: len(pools._pools)),
        ("state", lambda pools: list(pools._pools.values())),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(Pools, name, wrong)
            with pytest.raises(AssertionError):
                use_all(make(pools=3))
