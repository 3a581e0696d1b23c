"""An advice in words and in tables."""

from __future__ import annotations

from collections.abc import Iterable

from speculon.bench.advise import LOOKED_UP, Advice
from speculon.bench.advise_check import Check
from speculon.bench.advise_maths import Estimate, Prices, Way, best
from speculon.bench.tables import grid, number

CLOSE = 0.03  # settings within this of the best are named beside it
NOISY = 0.05  # of plain decoding against itself
COLUMNS = ("method", "K", "x plain", "90 %", "tok/call", "accepted", "needed", "cost", "may cost")
LEGEND = (
    "x plain: expected speed of decoding, at the best K; 90 %: where it lies if texts and times are drawn anew; tok/call: "
    "tokens that a call of the target brings; accepted: of drafts whose forerunners all stood; needed: acceptance from which on "
    "some K pays; cost: of a guess, as a share of a plain step; may cost: what would still pay at that acceptance"
)

ACCEPTANCE_LEGEND = "acceptance at each position of a draft, when those before it stood, at the most drafts looked at"
COSTS_LEGEND = "ms (medians): of a step of the target by drafts of each text, and of a proposal by the drafts asked for"


def answer(advice: Advice) -> list[str]:
    """The whole answer, a sentence or two a line, the most important first."""
    lines = [headline(advice), *why(advice), *thresholds(advice)]
    if advice.helps:
        lines += [depth(advice)]
    return [*lines, *together(advice), *crowds(advice), *where(advice), *doubts(advice), *map(checked, advice.checks)]


def headline(advice: Advice) -> str:
    one, crowd = advice.candidate, at_once(advice.wish.at_once)
    if advice.helps:
        return f"Yes, draft here: {setting(one)} is expected to be {times(one)} as fast as plain decoding, {crowd}."
    best_try = f"the best setting, {setting(one)}, is expected to be {times(one)} as fast as plain decoding, {crowd}"
    if advice.overruled:
        return f"No, leave drafting off: {best_try}, but measured live it was not faster. The measurement counts."
    if one.open:
        return f"No, leave drafting off: {best_try}, which is not told from noise. More prompts may settle it."
    return f"No, leave drafting off: nothing helps; {best_try}."


def why(advice: Advice) -> list[str]:
    one = advice.candidate
    now = one.speed
    cost = (now.verify_ms + now.draft_ms + now.start_ms) / now.plain_ms
    return [
        f"A call of the target brings {now.tokens_per_call:.2f} tokens and costs {cost:.2f} plain steps: {now.verify_ms:.1f} ms "
        f"to check, {now.draft_ms + now.start_ms:.1f} ms to draft, where a plain step takes {now.plain_ms:.1f} ms."
    ]


def thresholds(advice: Advice) -> list[str]:
    """From which acceptance on each method pays, and up to which cost of a guess."""
    return [threshold(advice, way) for way in advice.ways if len(way.chain) == 1]


def threshold(advice: Advice, way: Way) -> str:
    crowd = advice.wish.at_once
    one, needed, most = best(advice.at(crowd, way.name)), advice.break_even(way, crowd), advice.dearest_guess(way, crowd)
    if one.walk.acceptance is None:
        return f"`{way.name}` never had a guess in these texts."
    found = f"found: {one.walk.acceptance:.0%}"
    if needed is None:
        return (
            f"`{way.name}` could not pay even if every guess stood ({found}): a guess costs {one.guess_cost:.2f} of a plain "
            f"step, and checking has its price, too. It takes a drafter that is much smaller than its target."
        )
    begins = f"`{way.name}` pays from an acceptance of {needed[0]:.0%} on (K = {needed[1]}), where it has a guess; {found}"
    if way.name in LOOKED_UP:
        return f"{begins}. Its guesses are free."
    if most <= 0:
        return f"{begins}. So not even a free guess would pay: checking costs more than these guesses bring."
    return f"{begins}. At that, a guess may cost {most:.2f} of a plain step; it costs {one.guess_cost:.2f}."


