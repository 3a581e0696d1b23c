"""What is compared with what: modes, workloads, concurrency."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from speculon.core.checked import Checked
from speculon.core.config import MAX_DRAFTS, USUAL_DRAFTS, EngineConfig
from speculon.core.errors import InvalidParameter
from speculon.measure.bench import workloads
from speculon.measure.bench.data import DATA, PromptFile, read_prompts
from speculon.measure.bench.workloads import BuilderTable, Size
from speculon.speculation.proposers.registry import OFF, check_method

AGAIN = "off again"  # the same as `off`: how far its ratio is from 1 is the noise
FIXED = "fixed"  # the policy that others are compared with
MODES = (
    *(OFF, "ngram:8", "suffix:8", "suffix:16", "draft_model:2", "draft_model:4", "eagle3:3", "auto:8"),
    *("auto/adaptive", "auto:8/solo", "auto"),
)
CONCURRENCY = (1, 4, 8)
QUICK: dict[str, Any] = {"prompts": 8, "max_tokens": 64, "repeats": 1, "concurrency": (1, 4)}
RULES = ("matching", "rejection", "block")
FORM = re.compile(r"(?P<method>[^:/+]+)(:(?P<k>[0-9]{1,4}))?(?P<names>(/[^/]+)*)")


@dataclass(frozen=True, slots=True)
class Mode:
    label: str
    speculation: Mapping[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.label not in {OFF, AGAIN}

    def policy(self, default: str) -> str:
        """The policy of its requests in an engine that is set to `default`."""
        return str(self.speculation.get("policy", default)) if self.speculates else FIXED


def parts_of(value: Any) -> Any:
    """`code,edit` as a tuple."""
    if not isinstance(value, str):
        return value
    return tuple(part.strip() for part in value.split(",") if part.strip())


def numbers_of(value: Any) -> Any:
    parts = parts_of(value)
    if isinstance(value, str) and not all(part.isdecimal() for part in parts):
        raise ValueError("must be whole numbers with commas between them")
    return parts


NameList = Annotated[tuple[str, ...], BeforeValidator(parts_of)]
Numbers = Annotated[tuple[int, ...], BeforeValidator(numbers_of)]
LIST: dict[str, Any] = {"metavar": "LIST"}


class BenchPlan(Checked):
    """What to compare. Raises `InvalidParameter` or `UnknownMethod` for what cannot be."""

    workloads: NameList = Field(
        tuple(workloads.WORKLOADS),
        description="of code, edit, prose, mixed, warm; NAME@T: at temperature T (default: all)",
        json_schema_extra=LIST,
    )
    data: PromptFile | None = Field(
        None,
        description="prompts as JSON lines, or .gz of them: Spec-Bench, chats, prompts, HumanEval; each "
        "category is a workload, instead of the usual ones or beside those of --workloads",
        json_schema_extra={"metavar": "FILE"},
    )
    modes: NameList = Field(
        MODES,
        description="METHOD:K/POLICY/RULE, of which only METHOD is required: auto, suffix:8, auto:8/solo, "
        "draft_model:4/block. Without POLICY a mode with K is fixed, and one without K runs under "
        "--policy (default: methods at several K, and auto under three policies)",
        json_schema_extra=LIST,
    )
    concurrency: Numbers = Field(
        CONCURRENCY, description="concurrent requests (default: 1,4,8)", json_schema_extra=LIST
    )
    request_rate: float | None = Field(
        None,
        gt=0,
        allow_inf_nan=False,
        description="requests per second, which arrive as a Poisson process, and of which --concurrency run "
        "at a time (default: batches of --concurrency that begin together)",
    )
    prompts: int = Field(32, description="per workload")
    max_tokens: int = Field(128, description="most tokens per prompt")
    repeats: int = Field(1, description="measurements of each mode; medians are reported")

    def __init__(self, /, **values: Any):
        if values.get("request_rate") is not None:
            values.setdefault("workloads", tuple(n for n in workloads.WORKLOADS if not workloads.in_loops(n)))
        super().__init__(**values)
        for name in ("workloads", "modes", "concurrency"):
            if not getattr(self, name):
                raise InvalidParameter(name, "", "must name at least one")
            if len(set(getattr(self, name))) < len(getattr(self, name)):
                raise InvalidParameter(
                    name, ",".join(map(str, getattr(self, name))), "must not name the same twice"
                )
        for name in ("prompts", "max_tokens", "repeats"):
            if getattr(self, name) < 1:
                raise InvalidParameter(name, getattr(self, name), "must be at least 1")
        for count in self.concurrency:
            if not 1 <= count <= self.prompts:
                raise InvalidParameter(
                    "concurrency", count, f"must be from 1 to the number of prompts, {self.prompts}"
                )
        highest = max(self.concurrency)
        for name in self.workloads:
            workloads.parse(name, self.more)
            if highest > self.cases(name):
                reason = (
                    f"must be at most {self.cases(name)}, the prompts of {name} in "
                    f"{self.data and self.data.path}"
                )
                raise InvalidParameter("concurrency", highest, reason)
            if self.request_rate is not None:
                self.refuse_for_arrivals(name, highest)
            if workloads.in_loops(name) and self.prompts < 2 * highest:
                reason = f"{name} needs at least {2 * highest}: two edits for each of {highest} users"
                raise InvalidParameter("prompts", self.prompts, reason)
        for mode in self.modes:
            parse_mode(mode)

    def refuse_for_arrivals(self, workload: str, highest: int) -> None:
        """Raises for a workload whose requests cannot arrive at a rate, or are too few to show one."""
        if workloads.in_loops(workload):
            reason = "its users wait for each answer, so its requests cannot arrive at a request rate"
            raise InvalidParameter("workloads", workload, reason)
        if self.cases(workload) < 2 * highest:
            reason = (
                f"a request rate needs at least {2 * highest} with concurrency {highest}, so that requests "
                "follow each other"
            )
            raise InvalidParameter("prompts", self.cases(workload), reason)

    @property
    def more(self) -> BuilderTable:
        """The workloads that are not built in."""
        return self.data.workloads if self.data else {}

    def cases(self, workload: str) -> int:
        """How many there are: of a file's workload no more than it has."""
        own = self.data.prompts.get(workload.partition("@")[0]) if self.data else None
        return self.prompts if own is None else min(self.prompts, len(own))

    @property
    def compared(self) -> list[Mode]:
        """Plain decoding twice, and between them the modes of the plan."""
        modes = [parse_mode(mode) for mode in self.modes if mode != OFF]
        return [parse_mode(OFF), *modes, Mode(AGAIN, parse_mode(OFF).speculation)]

    def size(self, context: int, workload: str = "") -> Size:
        return Size(self.cases(workload), self.max_tokens, context, max(self.concurrency))

    def groups(self, workload: str, concurrency: int) -> int:
        """Batches that are measured in each mode and repeat; one of all cases where they arrive at a rate."""
        if self.request_rate is not None:
            return 1
        each = self.size(context=0).edits if workloads.in_loops(workload) else 1
        return self.cases(workload) // each // concurrency * each

    @property
    def users(self) -> int:
        """Pools that are in use at a time: each mode has its own."""
        return max(self.concurrency) * len(self.modes)

    @property
    def measurements(self) -> int:
        """How many there will be, warm-up included."""
        runs = sum(
            1 + self.repeats * self.groups(workload, count)
            for workload in self.workloads
            for count in self.concurrency
        )
        return len(self.compared) * runs

    def at_hand(self, lacking: Callable[[str], object]) -> BenchPlan:
        """Without the modes that have no drafter; `lacking` gives the reason, by method."""
        modes = tuple(mode for mode in self.modes if not lacking(parse_mode(mode).speculation["method"]))
        return BenchPlan(**{**dict(self), "modes": modes})

    def engine_settings(self, settings: Mapping[str, Any], config: EngineConfig) -> dict[str, Any]:
        """Those of the command line, with what follows from the plan where nobody set it."""
        settings, speculation = dict(settings), config.speculation
        if "suffix_pools" not in speculation.model_fields_set:
            pools = max(speculation.suffix_pools, self.users)
            settings["speculation"] = {**settings.get("speculation", {}), "suffix_pools": pools}
        if config.warmup is None:  # a mode may name another policy than the engine's
            policies = {parse_mode(mode).policy(speculation.policy) for mode in self.modes}
            settings["warmup"] = policies != {FIXED}
        return settings


