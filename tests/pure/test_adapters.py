"""What names an adapter beside its model: pools of earlier answers, pages, and the routing of replicas."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from speculon.decoding.sequence import Sequence
from speculon.operations.cluster.routing import Routing
from speculon.runtimes.torch.kv.blocks import BlockPool
from speculon.speculation.proposers.pools import Pools, belongs, key_of
from tests.builders import make_sequence


def test_an_adapter_has_pools_of_its_own_which_go_with_the_name() -> None:
    keys = {adapter: key_of("me", (), "tenant", adapter) for adapter in ("", "a", "b")}
    assert len({*keys.values()}) == 3 and keys[""] == key_of("me", (), "tenant")
    by_prompt = {key_of(None, (1, 2), "tenant", adapter) for adapter in ("", "a", "b")}
    assert len(by_prompt) == 3 and key_of("", (), "tenant", "a") is None
    assert all(
        belongs(str(key), "tenant", "me") and belongs(str(key), "tenant", None) for key in keys.values()
    )
    others = [key_of("you", (), "tenant", "a"), key_of("me", (), "other", "a"), *by_prompt]
    assert not any(belongs(str(key), "tenant", "me") for key in others)
    pools = Pools(8, 64, 100.0, 96)
    for key in (*keys.values(), *others):
        pools.add(str(key), [1, 2, 3])
    assert pools.forget("tenant", "me") == 3 and len(pools.sizes) == len({*others})


def computed(pool: BlockPool, tokens: list[int], adapter: str) -> tuple[Sequence, int]:
    """A sequence whose tokens are in pages, and how many of them it found."""
    seq = make_sequence(tokens)
    seq.request = replace(seq.request, adapter=adapter)
    found = pool.open(seq)
    pool.extend(seq, len(tokens))
    seq.committed = len(tokens)
    pool.cut_to_committed(seq)
    return seq, found


def test_pages_of_different_adapters_never_cross() -> None:
    pool, tokens, live, found = BlockPool(64, 4), [*range(13)], [], {}
    for adapter in ("", "a", "b", "a", "b", ""):
        seq, count = computed(pool, tokens, adapter)
        live.append(seq)
        found.setdefault(adapter, []).append(count)
    assert found == {"": [0, 12], "a": [0, 12], "b": [0, 12]}
    pool.check_integrity(live)
    pages = [set(pool.of(seq).table[:3]) for seq in live]
    assert pages[1] == pages[3] and pages[2] == pages[4] and pages[0] == pages[5]
    assert not (pages[0] & pages[1] or pages[1] & pages[2] or pages[0] & pages[2])


def test_a_prefix_is_routed_by_its_adapter() -> None:
    routing, prompt = Routing(rng=Random(0)), [*range(64)]
    load = {"x": 1, "y": 0}
    routing.sent("x", prompt, None, "a")
    assert routing.choose(prompt, None, load, 8, "a") == "x"
    assert routing.choose(prompt, None, load, 8) == routing.choose(prompt, None, load, 8, "b") == "y"
    routing.wrote("y", prompt, None)
    assert routing.choose(prompt, None, {"x": 0, "y": 1}, 8) == "y"
    assert routing.choose(prompt, None, {"x": 0, "y": 1}, 8, "a") == "x"
