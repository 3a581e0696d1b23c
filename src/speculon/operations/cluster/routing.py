"""Which replica takes a request: the one that has the longest prefix of its prompt, or the earlier answers of
its user; else the less busy of two (Mitzenmacher 2001).

It knows what this server sent and what came back, not what a replica has evicted since.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from random import Random
from threading import Lock

MAX_BLOCKS, MAX_POOLS = 2**18, 2**16  # some 50 MB in all; of blocks of 16 tokens these are 4 M tokens
# of a prompt, which weigh as much as an open request; docs/benchmarks/cluster: 64 loses 2 % of the throughput
# of 16 replicas, 128 a sixth
TOKENS_PER_REQUEST = 32
POOL_TOKENS = 256  # guess: as many as drafts from a user's earlier answers are worth

PREFIX, POOL, LOAD = "prefix", "pool", "load"  # what a request was routed by


class Routing:
    """Prefixes and pools by replica, the least recently used forgotten first. Any thread may call it."""

    def __init__(
        self,
        block_size: int = 16,
        max_blocks: int = MAX_BLOCKS,
        max_pools: int = MAX_POOLS,
        rng: Random | None = None,
    ):
        self._block_size, self._max_blocks, self._max_pools = block_size, max_blocks, max_pools
        self._rng = rng or Random()
        self._holders: OrderedDict[int, int] = OrderedDict()  # hash of a prefix -> bits of its replicas
        self._pools: OrderedDict[str, str] = OrderedDict()  # pool -> the replica that wrote its latest answer
        self._bits: dict[str, int] = {}  # replica -> its bit
        self._lost: set[str] = set()  # replicas that lost a request and have not been seen serving since
        self._lock = Lock()
        self.routed: Counter[str] = Counter()  # by prefix, pool or load -> requests
        self.passed_over = 0  # choices in which a replica was at its limit

    @property
    def blocks(self) -> int:
        return len(self._holders)

    @property
    def pools(self) -> int:
        return len(self._pools)

    def choose(
        self,
        prompt: Sequence[int],
        pool: str | None,
        load: Mapping[str, int],
        limit: int,
        adapter: str = "",
    ) -> str | None:
        """The replica for a prompt, of those in `load` (replica -> open requests); None where all are lost.
        A prefix under another adapter is another one.

        One with `limit` or more open requests is passed over, unless all have as many.
        """
        with self._lock:
            serving = [replica for replica in load if replica not in self._lost]
            if not serving:
                return None
            free = [replica for replica in serving if load[replica] < limit]
            self.passed_over += len(free) < len(serving)
            free = free or serving
            other = self._less_busy(free, load)
            best, tokens = self._best(self._hashes(prompt, adapter), pool, free, load)
            return other if (load[best] - load[other]) * TOKENS_PER_REQUEST > tokens else best

    def sent(self, replica: str, prompt: Sequence[int], pool: str | None, adapter: str = "") -> None:
        """A request went to a replica, which soon has the prompt in its cache."""
        with self._lock:
            bit, blocks = self._bit(replica), list(self._hashes(prompt, adapter))
            first = next(iter(blocks), None)
            if first is not None and self._holders.get(first, 0) & bit:
                self.routed[PREFIX] += 1
            elif pool is not None and self._pools.get(pool) == replica:
                self.routed[POOL] += 1
            else:
                self.routed[LOAD] += 1
            self._learn(bit, blocks)

    def wrote(self, replica: str, tokens: Sequence[int], pool: str | None, adapter: str = "") -> None:
        """A replica has written an answer: `tokens` are the prompt and the answer."""
        with self._lock:
            self._learn(self._bit(replica), list(self._hashes(tokens, adapter)))
            if pool is not None:
                self._pools[pool] = replica
                self._pools.move_to_end(pool)
                while len(self._pools) > self._max_pools:
                    self._pools.popitem(last=False)

    def lost(self, replica: str) -> None:
        """It is not chosen until it `serve`s."""
        with self._lock:
            self._lost.add(replica)

    def serve(self, replicas: Iterable[str]) -> None:
        """These have answered."""
        with self._lock:
            self._lost.difference_update(replicas)

    def keep(self, replicas: Collection[str]) -> None:
        """Forgets every other replica."""
        with self._lock:
            self._lost.intersection_update(replicas)
            gone = [replica for replica in self._bits if replica not in replicas]
            if not gone:
                return
            mask = ~sum(self._bits.pop(replica) for replica in gone)
            kept = ((block, bits & mask) for block, bits in self._holders.items())
            self._holders = OrderedDict((block, bits) for block, bits in kept if bits)
            for pool in [pool for pool, replica in self._pools.items() if replica in gone]:
                del self._pools[pool]

    def _best(
        self, blocks: Iterable[int], pool: str | None, free: list[str], load: Mapping[str, int]
    ) -> tuple[str, int]:
        """The replica that knows most of this request, and the tokens that weigh for it."""
        holders, tokens = self._longest(blocks, sum(self._bits.get(replica, 0) for replica in free))
        having = [replica for replica in free if self._bits.get(replica, 0) & holders] or free
        wrote = self._pools.get(pool) if pool is not None else None
        if wrote in having:
            return wrote, max(tokens, POOL_TOKENS)
        return self._less_busy(having, load), tokens

    def _longest(self, blocks: Iterable[int], mask: int) -> tuple[int, int]:
        """Bits of the replicas, of those in `mask`, that have the longest prefix, and its tokens."""
        found, used = 0, []
        for block in blocks:
            bits = self._holders.get(block, 0) & mask
            if not bits:
                break
            found = bits
            used.append(block)
        for block in reversed(used):  # a longer prefix is forgotten before what it begins with
            self._holders.move_to_end(block)
        return found, len(used) * self._block_size

    def _less_busy(self, replicas: list[str], load: Mapping[str, int]) -> str:
        two = replicas if len(replicas) < 2 else self._rng.sample(replicas, 2)
        return min(two, key=load.__getitem__)

    def _learn(self, bit: int, blocks: list[int]) -> None:
        for block in reversed(blocks):
            self._holders[block] = self._holders.get(block, 0) | bit
            self._holders.move_to_end(block)
        while len(self._holders) > self._max_blocks:
            self._holders.popitem(last=False)

    def _hashes(self, tokens: Sequence[int], adapter: str) -> Iterator[int]:
        """Of each prefix of whole blocks."""
        prefix, size = hash(adapter) if adapter else 0, self._block_size
        for end in range(size, len(tokens) + 1, size):
            prefix = hash((prefix, *tokens[end - size : end]))
            yield prefix

    def _bit(self, replica: str) -> int:
        """Its bit; the lowest one that is free where it is new."""
        if replica not in self._bits:
            taken, bit = sum(self._bits.values()), 1
            while taken & bit:
                bit <<= 1
            self._bits[replica] = bit
        return self._bits[replica]
