"""Prediction layers in the target's own checkpoint draft token by token (MTP, DeepSeek-V3 2024).

Draft position j is that of module j; the last module drafts all that follow, from its own states. What a
module yields for committed tokens lies in pages, where the next one reads it, as the target's states do. See
`runtimes.torch.drafters.mtp.network` for which row lies where.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from speculon.checkpoints.locate import locate
from speculon.core.config import SpeculationConfig
from speculon.core.errors import ConfigError
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.host import DrafterHost
from speculon.runtimes.torch.drafters.mtp.load import load_mtp, mtp_needs
from speculon.runtimes.torch.drafters.mtp.network import MtpHead
from speculon.runtimes.torch.drafters.mtp.tensors import MTP, MtpConfig, mtp_of
from speculon.runtimes.torch.drafters.state_drafter import StateDrafter
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.model.target import Runner
from speculon.speculation.proposers.chain import draft_chain

if TYPE_CHECKING:
    from torch import Tensor

    from speculon.runtimes.torch.kv.draft_pages import DraftPages

NAME = MTP
AS_IT_IS = "neither compiled nor captured: a layer of the target's class runs as it is"

log = logging.getLogger("speculon")


class Mtp(StateDrafter):
    """One call of a module per draft position for all sequences of the round."""

    def __init__(self, config: MtpConfig, host: DrafterHost, min_confidence: float = 0.0):
        super().__init__(host, min_confidence)
        self.config, self.fuse = config, host.fuse
        self.needs = mtp_needs(config, self.target, host.rows, host.scored)
        self.head: MtpHead

    @classmethod
    def build(cls, config: SpeculationConfig, host: DrafterHost) -> Mtp:
        """Raises `ConfigError` without a folder, `UnsupportedModel` where the folder has no such layers."""
        source = config.drafts.get(NAME) or host.model.source
        if not isinstance(source, str):
            raise ConfigError(f"{NAME} reads the target's checkpoint, and this target came from no folder")
        checkpoint = mtp_of(locate(source))
        log.info("%s: %s", NAME, checkpoint.summary())
        return cls(checkpoint, host, config.draft_min_confidence)

    def load(self) -> None:
        self.head, own = load_mtp(self.config, self.target, self.needs.layers, self.fuse)
        self.needs = replace(self.needs, bytes_fixed=own)
        count = len(self.head.modules)
        self.runner = Runner(self.head.run, count, refused=Counter({AS_IT_IS: count}))

    def _propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
        rest = self.pages.catch_up(seqs, self.max_rows, self._read, first=1)
        states: dict[int, Tensor] = {}  # by index, of its last row [H]

        def forward(which: list[int], drafts: list[list[int]]) -> Tensor:
            step = len(drafts[which[0]])
            module = min(step, self.head.last)
            if not step:
                after = self._read([rest[i] for i in which])
            else:
                # a module's first draft also needs its rows of the drafts before it
                rows = step if step <= self.head.last else 1
                ranges = [self._last_range(seqs[i], module, step, rows) for i in which]
                ids = [t for i, (_, a, b) in zip(which, ranges, strict=True) for t in drafts[i][a - b :]]
                before = None if step <= self.head.last else torch.stack([states[i] for i in which])
                after = last_rows(self._forward(module, ranges, ids, before), ranges)
            states.update(zip(which, after, strict=True))
            return self.head.logits(module, after, self.vocab_size)

        return draft_chain(NAME, seqs, ks, forward, self.min_confidence)

    def _read(self, ranges: list[TokenRange]) -> Tensor:  # [B, H]
        """Rows of committed tokens through every module; the state of module 0 after each range."""
        after = []
        for module in range(self.head.last + 1):
            own = [(seq, max(start, self._first_slot(seq, module)), end) for seq, start, end in ranges]
            own = [(seq, start, end) for seq, start, end in own if start < end]
            if not own:
                break
            ids = [token for seq, start, end in own for token in seq.tokens[start:end]]
            after.append(self._forward(module, own, ids, None))
        self.pages.mark(ranges)
        return last_rows(after[0], ranges)

    @torch.inference_mode()
    def _forward(
        self, module: int, ranges: list[TokenRange], ids: list[int], states: Tensor | None
    ) -> Tensor:  # [T, H]
        """One call of a module; it reads `states` [T, H], or those before each row in the pages."""
        modules = self.head.last + 1
        if states is None:
            before = self.pages if module == 0 else self.own.after(modules + module - 1)
            states = self._states(module, ranges, before)
        positions = [slot - 1 - module for _, start, end in ranges for slot in range(start, end)]
        flat = torch.tensor([ids, positions], device=states.device)
        view = self.own.view(ranges, first=module + 1)
        out = self.head.run(module, flat[0], states, flat[1], view)
        if module < self.head.last:
            view.keep(modules + module, [out])
        return out

    def _states(self, module: int, ranges: list[TokenRange], before: DraftPages) -> Tensor:
        """What a module reads for rows of these ranges, which lies one slot before each."""
        states = before.taps([(seq, start - 1, end - 1) for seq, start, end in ranges])
        return states if module else self.head.final_norm(states)

    def _first_slot(self, seq: Sequence, module: int) -> int:
        """Where the rows of a module begin; earlier ones would read states before the first or released."""
        return self.pages.of(seq).released + module + 1

    def _last_range(self, seq: Sequence, module: int, drafts: int, rows: int) -> TokenRange:
        """The last rows of a module, at most `rows`, when `drafts` tokens follow those of a sequence."""
        end = len(seq.tokens) + drafts
        return seq, max(end - rows, self._first_slot(seq, module)), end


def last_rows(states: Tensor, ranges: list[TokenRange]) -> Tensor:  # [T, H] -> [B, H]
    lengths = torch.tensor([end - start for _, start, end in ranges], device=states.device)
    return states[lengths.cumsum(0) - 1]
