"""Taps are the hidden states that the stock model computes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from speculon.core.errors import ConfigError
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.fuse import fuse
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.trial import LENGTHS, Trial
from tests.rounding import assert_near
from tests.tiny.conftest import TINY, tiny_model


def tapped(name: str, layers: tuple[int, ...], fused: bool) -> dict[int, Tensor]:
    """[T, D] after each layer, for two sequences in one flat row."""
    target: Target = wrap_model(tiny_model(name), name=name, fused=fused, share=False)
    target.capture(layers)
    trial = Trial.of(target)
    taps = target.forward(trial.batch, trial.view).taps
    assert taps is not None
    return taps


@cache
def observed(name: str) -> Any:
    """A copy: the library leaves hooks on a model whose states were asked for."""
    return copy.deepcopy(tiny_model(name))


def stock_states(name: str, trial: Trial) -> Iterator[tuple[Tensor, ...]]:
    """For each sequence: after the embeddings and each layer [n, D], the last one after the final norm."""
    row = 0
    for n in LENGTHS:
        ids, positions = trial.batch.input_ids[:, row : row + n], trial.batch.position_ids[:, row : row + n]
        with torch.inference_mode():
            out = observed(name)(
                input_ids=ids, position_ids=positions, use_cache=False, output_hidden_states=True
            )
        yield tuple(states[0] for states in out.hidden_states)
        row += n


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stock"])
@pytest.mark.parametrize("name", TINY)
def test_taps_are_the_stock_models_states(name: str, fused: bool) -> None:
    depth = tiny_model(name).config.num_hidden_layers
    taps = tapped(name, tuple(range(-1, depth)), fused)
    sequences = list(stock_states(name, Trial.of(wrap_model(tiny_model(name), fused=False))))
    for layer in range(-1, depth - 1):
        expected = torch.cat([states[layer + 1] for states in sequences])
        assert_near(taps[layer], expected, 2 + layer)
        if layer + 2 < depth:
            beside = torch.cat([states[layer + 2] for states in sequences])
            assert not torch.allclose(taps[layer], beside, atol=1e-2), "the next layer's would be the same"


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "stock"])
def test_the_last_layer_is_tapped_before_the_final_norm(fused: bool) -> None:
    sequences = list(stock_states("llama", Trial.of(wrap_model(tiny_model("llama"), fused=False))))
    last = tapped("llama", (1,), fused)[1]
    norm = tiny_model("llama").model.norm
    assert_near(norm(last), torch.cat([states[-1] for states in sequences]), 3)
    assert not torch.allclose(last, norm(last), atol=1e-2)


def test_only_tapped_layers_are_kept() -> None:
    target = wrap_model(tiny_model("gemma2"), fused=True, share=False)
    trial = Trial.of(target)
    assert target.forward(trial.batch, trial.view).taps is None
    target.capture((2, 0))
    taps = target.forward(trial.batch, trial.view).taps
    assert taps is not None
    assert sorted(taps) == [0, 2]
    assert target.taps is not None
    assert not target.taps._found, "nothing is held between forwards"


def test_a_tapped_target_can_still_be_fused() -> None:
    target = wrap_model(tiny_model("llama"), fused=False)
    target.capture((0,))
    trial = Trial.of(target)
    before = target.forward(trial.batch, trial.view).taps
    fuse(target, share=True)
    after = target.forward(trial.batch, trial.view).taps
    assert before is not None
    assert after is not None
    assert target.runner.one_loop
    assert_near(after[0], before[0])


def test_a_missing_layer_is_refused() -> None:
    target = wrap_model(tiny_model("llama"))
    with pytest.raises(ConfigError, match="tap of layer 2: .* has layers 0 to 1"):
        target.capture((1, 2))
