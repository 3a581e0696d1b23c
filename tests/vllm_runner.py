"""vLLM's runner as far as a proposer sees it: rows that are filled, moved and emptied, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

EOS = 0
Next = Callable[[list[int]], int]  # the target: the token after a text


def vllm_config(rank: int = 0, ranks: int = 1, drafts: int = 16, **more: Any) -> Any:
    """What the plug-in reads of a `VllmConfig`."""
    parallel = {
        "rank": rank,
        "tensor_parallel_size": ranks,
        "pipeline_parallel_size": 1,
        "world_size": ranks,
        "distributed_executor_backend": "mp",
    }
    return SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=drafts),
        model_config=SimpleNamespace(
            max_model_len=1024,
            get_vocab_size=lambda: 1000,
            hf_text_config=SimpleNamespace(eos_token_id=EOS),
        ),
        parallel_config=SimpleNamespace(**parallel | more),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=512),
    )


@dataclass(eq=False)
class FakeRequest:
    tokens: list[int]
    target: Next
    most: int = 10**9  # of its tokens, prompt included
    chunks: int = 1  # steps that its prompt takes
    drafts: list[int] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return self.tokens[-1] == EOS or len(self.tokens) >= self.most


class FakeRunner:
    """Calls a proposer once per step. A step takes `ms` of (rows, drafts in all)."""

    def __init__(self, ms: Callable[[int, int], float] = lambda rows, drafts: 4 + 0.2 * rows + 0.1 * drafts):
        self.ms, self.now = ms, 0.0
        self.rows: list[FakeRequest] = []
        self.lengths = np.zeros(64, np.int32)
        self.table = np.full((64, 1024), 7, np.int32)  # what earlier requests left there
        self.verified = 16  # drafts of a request, at most: a full step has room for no more
        self.drafted = 0

    def clock(self) -> float:
        return self.now / 1e3

    def step(self, proposer: Any) -> None:
        """Ended requests leave, the last rows move to the gaps, then all rows run."""
        for i, one in reversed([*enumerate(self.rows)]):
            if one.done:
                self.leave(i)
        drafts = [one.drafts[: self.verified] for one in self.rows]
        self.now += self.ms(len(self.rows), sum(map(len, drafts)))
        new = [self._run(one, some) for one, some in zip(self.rows, drafts, strict=True)]
        for i, one in enumerate(self.rows):
            self.lengths[i] = len(one.tokens)
            self.table[i, : len(one.tokens)] = one.tokens
        self.drafted += sum(map(len, drafts))
        found = proposer.propose(new, self.lengths, self.table, slot_mappings=None)
        for one, some in zip(self.rows, found, strict=True):
            one.drafts = some

    def leave(self, row: int) -> FakeRequest:
        """A request without its row, as when it ends or is preempted; its drafts are lost."""
        gone, last = self.rows[row], self.rows.pop()
        if row < len(self.rows):
            self.rows[row] = last
        gone.drafts = []
        return gone

    def _run(self, one: FakeRequest, drafts: list[int]) -> list[int]:
        if one.chunks > 1:
            one.chunks -= 1
            return []
        own = list[int]()
        for draft in [*drafts, None]:
            own.append(one.target(one.tokens + own))
            if own[-1] != draft:
                break
        one.tokens = one.tokens + own
        return own