def depth(advice: Advice) -> str:
    one = advice.candidate
    rivals = [each.k for each in advice.at(one.texts, one.way.name) if each is not one and each.ratio > one.ratio * (1 - CLOSE)]
    edge = f" It is the largest that was looked at: try --num-speculative-tokens {2 * one.k}." if one.k == advice.wish.k else ""
    beside = f"; within {CLOSE:.0%} of it: {listed(map(str, rivals))}" if rivals else ""
    return f"K = {one.k} is best for `{one.way.name}`{beside}.{edge}"


def together(advice: Advice) -> list[str]:
    """Whether lookups and a draft model are better together than apart."""
    joined = next((way for way in advice.ways if len(way.chain) > 1), None)
    if joined is None:
        return []
    both, *alone = (
        best(advice.at(advice.wish.at_once, name))
        for name in (joined.name, *(way.name for way in advice.ways if way.chain[0] in joined.chain and len(way.chain) == 1))
    )
    other = best(alone)
    verdict = (
        "together"
        if both.low > 1 and both.ratio > other.ratio * (1 + CLOSE)
        else "neither"
        if max(both.ratio, other.ratio) <= 1
        else "it hardly matters"
        if abs(both.ratio / other.ratio - 1) <= CLOSE
        else "not together"
    )
    parts = listed(f"`{one.way.name}` alone {one.ratio:.2f}x (K = {one.k})" for one in alone)
    return [f"Lookup and draft model, {verdict}: `{joined.name}` {both.ratio:.2f}x (K = {both.k}), {parts}."]


def crowds(advice: Advice) -> list[str]:
    """Up to how many texts at once it pays, and what is best beyond."""
    wish = advice.wish
    if len(wish.crowds) == 1:
        return []
    if advice.helps and advice.up_to is None:
        return ["Whether it pays for other crowds is not told from noise."]
    if not advice.helps or advice.up_to is None:
        good = [crowd for crowd in wish.crowds if best(advice.at(crowd)).pays]
        return (
            [f"It would pay for {listed(map(str, good))} at once."] if good else ["Nor does it pay for any other crowd measured."]
        )
    beyond = [crowd for crowd in wish.crowds if crowd > advice.up_to]
    if not beyond:
        return [f"It pays for all crowds measured, up to {advice.up_to} texts at once."]
    said = []
    for crowd in beyond:
        same, other = advice.at_all(advice.candidate, advice.at(crowd))[0], best(advice.at(crowd))
        instead = (
            f"{setting(other)} would pay ({times(other)})"
            if other.pays and (other.way, other.k) != (same.way, same.k)
            else "nothing pays"
        )
        live = advice.live(crowd)
        found = f", but {live.ratio:.2f}x was measured" if live and same.ratio > 1 >= live.ratio else ""
        said.append(f"at {crowd} it is {times(same)} as fast{found}; {instead}")
    return [f"It pays for up to {advice.up_to} at once; {'; '.join(said)}."]


def where(advice: Advice) -> list[str]:
    """The advised setting by where the prompts come from, when that makes a difference to the answer."""
    crowd = advice.wish.at_once
    here = {name: one for name, some in advice.groups.items() for one in some if one.texts == crowd}
    if len(here) < 2:
        return []
    said = listed(f"{name} {one.ratio:.2f}x ({one.low:.2f} to {one.high:.2f})" for name, one in here.items())
    split = len({one.ratio > 1 for one in here.values()}) > 1
    advice_for_each = " Requests of the losing kind had better turn it off for themselves." if split and advice.helps else ""
    return [f"By kind of text, with {setting(advice.candidate)}: {said}.{advice_for_each}"]


