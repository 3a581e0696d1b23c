"""Token sequences indexed by what precedes each place, and a bounded store of earlier answers by key."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from threading import Lock
from time import monotonic, time
from typing import Any

SEED = 2  # shortest match in tokens; 3: 5 to 12 % fewer tokens per call
LONGEST = 32  # match in tokens; 8: 6 % fewer on edits, 64: no more
LOOKS = 32  # places compared in one search; 8: 1 to 3 % fewer tokens per call, 256: no more
END = -1  # stands between two answers, and is no token
LATEST = 1e12  # a date beyond which nothing was written: 30,000 years from now
BITS = 21  # of a token id within a slot number
SLOTS = 2**16  # most of one text
PROMPT = 512  # tokens that name the pool of a request without a key

TextMatches = list[tuple[int, Sequence[int]]]


class Trail:
    """A growing text of which at most the last `capacity` tokens are kept, at 20 bytes each.

    The places that follow the same `SEED` tokens are chained, the newest first (as in LZ77); a slot may hold
    several chains, for each place is compared with what is looked for anyway.
    """

    def __init__(self, capacity: int):
        self.end = 0  # tokens that were ever written
        self.tokens = array("i")
        self._capacity = capacity
        self._older = array("q")  # of each token: the place that was in its slot before
        self._latest = array("q", [-1]) * (min(capacity, SLOTS) | 1)
        self._seed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        new = tokens[-self._capacity :]
        self._forget(len(self.tokens) + len(new) - self._capacity)
        self.end += len(tokens) - len(new)
        latest, slots, seed = self._latest, len(self._latest), self._seed
        for place, token in enumerate(new, self.end + 1):
            seed = (seed << BITS | token) & (1 << SEED * BITS) - 1
            slot = seed % slots
            self.tokens.append(token)
            self._older.append(latest[slot])
            latest[slot] = place
        self.end, self._seed = self.end + len(new), seed

    def after(self, tail: Sequence[int], k: int, ahead: Sequence[int] = ()) -> TextMatches:
        """(length of match, up to `k` tokens that followed) of the newest places where the end of `tail`
        stands.

        Newest first. A match that reaches the text's end repeats itself; no match or continuation crosses an
        END. `ahead` is what of that end is not written here.
        """
        matches: TextMatches = []
        tokens, first = self.tokens, self.end - len(self.tokens)
        whole = array("i", tail)
        seed = 0
        for token in tail[-SEED:]:
            seed = seed << BITS | token
        place = self._latest[seed % len(self._latest)]
        for _ in range(LOOKS):
            at = place - first
            if at < SEED:
                break
            length, longest = 0, min(len(tail), at)
            # most places of a text that repeats itself: 45 us instead of 65
            if tokens[at - longest : at] == whole:
                length = longest
            while length < longest and tokens[at - length - 1] == tail[-length - 1]:
                length += 1
            if length >= SEED and (what := self._from(at, k, ahead)):
                matches.append((length, what))
            place = self._older[at - 1]
        return matches

    def _from(self, at: int, k: int, ahead: Sequence[int]) -> array[int]:
        period = len(self.tokens) + len(ahead) - at
        what = self.tokens[at : at + k]
        if 0 < period < k or (ahead and len(what) < k):
            what.extend(ahead)
            what = (what * (k // period + 1))[:k]
        return what[: what.index(END)] if END in what else what

    def _forget(self, over: int) -> None:
        if over > 0:
            gone = max(over, self._capacity // 8)  # rarely much, not each time a little: what stays is moved
            del self.tokens[:gone], self._older[:gone]


@dataclass(slots=True)
class AnswerPool:
    trail: Trail
    used: float


class Pools:
    """Earlier answers by key: so many pools of so many tokens, the least recently used go first, and all go
    `ttl` seconds after their last use. Any thread may call it."""

    def __init__(
        self,
        pools: int,
        tokens: int,
        ttl: float,
        vocab_size: int,
        clock: Callable[[], float] = monotonic,
        date: Callable[[], float] = time,
    ):
        self.max_pools, self._tokens, self._ttl, self._vocab_size, self._clock = (
            pools,
            tokens,
            ttl,
            vocab_size,
            clock,
        )
        self._date = date  # which goes on between two processes
        self._pools: dict[str, AnswerPool] = {}  # the least recently used first
        self._lock = Lock()

    @property
    def sizes(self) -> dict[str, int]:
        """Tokens by key."""
        with self._lock:
            self._expire()
            return {key: len(pool.trail.tokens) for key, pool in self._pools.items()}

    def add(self, key: str, answer: Sequence[int]) -> None:
        with self._lock:
            self._write(key, [*answer, END], self._clock())

    def after(self, key: str, tail: Sequence[int], k: int) -> TextMatches:
        """`Trail.after` of one pool; reading is a use."""
        with self._lock:
            self._expire()
            pool = self._pools.pop(key, None)
            if pool is None:
                return []
            self._pools[key] = AnswerPool(pool.trail, self._clock())
            return pool.trail.after(tail, k)

    def forget(self, tenant: str, name: str | None = None) -> int:
        """Deletes the pool of a name, or all that a tenant has; returns how many there were."""
        with self._lock:
            gone = [known for known in self._pools if belongs(known, tenant, name)]
            for known in gone:
                del self._pools[known]
            return len(gone)

    def state(self) -> list[tuple[str, float, array[int]]]:
        """(key, when it was last used in seconds since 1970, tokens) of each pool, by last use."""
        with self._lock:
            self._expire()
            began = self._date() - self._clock()
            return [(key, began + pool.used, pool.trail.tokens[:]) for key, pool in self._pools.items()]

    def restore(self, state: Iterable[Any]) -> None:
        """Adds what `state` told, within this store's limits; it has aged since. Raises `ValueError`, with
        nothing changed, for what that cannot have been."""
        saved = [self._read(each) for each in state]
        with self._lock:
            now, date = self._clock(), self._date()
            all_: list[tuple[float, str, Sequence[int]]] = [
                (now - max(0.0, date - at), key, said) for key, at, said in saved
            ]
            all_ += [(pool.used, key, pool.trail.tokens) for key, pool in self._pools.items()]
            self._pools = {}
            for used, key, tokens in sorted(all_, key=lambda each: each[0]):
                self._write(key, tokens, used)

    def _read(self, said: Any) -> tuple[str, float, list[int]]:
        match said:
            case [str(key), int() | float() as at, list(tokens)] if 0 <= at < LATEST:
                if all(type(token) is int and END <= token < self._vocab_size for token in tokens):
                    return key, at, tokens
        raise ValueError(f"{said!r:.80} is not a pool")

    def _write(self, key: str, tokens: Sequence[int], used: float) -> None:
        pool = self._pools.pop(key, None) or AnswerPool(Trail(self._tokens), used)
        pool.trail.extend(tokens)
        self._pools[key] = AnswerPool(pool.trail, used)
        self._expire()
        while len(self._pools) > self.max_pools:
            del self._pools[next(iter(self._pools))]

    def _expire(self) -> None:
        oldest = self._clock() - self._ttl
        while self._pools and self._pools[key := next(iter(self._pools))].used < oldest:
            del self._pools[key]


def key_of(name: str | None, prompt: Sequence[int], tenant: str = "", adapter: str = "") -> str | None:
    """The pool of a request: that of its name, else that of its prompt's beginning; none for the empty name.
    Each adapter has pools of its own, which are deleted with those of the base.

    Digests, so that no file tells names; a name never equals a prompt, and no key of a tenant equals
    another's.
    """
    if name == "":
        return None
    key = f"prompt {list(prompt[:PROMPT])}" if name is None else f"name {name}"
    own = digest(f"adapter {adapter}") if adapter else ""
    return digest(f"tenant {tenant}") + digest(key) + own


def belongs(key: str, tenant: str, name: str | None) -> bool:
    """Whether it is the key of the pool of this name, or of any pool of the tenant."""
    beginning = digest(f"tenant {tenant}") if name is None else key_of(name, (), tenant)
    return beginning is not None and key.startswith(beginning)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()[:32]
