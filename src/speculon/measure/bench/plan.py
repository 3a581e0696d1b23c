"""What is compared with what: modes, workloads, concurrency."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from speculon.core.config import MAX_DRAFTS, USUAL_DRAFTS
from speculon.core.errors import InvalidParameter
from speculon.measure.bench import workloads
from speculon.measure.bench.data import PromptFile
from speculon.measure.bench.workloads import Known, Size
from speculon.speculation.proposers.registry import OFF, check_method

AGAIN = "off again"  # the same as `off`: how far its ratio is from 1 is the noise
TRANSFORMERS = "transformers"
VARIANT = "batch-variant"  # `off` with batch_invariant = false: its ratio is what batch invariance costs
BASELINES = frozenset({TRANSFORMERS, VARIANT})  # not modes of the engine
FIXED = "fixed"  # the policy that others are compared with
FIXED_MODES = (
    OFF,
    "ngram:8",
    "suffix:8",
    "suffix:16",
    "draft_model:2",
    "draft_model:4",
    "eagle3:3",
    "auto:8",
)
MODES = (*FIXED_MODES, "auto/adaptive", "auto:8/solo", "auto")
RULES = ("matching", "rejection", "block")
FORM = re.compile(r"(?P<method>[^:/+]+)(:(?P<k>[0-9]{1,4}))?(?P<names>(/[^/]+)*)")


@dataclass(frozen=True, slots=True)
class Mode:
    label: str
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.label not in {OFF, AGAIN, *BASELINES}

    def policy(self, default: str) -> str:
        """The policy of its requests in an engine that is set to `default`."""
        return str(self.speculation.get("policy", default)) if self.speculates else FIXED


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to compare. Raises `InvalidParameter` or `UnknownMethod` for what cannot be."""

    workloads: tuple[str, ...] = tuple(workloads.WORKLOADS)
    modes: tuple[str, ...] = MODES
    concurrency: tuple[int, ...] = (1, 4, 8)
    prompts: int = 32
    max_tokens: int = 128
    repeats: int = 1
    with_transformers: bool = False
    with_variant: bool = False  # plain decoding without batch invariance, too
    widen: int | None = None  # the target, to about this many million parameters
    fuse: bool = True  # the widened target; any other is loaded fused, or not
    data: PromptFile | None = None  # whose categories are workloads, too

    def __post_init__(self) -> None:
        for name in ("workloads", "modes", "concurrency"):
            if not getattr(self, name):
                raise InvalidParameter(name, "", "name at least one")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise InvalidParameter(name, ",".join(map(str, getattr(self, name))), "names one twice")
        for name in ("prompts", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "must be at least 1")
        if self.widen is not None and self.widen < 1:
            raise InvalidParameter("widen", self.widen, "must be at least 1 (million parameters)")
        if self.widen is not None and self.with_variant:
            raise InvalidParameter("widen", self.widen, "is not possible with with_variant")
        for count in self.concurrency:
            if not 1 <= count <= self.prompts:
                raise InvalidParameter(
                    "concurrency", count, f"must be from 1 to the number of prompts, {self.prompts}"
                )
        for name in self.workloads:
            workloads.parse(name, self.more)
            self.check_enough(name)
            if workloads.in_loops(name) and self.prompts < 2 * max(self.concurrency):
                most = max(self.concurrency)
                raise InvalidParameter(
                    "prompts", self.prompts, f"{name} takes {2 * most}: two edits for each of {most} users"
                )
        for mode in self.modes:
            parse_mode(mode)

    def check_enough(self, workload: str) -> None:
        """Raises where a workload of the file has fewer prompts than run at once."""
        available, most = self.cases(workload), max(self.concurrency)
        if most > available:
            reason = f"{workload} has {available} prompts in {self.data and self.data.path}"
            raise InvalidParameter("concurrency", most, reason)

    @property
    def more(self) -> Known:
        """The workloads that are not built in."""
        return self.data.workloads if self.data else {}

    def cases(self, workload: str) -> int:
        """How many there are: of a file's workload no more than it has."""
        own = self.data.prompts.get(workload.partition("@")[0]) if self.data else None
        return self.prompts if own is None else min(self.prompts, len(own))

    def modes_of(self, workload: str, concurrency: int) -> list[Mode]:
        """Plain decoding twice, the modes of the plan, and the baselines that were asked for.

        transformers is comparable where it is greedy, at concurrency 1.
        """
        modes = [parse_mode(mode) for mode in self.modes if mode != OFF]
        _, temperature = workloads.parse(workload, self.more)
        if self.with_transformers and concurrency == 1 and temperature == 0:
            modes.append(Mode(TRANSFORMERS))
        if self.with_variant:
            modes.append(Mode(VARIANT))
        return [parse_mode(OFF), *modes, Mode(AGAIN, parse_mode(OFF).speculation)]

    def size(self, context: int, workload: str = "") -> Size:
        return Size(self.cases(workload), self.max_tokens, context, max(self.concurrency))

    def groups(self, workload: str, concurrency: int) -> int:
        """Batches that are measured in each mode and repeat."""
        each = self.size(context=0).edits if workloads.in_loops(workload) else 1
        return self.cases(workload) // each // concurrency * each

    @property
    def users(self) -> int:
        """Pools that are in use at a time: each mode has its own."""
        return max(self.concurrency) * len(self.modes)

    @property
    def measurements(self) -> int:
        """How many there will be, warm-up included."""
        return sum(
            len(self.modes_of(workload, count)) * (1 + self.repeats * self.groups(workload, count))
            for workload in self.workloads
            for count in self.concurrency
        )

    def at_hand(self, lacking: Callable[[str], object]) -> BenchPlan:
        """Without the modes that have no drafter; `lacking` gives the reason, by method."""
        return replace(
            self,
            modes=tuple(mode for mode in self.modes if not lacking(parse_mode(mode).speculation["method"])),
        )


def parse_mode(text: str) -> Mode:
    """`off`, `auto`, `ngram:8`, `auto:8/solo`, `draft_model:4/rejection`: METHOD[:K][/POLICY][/RULE].

    A mode with K and without a policy is `fixed`; one with neither runs under the engine's policy. Raises
    `UnknownMethod` or `InvalidParameter`.
    """
    found = FORM.fullmatch(text)
    if found is None:
        raise wrong(text)
    method, k, names = found["method"], found["k"], found["names"].split("/")[1:]
    check_method(method)
    if method == OFF:
        if k or names:
            raise InvalidParameter("modes", text, "off has neither K nor a policy nor a rule")
        return Mode(text, {"method": OFF, "policy": FIXED})
    policy = names.pop(0) if names and names[0] in USUAL_DRAFTS else FIXED if k else None
    rule = names.pop(0) if names and names[0] in RULES else None
    if names or (k and not 1 <= int(k) <= MAX_DRAFTS):
        raise wrong(text)
    options = {"num_speculative_tokens": k and int(k), "policy": policy, "acceptance": rule}
    given = {name: value for name, value in options.items() if value is not None}
    return Mode(text, {"method": method, **given})


def wrong(text: str) -> InvalidParameter:
    """The error of a mode of another form."""
    policies, rules = ", ".join(USUAL_DRAFTS), ", ".join(RULES)
    form = f"is not METHOD[:K][/POLICY][/RULE]: K is from 1 to {MAX_DRAFTS}"
    return InvalidParameter("modes", text, f"{form}, policies are {policies}, rules {rules}")
