"""What DFlash2 (Inco AI and z-lab, 2026) adds to a block: convolutions around each layer's sublayers, and a
selector of the path through the likeliest tokens of each row. Parameters have their published names.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculon.runtimes.torch.drafters.dflash.config import DFlashConfig


@dataclass(slots=True)
class BlockRows:
    """Of the call that runs: each row's number in its block, [T]. The anchor is row 0."""

    numbers: Tensor


class BlockConvolution(nn.Module):
    """Two convolutions over the rows of a block, of a sublayer's input x and of its output:

    y[i, c] = sum over taps t <= i of (base[side, t, c] + delta[i, side, t, g(c)]) x[i - t, c]

    delta is a projection of row i of the sublayer's input, and g(c) the group of channel c.
    """

    def __init__(self, config: DFlashConfig, rows: BlockRows):
        super().__init__()
        self.taps, self.groups, self.rows = config.conv_taps, config.conv_groups, rows
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden))
        self.kernel_projection = nn.Linear(config.hidden, 2 * self.taps * self.groups, bias=False)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the input and of the output of a sublayer whose input is x [T, H]: [T, taps, G, H / G]."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups))
        before, after = (self.base_kernel.unflatten(-1, (self.groups, -1)) + delta[..., None]).unbind(1)
        return before, after

    def convolve(self, x: Tensor, kernel: Tensor) -> Tensor:  # [T, H] -> [T, H]
        parts, numbers = x.unflatten(-1, (self.groups, -1)), self.rows.numbers[:, None, None]
        out = kernel[:, 0] * parts
        for tap in range(1, self.taps):
            # a row from before the block counts as zeros, whatever it holds
            out = out + kernel[:, tap] * parts.roll(tap, 0).masked_fill(numbers < tap, 0)
        return out.flatten(-2)


class CandidateSelector(nn.Module):
    """Scores each row's likeliest tokens by the token before: <A[previous] * G h, B[token]>, of rank r.

    h is the row's state, and G h a gate.
    """

    def __init__(self, config: DFlashConfig):
        super().__init__()
        assert config.vocab_size is not None
        size, self.top_k = (config.vocab_size, config.selector_rank), config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(size))
        self.successor_codebook = nn.Parameter(torch.empty(size))
        self.hidden_projection = nn.Linear(config.hidden, config.selector_rank, bias=False)

    def forward(self, previous: Tensor, h: Tensor, candidates: Tensor) -> Tensor:
        """[n], [n, H], [n, k] -> [n, k]"""
        gated = self.predecessor_codebook[previous] * self.hidden_projection(h)
        return (gated.float()[:, None] * self.successor_codebook[candidates].float()).sum(-1)
