"""DFlash2 drafters change no token, their blocks and paths are those of the formula, and q is what was drawn
from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.runtimes.torch.drafters.dflash.dflash2 import BlockConvolution, CandidateSelector
from speculon.runtimes.torch.drafters.dflash.network import DFlashNetwork, Drawing
from tests.tiny.blocks import MASK, ask, drafter_of, folder_of, watch_blocks, write_dflash, wrong_blocks
from tests.tiny.heads import deep_model, deep_target
from tests.tiny.requests import accepted_lengths
from tests.tiny.scripted import drain, make_engine, texts_of
from tests.tiny.test_dflash import KS, drafted_with
from tests.tiny.test_eagle3 import plain, requests_of, whole, write

FLASH2: dict[str, Any] = {"format": "dflash2"}
SCALES = {"input_embedding_scale": 1.5, "output_multiplier": 0.4, "final_logit_softcapping": 3.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "scales": {"scales": SCALES},
    "windows": {"windows": (5, None), "causal": False},
    "a group of all channels": {"group": 32, "layers": 1, "taps": (3,)},
    "groups of one channel": {"group": 1},
    "three taps": {"conv_taps": 3},
    "one candidate": {"top_k": 1},
    "all tokens are candidates": {"top_k": 96},
    "another width": {"hidden": 48, "heads": 6, "kv_heads": 3},
    "speculators": {"format": "speculators", "group": 8, "windows": (5, 5), "causal": False},
}


@pytest.mark.parametrize("k", KS)
def test_blocks_and_paths_are_those_of_the_formula(k: int, tmp_path: Path) -> None:
    results, watch = drafted_with(tmp_path, k, **FLASH2)
    assert texts_of(results) == plain("greedy")
    assert accepted_lengths(results) >= set(range(k + 1))
    assert not wrong_blocks(watch, drafter_of(**FLASH2), whole("greedy"))


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_are_those_of_the_formula(variant: str, tmp_path: Path) -> None:
    form = FLASH2 | VARIANTS[variant]
    path = write_dflash(tmp_path, deep_model().config, **form)
    watch = watch_blocks(plain("greedy"))
    results = write(requests_of("greedy")[:4], folder_of(path), ask(4))
    assert texts_of(results) == {key: plain("greedy")[key] for key in results}
    assert not wrong_blocks(watch, drafter_of(**form), whole("greedy"))
    assert len(watch.rounds) > 10


@pytest.mark.parametrize(  # with penalties, and without
    ("number", "acceptance"), [(1, "matching"), (1, "rejection"), (4, "block")]
)
def test_q_is_that_of_the_path(number: int, acceptance: str, tmp_path: Path) -> None:
    """Each draft is what the noise picks of the formula's scores; q is what it was picked from."""
    path = write_dflash(tmp_path, deep_model().config, **FLASH2)
    watch = watch_blocks()
    request = replace(requests_of("sampled")[number], speculation={**ask(6), "acceptance": acceptance})
    engine = make_engine(deep_target(), speculation=folder_of(path))
    seqs = engine.admission.admit(request.id, request.prompt, request.params, request.speculation)
    engine.add_request(request.prompt, request.params, request.speculation, request.id)
    text = [*request.prompt, *drain(engine)[request.id, 0].tokens]
    assert not wrong_blocks(watch, drafter_of(**FLASH2), {(request.id, 0): text}, seq=seqs[0])
    assert len(watch.rounds) > 5
    for made in watch.rounds:
        assert (made.draft.probs is None) == (acceptance == "matching")
        if made.draft.probs is not None:
            assert int((made.draft.probs > 0).sum(-1).max()) <= 5, "no more than its candidates"


# -- planted errors: each must show in the blocks or in the drafts


def convolve_with(
    change: Callable[[BlockConvolution, Tensor], Tensor],
) -> Callable[[pytest.MonkeyPatch], None]:
    """Other numbers of rows than those of the blocks."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        convolve = BlockConvolution.convolve

        def changed(self: BlockConvolution, x: Tensor, kernel: Tensor) -> Tensor:
            kept, self.rows.numbers = self.rows.numbers, change(self, self.rows.numbers)
            try:
                return convolve(self, x, kernel)
            finally:
                self.rows.numbers = kept

        patch.setattr(BlockConvolution, "convolve", changed)

    return plant


across_the_edge = convolve_with(lambda conv, numbers: numbers + conv.taps)
across_sequences = convolve_with(lambda conv, numbers: torch.arange(len(numbers)))
rows_alone = convolve_with(lambda conv, numbers: 0 * numbers)


def one_kernel(patch: pytest.MonkeyPatch) -> None:
    """Of the input, for the output too."""
    kernels = BlockConvolution.kernels
    patch.setattr(BlockConvolution, "kernels", lambda self, x: kernels(self, x)[:1] * 2)


def interleaved_groups(patch: pytest.MonkeyPatch) -> None:
    kernels = BlockConvolution.kernels

    def changed(self: BlockConvolution, x: Tensor) -> tuple[Tensor, ...]:
        base = self.base_kernel.unflatten(-1, (self.groups, -1))
        deltas = [kernel - base[side] for side, kernel in enumerate(kernels(self, x))]
        mixed = [delta.transpose(-1, -2).reshape(delta.shape) for delta in deltas]
        return tuple(base[side] + delta for side, delta in enumerate(mixed))

    patch.setattr(BlockConvolution, "kernels", changed)


def ungated(patch: pytest.MonkeyPatch) -> None:
    forward = CandidateSelector.forward

    def changed(self: Any, previous: Tensor, h: Tensor, candidates: Tensor) -> Tensor:
        kept, self.hidden_projection = self.hidden_projection, lambda h: h.new_ones(())
        try:
            return forward(self, previous, h, candidates)
        finally:
            self.hidden_projection = kept

    patch.setattr(CandidateSelector, "forward", changed)


def without_the_anchor(patch: pytest.MonkeyPatch) -> None:
    """The first row of a path follows a mask."""
    logits = Drawing.logits

    def changed(self: Drawing, which: list[int], row: int, previous: list[int]) -> Tensor:
        return logits(self, which, row, previous if row else [MASK] * len(previous))

    patch.setattr(Drawing, "logits", changed)


def without_pairs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(CandidateSelector, "forward", lambda self, previous, h, candidates: 0 * candidates)


def unscaled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DFlashNetwork, "logits", lambda self, states: self.lm_head(states).float())


PLANTED = [
    across_the_edge,
    across_sequences,
    rows_alone,
    one_kernel,
    interleaved_groups,
    ungated,
    without_the_anchor,
    without_pairs,
    unscaled,
]


@pytest.mark.parametrize("plant", [None, *PLANTED])
def test_planted_errors_show(
    plant: Callable[[pytest.MonkeyPatch], None] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = {**FLASH2, "scales": SCALES}
    if plant is not None:
        plant(monkeypatch)
    results, watch = drafted_with(tmp_path, 4, **form)
    assert texts_of(results) == plain("greedy"), "the text is the target's, however wrong the drafter"
    assert bool(wrong_blocks(watch, drafter_of(**form), whole("greedy"))) == (plant is not None)
