"""The sizes of a check, its samplers, and prompts that need no data."""

from __future__ import annotations

import random
from math import ceil
from typing import Any

from pydantic import Field

from speculon.core.checked import Checked
from speculon.core.config import IN_PYTHON, MAX_SAMPLES, SamplingParams
from speculon.core.errors import InvalidParameter
from speculon.measure.bench.data import DataPrompt

Q = 0.05  # false discoveries among the rejected cells of a comparison
OVERALL = 0.01  # level of the test of all cells together
LEAST = {"max_tokens": 2, "runs": 16, "positions": 2, "cases": 1, "seeds": 1}
OWN_PARAMETERS = "n seed max_tokens stop structured logprobs prompt_logprobs min_tokens".split() + [
    *IN_PYTHON
]

# Each begins something twice, so that lookups have a match, and has more than one continuation.
PROMPTS = (
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a",
    "The colours are red, green, blue, red, green, blue, red,",
    "import os\nimport sys\nimport re\nimport",
    "for x in range(3):\n    print(x)\nfor y in range(4):\n    print(",
    "Monday: rain. Tuesday: sun. Wednesday: rain. Thursday:",
    '[{"name": "Ann", "age": 31}, {"name": "Ben", "age": 27}, {"name": "',
    "Question: What is 2 + 3?\nAnswer: 5\nQuestion: What is 4 + 4?\nAnswer:",
    "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\n    def pop(self",
    "She opened the door. He opened the window. She closed the door. He",
    "1, 2, 3, 5, 8, 13, 1, 2, 3, 5,",
    "# List of fruits\n- apple\n- pear\n- plum\n\n# List of animals\n-",
    "try:\n    value = int(text)\nexcept ValueError:\n    value = None\ntry:\n",
    "To be, or not to be, that is the question. To do, or not to do,",
    "SELECT name FROM users WHERE id = 1;\nSELECT name FROM",
    "x = 1\ny = 2\nprint(x, y)\nx = 3\ny =",
    "English: good morning. French: bonjour. English: good night. French:",
)
SAMPLERS = (
    SamplingParams(),
    SamplingParams(temperature=0.8, top_p=0.95),
    SamplingParams(temperature=0.9, top_k=40, min_p=0.02, repetition_penalty=1.2),
)
# 3 % of the tokens of a whole check; planted errors are found all the same
QUICK: dict[str, Any] = {
    "prompts": PROMPTS[:8],
    "samplers": (SAMPLERS[0], SAMPLERS[-1]),
    "max_tokens": 24,
    "runs": 64,
    "positions": 5,
    "cases": 1,
}


class CheckPlan(Checked):
    """The sizes of a check. Raises `InvalidParameter` for what cannot be."""

    prompts: tuple[str | DataPrompt, ...] = PROMPTS
    samplers: tuple[SamplingParams, ...] = SAMPLERS
    max_tokens: int = Field(64, description="of a greedy or seeded completion")
    runs: int = Field(192, description="sampled completions per arm, prompt and sampler")
    positions: int = Field(12, description="tokens of a sampled completion")
    cases: int = Field(4, description="number of prompts that are sampled from, from the first on")
    seeds: int = Field(4, description="seeded completions per prompt and sampler")
    # planted errors are found with every method at this share (docs/check.md)
    control: float = Field(
        0.5, description="share of wrong drafts that the control accepts; the check must detect it"
    )
    seed: int = Field(0, description="seed of the check")  # of everything random here; no two arms share one

    def __init__(self, /, **values: Any):
        super().__init__(**values)
        if not self.prompts or not all(self.prompts):
            raise InvalidParameter("prompt", "", "must not be empty")
        texts = [
            prompt if isinstance(prompt, str) else prompt.content
            for prompt in self.prompts
            if isinstance(prompt, str) or not prompt.follows
        ]
        if twice := [text for text in texts if texts.count(text) > 1]:
            raise InvalidParameter("prompt", str(twice[0]), "must not be given twice")
        if not self.samplers or any(sampler.greedy for sampler in self.samplers):
            advice = "must be above 0: greedy texts are checked in any case"
            raise InvalidParameter("sampler", "temperature 0", advice)
        for name in OWN_PARAMETERS:
            if any(name in sampler.model_fields_set for sampler in self.samplers):
                raise InvalidParameter("sampler", name, "must not be set, because the check chooses it")
        for name, least in LEAST.items():
            if getattr(self, name) < least:
                raise InvalidParameter(name, getattr(self, name), f"must be at least {least}")
        if self.seeds > MAX_SAMPLES:
            raise InvalidParameter("seeds", self.seeds, f"must be at most {MAX_SAMPLES}")
        if not 0 < self.control <= 1:
            raise InvalidParameter("control", self.control, "must be above 0 and at most 1")

    @property
    def sampled(self) -> list[tuple[int, int]]:
        """(prompt, sampler) of each block of the two-arm test."""
        return [(i, j) for i in range(min(self.cases, len(self.prompts))) for j in range(len(self.samplers))]

    @property
    def cells(self) -> int:
        return len(self.sampled) * (self.positions + 1)

    @property
    def permutations(self) -> int:
        """Enough for a single cell to be rejected: its p must come below Q / cells."""
        return max(1999, 2 * ceil(self.cells / Q))

    def chance(self, *what: object) -> random.Random:
        """A generator of its own for every name."""
        return random.Random(repr((self.seed, *what)))


def named(sampler: SamplingParams) -> str:
    """`T 0.8, top_p 0.95`."""
    names = sorted(sampler.model_fields_set - {"temperature"})
    return ", ".join([f"T {sampler.temperature:g}", *(f"{name} {getattr(sampler, name)}" for name in names)])
