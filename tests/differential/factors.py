"""What a case draws, and a list of cases in which every pair of values that can meet does meet."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import combinations, count, islice
from typing import Any, NamedTuple

from speculon.core.config import USUAL_DRAFTS

Values = dict[str, Any]
COUNT = 200  # of cases

LOOKUPS = ("ngram", "suffix", "synthetic", "prediction", "scripted", "trees")
DRAFTERS = (
    "draft_model",
    "recurrent draft",
    "other tokenizer",
    "pard",
    "eagle3",
    "dflash",
    "dspark",
    "dflash2",
    "mtp",
    "gemma4_assistant",
)
RECURRENT = ("mamba2", "jamba", "qwen3_next", "qwen3_5 with mtp")
WITH_IMAGES = ("qwen2_5_vl", "gemma3 with images")
WITH_ADAPTERS = ("llama", "gemma3")

# of the engine, and of everything that runs in it
SHARED: dict[str, tuple[Any, ...]] = {
    "target": (
        "llama",
        "qwen3",
        "gemma3",
        "mistral",  # windows in all layers: pages before them are released
        "gpt_oss",
        "deepseek_v3",
        "gpt2",
        "qwen3_moe",
        "deep llama",
        "packed llama",
        "deepseek with mtp",
        "gemma4",
        *RECURRENT,
        *WITH_IMAGES,
    ),
    "dtype": ("float32", "bfloat16"),
    "drafter": ("none", *DRAFTERS),
    "batch": (1, 3, 8),  # requests
    "seats": (8, 2),  # sequences of a step
    "chunk": (512, 24, 7),  # rows of a step
    "pages": ("roomy", "few"),
    "page": (4, 1, 3, 16),  # tokens
    "prefix_cache": (True, False),
    "arrival": ("together", "one by one"),
    "waves": (1, 2),  # how often all of them come
    "mishap": ("none", "abort", "failed steps"),
}
# of each request
OWN: dict[str, tuple[Any, ...]] = {
    "method": ("off", *LOOKUPS, "auto", *DRAFTERS),
    "policy": tuple(USUAL_DRAFTS),
    "drafts": (4, 1, 16),
    "depth": (None, 2),  # of a tree
    "chained": (None, True),
    "acceptance": ("auto", "matching", "rejection", "block"),
    "sampling": ("greedy", "seeded", "filtered", "penalised", "biased", "processed", "unseeded"),
    "samples": (1, 3),
    "logprobs": (None, 0, 3),
    "prompt_logprobs": (None, 2),
    "end": ("length", "end of text", "stop token", "stop string", "least tokens"),
    "form": ("none", "regex", "nested", "choice", "grammar"),
    "adapter": ("", "one", "two"),
    "images": (0, 1, 2),
    "prompt": ("short", "long", "repeated", "shared"),
}
# drawn more often than the others, so that more is drafted, and of what costs less
OFTEN: dict[str, tuple[Any, ...]] = {
    "policy": ("fixed",) * 5,
    "drafts": (4,),
    "samples": (1,) * 2,
    "form": ("none",) * 8,
    "method": ("trees", *DRAFTERS * 3),
}


class Rule(NamedTuple):
    """Where `factor` has one of these values, `other` has one of those."""

    factor: str
    values: tuple[Any, ...]
    other: str
    allowed: tuple[Any, ...]
    why: str

    def forbids(self, values: Mapping[str, Any]) -> bool:
        return (
            self.factor in values
            and self.other in values
            and values[self.factor] in self.values
            and values[self.other] not in self.allowed
        )


TAPPED = ("deep llama", "gemma3", "qwen2_5_vl")
RULES = (
    *(Rule("method", (name,), "drafter", (name,), "the engine has this drafter") for name in DRAFTERS),
    Rule(
        "drafter",
        ("draft_model",),
        "target",
        tuple(t for t in SHARED["target"] if t not in ("qwen3_5 with mtp", "deepseek with mtp", "gemma4")),
        "these are here for the drafter that was trained with them",
    ),
    Rule("drafter", ("recurrent draft",), "target", ("llama", "qwen3_next", "jamba"), "one of each kind"),
    Rule("drafter", ("other tokenizer",), "target", ("llama",), "its weights, under other ids"),
    Rule("drafter", ("pard",), "target", ("llama", "qwen3", "gpt2"), "one with adapters, and others"),
    Rule("drafter", ("eagle3",), "target", TAPPED, "deep ones, and of each kind one with three layers"),
    Rule("drafter", ("dflash",), "target", ("deep llama", "qwen3_next"), "deep, or with states"),
    Rule("drafter", ("dspark", "dflash2"), "target", ("deep llama",), "taps of a deep model"),
    Rule("drafter", ("mtp",), "target", ("deepseek with mtp", "qwen3_5 with mtp"), "its layers are theirs"),
    Rule("drafter", ("gemma4_assistant",), "target", ("gemma4",), "an assistant reads its target's pages"),
    Rule("target", ("packed llama",), "dtype", ("bfloat16",), "packed products are of bf16"),
    Rule(
        "target",
        (*RECURRENT, "deepseek with mtp"),
        "dtype",
        ("float32",),
        "recurrent mixers promise no equal bits, and a checkpoint with layers of its own is loaded once",
    ),
    Rule("adapter", ("one", "two"), "target", WITH_ADAPTERS, "others have no adapters"),
    Rule("images", (1, 2), "target", WITH_IMAGES, "others have no vision tower"),
    Rule(
        "drafter",
        ("other tokenizer", "pard"),
        "form",
        ("none", "regex", "choice", "grammar"),
        "no } in their tokens",
    ),
    Rule("target", ("gemma3 with images",), "chunk", (512, 24), "an image is one chunk"),
)


Pair = tuple[int, int]  # numbers of two values, each of its factor


@dataclass(frozen=True, eq=False)
class Table:
    """What the cases of a runtime are drawn from."""

    shared: dict[str, tuple[Any, ...]]
    own: dict[str, tuple[Any, ...]]
    often: dict[str, tuple[Any, ...]]
    rules: tuple[Rule, ...]
    beginnings: tuple[Values, ...]  # of the first cases

    def narrowed(
        self, values: dict[str, tuple[Any, ...]], rules: tuple[Rule, ...], beginnings: tuple[Values, ...]
    ) -> Table:
        """One with other values of some factors, under rules of its own."""
        shared = {name: values.get(name, of) for name, of in self.shared.items()}
        own = {name: values.get(name, of) for name, of in self.own.items()}
        factors = shared | own
        often = {name: tuple(v for v in of if v in factors[name]) for name, of in self.often.items()}
        return Table(shared, own, often, rules, beginnings)

    @cached_property
    def factors(self) -> dict[str, tuple[Any, ...]]:
        return self.shared | self.own

    @cached_property
    def numbers(self) -> dict[tuple[str, Any], int]:
        return {(n, v): i for i, (n, v) in enumerate((n, v) for n, of in self.factors.items() for v in of)}

    @cached_property
    def of_number(self) -> list[tuple[str, Any]]:
        return list(self.numbers)

    @cached_property
    def bound(self) -> list[str]:
        """Factors that a rule is about."""
        return [name for name in self.factors if any(name in (of.factor, of.other) for of in self.rules)]

    @cached_property
    def free(self) -> list[str]:
        return [name for name in self.factors if name not in self.bound]

    def allowed(self, values: Mapping[str, Any]) -> bool:
        return not any(rule.forbids(values) for rule in self.rules)

    def completed(self, values: Values, chance: random.Random) -> Values | None:
        """These values and random others, by the rules; None where there is no such case."""
        name = next((name for name in self.bound if name not in values), None)
        if name is None:
            return {name: chance.choice(self.choices_of(name)) for name in self.free} | values
        choices = self.choices_of(name)
        for value in chance.sample(choices, len(choices)):
            more = values | {name: value}
            if self.allowed(more) and (found := self.completed(more, chance)):
                return found
        return None

    def choices_of(self, name: str) -> tuple[Any, ...]:
        return self.factors[name] + self.often.get(name, ())

    def pairs_of(self, values: Mapping[str, Any]) -> Iterator[Pair]:
        return combinations([self.numbers[name, values[name]] for name in self.factors], 2)

    def pairs(self, case: Case) -> set[Pair]:
        return {pair for own in case.requests for pair in self.pairs_of(case.shared | own)}

    @cached_property
    def valid_pairs(self) -> frozenset[Pair]:
        """Every pair of values that some case may have."""
        chance, found = random.Random(0), set[Pair]()
        for pair in combinations(range(len(self.numbers)), 2):
            (name, value), (other, its) = (self.of_number[number] for number in pair)
            if name != other and pair not in found and self.allowed(both := {name: value, other: its}):
                if example := self.completed(both, chance):
                    found.update(self.pairs_of(example))
        return frozenset(found)


@dataclass(frozen=True)
class Case:
    number: int
    seed: int  # of the list
    shared: Values
    requests: tuple[Values, ...]

    def __str__(self) -> str:
        lines = [f"case {self.number} of list {self.seed}: {self.shared}"]
        return "\n".join([*lines, *(f"  request {i}: {own}" for i, own in enumerate(self.requests))])


def drafting(methods: Iterable[str]) -> tuple[Values, ...]:
    """Beginnings in which each method drafts, and its text is compared."""
    values = {"policy": "fixed", "drafts": 4, "sampling": "seeded", "acceptance": "auto", "form": "none"}
    return tuple({"method": name, **values} for name in methods)


TORCH = Table(SHARED, OWN, OFTEN, RULES, drafting((*DRAFTERS, *LOOKUPS)))


class Draws:
    """Cases one after the other: each takes pairs that none has had so far, as many as it finds."""

    TRIES = 10

    def __init__(self, table: Table, seed: int):
        self.table, self.seed, self.chance = table, seed, random.Random(seed)
        left = sorted(table.valid_pairs)
        self.chance.shuffle(left)
        self.open = dict.fromkeys(left)  # pairs that are in no case yet

    def __iter__(self) -> Iterator[Case]:
        table = self.table
        for number in count():
            first = self._best(table.beginnings[number] if number < len(table.beginnings) else {})
            shared = {name: first[name] for name in table.shared}
            drawn = [first, *(self._best(shared) for _ in range(1, shared["batch"]))]
            requests = tuple({name: values[name] for name in table.own} for values in drawn)
            yield Case(number, self.seed, shared, requests)

    def _best(self, fixed: Values) -> Values:
        """Of some random ones with these values, the one with the most pairs that are left."""
        best, most = None, -1
        for wanted in self._wanted(fixed):
            made = self.table.completed(fixed | wanted, self.chance)
            if made is not None and (new := sum(p in self.open for p in self.table.pairs_of(made))) > most:
                best, most = made, new
        best = best or self.table.completed(fixed, self.chance)  # where no pair that is left can be completed
        assert best is not None, f"no case has {fixed}"
        for pair in self.table.pairs_of(best):
            self.open.pop(pair, None)
        return best

    def _wanted(self, fixed: Values) -> Iterator[Values]:
        """Pairs that are left and agree with these values."""
        of_number = self.table.of_number
        excluded = {n for n, (name, value) in enumerate(of_number) if fixed.get(name, value) != value}
        found = 0
        for a, b in self.open:
            if a not in excluded and b not in excluded:
                wanted = dict((of_number[a], of_number[b]))
                if self.table.allowed(fixed | wanted):
                    yield wanted
                    found += 1
                    if found == self.TRIES:
                        return
        yield {}


@cache
def cases(table: Table, seed: int, number: int = COUNT) -> list[Case]:
    """The first of them have every pair; what follows is drawn by chance."""
    return list(islice(Draws(table, seed), number))
