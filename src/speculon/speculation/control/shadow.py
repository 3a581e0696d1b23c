"""Drafts that are not verified are compared with what is generated anyway: acceptance without a risk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from speculon.core.config import MAX_DRAFTS
from speculon.core.types import Decision, Draft, Load, Reason, Timing, shared_length
from speculon.decoding.rounds import Budget, Judged
from speculon.decoding.sequence import Sequence
from speculon.speculation.control.fixed import ask_all
from speculon.speculation.control.policy import Policy, Trimmed

# most drafts of a method that a text can have open: judged at each token, none is open for longer
WATCHED = MAX_DRAFTS


@dataclass(frozen=True, slots=True)
class WatchedDraft:
    """What became of a draft that was watched; its tokens beyond the text's end are as if never drafted."""

    method: str
    drafted: int
    accepted: int  # equal to the text from the first one on
    judged: int  # those, and the first one that differs
    overlaps: bool  # it begins inside an earlier draft of its method, or in that one's correction or bonus


@dataclass(slots=True)
class Watch:
    """The open drafts of one method for one text, by the position of their first token."""

    drafts: dict[int, tuple[int, ...]] = field(default_factory=dict)
    leader: int | None = None  # the draft whose round it would be now, had they been verified
    free: int = 0  # first position at which the next round could begin


class Shadow:
    """Follows drafts of many texts until their fate is known.

    Drafts that are not verified begin at each position, and overlap. All are judged; those that do not
    overlap are the rounds that verification would have had with this method alone.
    """

    def __init__(self) -> None:
        self._texts: dict[int, dict[str, Watch]] = {}  # sequence id -> method

    def __len__(self) -> int:
        """Open drafts."""
        return sum(len(watch.drafts) for text in self._texts.values() for watch in text.values())

    def watch(self, seq: Sequence, method: str, tokens: tuple[int, ...]) -> None:
        """Remembers a draft of what follows `seq.tokens`; one of the same method and place takes its place.

        Beyond `WATCHED` open ones of a method a draft is not watched: `judge` was not called for as many
        tokens.
        """
        watch = self._texts.setdefault(seq.id, {}).setdefault(method, Watch())
        start = len(seq.tokens)
        if not tokens or (len(watch.drafts) >= WATCHED and start not in watch.drafts):
            return
        if watch.leader is None and start >= watch.free:
            watch.leader = start
        watch.drafts[start] = tokens

    def judge(self, seq: Sequence, ended: bool = False) -> list[WatchedDraft]:
        """The drafts whose fate the committed tokens tell, all of an ended text; each is returned once."""
        judged: list[WatchedDraft] = []
        if seq.id not in self._texts:
            return judged
        for method, watch in self._texts[seq.id].items():
            for start, tokens in list(watch.drafts.items()):
                written = seq.tokens[start : start + len(tokens)]
                accepted = shared_length(tokens, written)
                differs = accepted < len(written)
                if not (differs or ended or len(written) == len(tokens)):
                    continue
                leads = watch.leader == start
                if leads:
                    watch.leader, watch.free = None, start + accepted + 1
                del watch.drafts[start]
                drafted = len(tokens) if differs else len(written)
                if drafted:
                    judged.append(WatchedDraft(method, drafted, accepted, accepted + differs, not leads))
        return judged

    def forget(self, seq: Sequence) -> None:
        self._texts.pop(seq.id, None)


class ShadowPolicy(Policy):
    """The policy `shadow`: asks as `fixed` does, measures every method, and verifies nothing."""

    def __init__(self) -> None:
        self.shadow = Shadow()

    def decide(self, budgets: list[Budget], load: Load) -> list[Decision]:
        return [ask_all(budget, unused=Reason.SHADOW, chained=False) for budget in budgets]

    def trim(self, method: str, drafts: Mapping[Budget, Draft]) -> dict[Budget, Trimmed]:
        for budget, draft in drafts.items():
            self.shadow.watch(budget.seq, method, draft.tokens)
        return dict.fromkeys(drafts, Trimmed(0))

    def observe(self, judged: list[Judged], timing: Timing) -> None:
        for one in judged:
            self._account(one.seq)

    def forget(self, seq: Sequence) -> None:
        self._account(seq, ended=True)
        self.shadow.forget(seq)

    def _account(self, seq: Sequence, ended: bool = False) -> None:
        """Counts what verification would have met; overlapping drafts it would not have."""
        for draft in self.shadow.judge(seq, ended):
            if not draft.overlaps:
                seq.stats.watch(draft.method, draft.drafted, draft.accepted)