def doubts(advice: Advice) -> list[str]:
    """What the figures do not rest on, or should not."""
    said = []
    if loops := [text for text in advice.written if text.loops]:
        share = f"{len(loops)} of {len(advice.written)} texts end repeating themselves, which is easily guessed"
        with_loops = next(one for one in advice.looping if one.texts == advice.wish.at_once)
        apart = f"{share}; they are left out. Over them alone it would be {times(with_loops)}"
        said.append(f"{share}, and too few do not: these figures flatter." if advice.rests_on_loops else f"{apart}.")
    if len(advice.written) < 4:
        said.append(f"{len(advice.written)} text{'s' * (len(advice.written) > 1)} measured: the interval knows little of others.")
    said += [f"`{method}` was not looked at: {reason}." for method, reason in advice.lacking.items()]
    return said


def checked(check: Check) -> str:
    one = check.setting
    kind = "other" if check.held_out else "the same, for want of other,"
    said = (
        f"Checked live on {check.texts} {kind} prompts, {at_once(one.texts)}: predicted {times(one)}, measured "
        f"{check.ratio:.2f}x ({check.low:.2f} to {check.high:.2f}). Tokens per call: {one.speed.tokens_per_call:.2f} "
        f"predicted, {check.tokens_per_call:.2f} measured, with which {check.at_its_tokens:.2f}x would have been predicted; "
        f"plain decoding against itself: {check.again:.2f}x."
    )
    if not check.agrees:
        said += " PREDICTION AND MEASUREMENT DISAGREE: do not rely on the prediction."
    if abs(check.again - 1) > NOISY:
        said += " The machine was not quiet: measure again."
    return said


def setting(one: Estimate) -> str:
    return f"`{one.way.name}`, K = {one.k}"


def times(one: Estimate) -> str:
    return f"{one.ratio:.2f}x ({one.low:.2f} to {one.high:.2f})"


def at_once(crowd: int) -> str:
    return "one text at a time" if crowd == 1 else f"{crowd} texts at once"


def listed(parts: Iterable[str]) -> str:
    *most, last = parts
    return f"{', '.join(most)} and {last}" if most else last


# tables


def rows(advice: Advice, crowd: int) -> list[tuple[str, ...]]:
    """In the order of `COLUMNS`: each way at its best K."""
    return [row(advice, best(advice.at(crowd, way.name))) for way in advice.ways]


def row(advice: Advice, one: Estimate) -> tuple[str, ...]:
    single = len(one.way.chain) == 1
    needed = advice.break_even(one.way, one.texts) if single else None
    return (
        one.way.name,
        str(one.k),
        f"{one.ratio:.2f}",
        f"{one.low:.2f}-{one.high:.2f}",
        f"{one.speed.tokens_per_call:.2f}",
        number(one.walk.acceptance, ".0%"),
        f"{needed[0]:.0%}" if needed else "impossible" if single else "-",
        f"{one.guess_cost:.2f}",
        f"{max(0.0, advice.dearest_guess(one.way, one.texts)):.2f}" if single else "-",
    )


def markdown(advice: Advice) -> str:
    """Every crowd in one table."""
    body = [(str(crowd), *cells) for crowd in advice.wish.crowds for cells in rows(advice, crowd)]
    return grid(("at once", *COLUMNS), body)


def acceptance_markdown(advice: Advice) -> str:
    """Position by position."""
    deepest = advice.wish.k
    ways = [way for way in advice.ways if len(way.chain) == 1]
    found = [(way.name, advice.at(advice.wish.at_once, way.name, deepest)[0].walk.per_position) for way in ways]
    body = [(name, *(f"{a:.0%}" for a in shares), *["-"] * (deepest - len(shares))) for name, shares in found]
    return grid(("position", *map(str, range(1, deepest + 1))), body)


def costs_markdown(advice: Advice) -> str:
    """A row for the target and for each method at each crowd."""
    prices, crowds = Prices.of(advice.costs), advice.wish.crowds
    ks = sorted({k for _, k in advice.costs.verify})
    body = [("target", str(crowd), *(f"{prices.verify.at(crowd, k):.2f}" for k in ks)) for crowd in crowds]
    for method, ms in prices.draft.items():
        body += [(method, str(crowd), "-", *(f"{ms.at(crowd, k):.2f}" for k in ks if k)) for crowd in crowds]
    return grid(("ms", "at once", *(f"K = {k}" for k in ks)), body)
