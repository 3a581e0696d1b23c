"""What must always add up: the account of a request, and what is left of one that has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speculon.engine.engine import Engine
from tests.tiny.scripted import Result


def check_account(result: Result) -> None:
    """What must always add up."""
    stats, done = result.stats, result.stats.speculation()
    assert stats.emitted == len(result.tokens)
    assert stats.outcomes.total() == stats.rounds
    assert stats.verified_positions == stats.target_calls + stats.drafted_at.total()
    assert (
        stats.accepted == stats.accepted_at.total() == stats.accepted_from.total() <= stats.drafted_at.total()
    )
    assert stats.drafted_from.total() == stats.drafted_at.total()
    assert stats.rounds + stats.reasons.total() <= stats.target_calls
    assert stats.rounds <= stats.draft_calls == stats.proposed.total()
    assert (
        stats.stood_at.total() <= stats.watched_at.total()
        and stats.watched.total() <= stats.watched_at.total()
    )
    assert done.rounds == stats.rounds and done.drafted == done.accepted + done.rejected
    assert sum(source["drafted"] for source in done.by_source.values()) == done.drafted
    assert len(done.per_position) == len(stats.drafted_at) and all(
        0 <= share <= 1 for share in done.per_position
    )
    if stats.rounds:
        assert done.tokens_per_target_call == (done.emitted + done.stop_tokens) / done.target_calls
        assert done.acceptance_rate == done.accepted / done.drafted
    else:
        assert done.drafted == done.acceptance_rate == 0


def unknown_to(engine: Engine) -> bool:
    """Whether no policy remembers a text."""
    kept: dict[str, Callable[[Any], list[dict[int, Any]]]] = {
        "adaptive": lambda policy: [policy.lookaheads],
        "shadow": lambda policy: [policy.shadow._texts],
        "goodput": lambda policy: [policy._running],
    }
    made = engine.policy._made
    return not any(remembered for name in made if name in kept for remembered in kept[name](made[name]))