def make_plan(options: Mapping[str, Any], quick: bool) -> BenchPlan:
    """The plan of the options that were set on a command line.

    Of a file all is measured unless a part of it was named, at concurrencies that its prompts suffice for.
    """
    fields = {**(QUICK if quick else {}), **options}
    if DATA in options:
        data = read_prompts(Path(options[DATA]))
        fields |= {DATA: data, "workloads": with_data(data, parts_of(options.get("workloads", ())))}
        if "concurrency" not in options:
            fewest = min(map(len, data.prompts.values()))
            fewest //= 1 if fields.get("request_rate") is None else 2
            usual = fields.get("concurrency", CONCURRENCY)
            fields["concurrency"] = tuple(count for count in usual if count <= fewest)
    return BenchPlan(**fields)


def with_data(data: PromptFile, names: tuple[str, ...]) -> tuple[str, ...]:
    """The named workloads. `data` and `data@T` are all of the file, and so is naming none of it."""
    chosen: list[str] = []
    for text in names:
        name, at_sign, temperature = text.partition("@")
        every = data.prompts if name == DATA else (name,)
        chosen += [f"{workload}{at_sign}{temperature}" for workload in every]
    if not any(name.startswith(f"{DATA}:") for name in chosen):
        chosen += data.prompts
    return tuple(chosen)


def parse_mode(text: str) -> Mode:
    """`off`, `auto`, `ngram:8`, `auto:8/solo`, `draft_model:4/rejection`: METHOD[:K][/POLICY][/RULE].

    A mode with K and without a policy is `fixed`; one with neither runs under the engine's policy. Raises
    `UnknownMethod` or `InvalidParameter`.
    """
    parts = FORM.fullmatch(text)
    if parts is None:
        raise wrong(text)
    method, k, names = parts["method"], parts["k"], parts["names"].split("/")[1:]
    check_method(method)
    if method == OFF:
        if k or names:
            raise InvalidParameter("modes", text, "off must have neither K nor a policy nor a rule")
        return Mode(text, {"method": OFF, "policy": FIXED})
    policy = names.pop(0) if names and names[0] in USUAL_DRAFTS else FIXED if k else None
    rule = names.pop(0) if names and names[0] in RULES else None
    if names or (k and not 1 <= int(k) <= MAX_DRAFTS):
        raise wrong(text)
    options = {"num_speculative_tokens": k and int(k), "policy": policy, "acceptance": rule}
    return Mode(text, {"method": method} | {name: v for name, v in options.items() if v is not None})


def wrong(text: str) -> InvalidParameter:
    """The error of a mode of another form."""
    policies, rules = ", ".join(USUAL_DRAFTS), ", ".join(RULES)
    form = f"must be METHOD[:K][/POLICY][/RULE]: K is from 1 to {MAX_DRAFTS}"
    return InvalidParameter("modes", text, f"{form}, policies are {policies}, rules {rules}")
