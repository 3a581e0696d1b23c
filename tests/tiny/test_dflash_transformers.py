"""The only DFlash drafter of transformers, on the same weights: its states are those of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers.cache_utils import DFlashCache

from speculon.runtimes.torch.drafters.families import read_dflash_config
from tests.formats.writer import Checkpoint
from tests.rounding import assert_near
from tests.tiny.blocks import MASK, ask, drafter_of, folder_of, watch_blocks, write_dflash
from tests.tiny.heads import deep_model, true_taps
from tests.tiny.scripted import texts_of
from tests.tiny.test_eagle3 import plain, requests_of, whole, write


def stock(drafter: Checkpoint) -> transformers.PreTrainedModel:
    """transformers' model with the weights of a drafter in Meta's format."""
    config = transformers.MuseGlimmerAssistantConfig(
        hidden_size=drafter.hidden,
        intermediate_size=drafter.intermediate,
        num_hidden_layers=drafter.layers,
        num_attention_heads=drafter.heads,
        num_key_value_heads=drafter.kv_heads,
        head_dim=drafter.head_dim,
        rms_norm_eps=drafter.eps,
        rope_parameters={"rope_type": "default", "rope_theta": drafter.rope_theta},
        sliding_window=drafter.windows[0],
        block_size=drafter.block_size,
        mask_token_id=MASK,
        target_layer_ids=list(drafter.taps),
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    model.load_state_dict(drafter.stored)
    return model


@torch.inference_mode()
def stock_states(model: transformers.PreTrainedModel, anchor: int, taps: Tensor, rows: int) -> Tensor:
    """The normed states [rows, H] of a block after positions with these taps [n, k * Ht]."""
    n, cache = len(taps), DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(n)
    embed = deep_model().get_input_embeddings()
    noise = embed(torch.tensor([[anchor] + [MASK] * (rows - 1)]))
    positions = torch.arange(n + rows)[None]
    return model(
        noise_embeds=noise, context_hidden_states=taps[None], position_ids=positions, past_key_values=cache
    ).last_hidden_state[0]


@pytest.mark.parametrize("window", [9, 200])
def test_the_states_are_those_of_transformers(window: int, tmp_path: Path) -> None:
    variant = {"format": "meta", "windows": (window, window), "block_size": 6}
    drafter, model = drafter_of(**variant), stock(drafter_of(**variant))
    path = write_dflash(tmp_path, deep_model().config, **variant)
    watch = watch_blocks(plain("greedy"))
    results = write(requests_of("greedy")[:3], folder_of(path), ask(5))
    assert all(plain("greedy")[key] == tokens for key, tokens in texts_of(results).items())
    taps = {key: true_taps(whole("greedy")[key], drafter.taps) for key in results}
    longest, layers = 0, deep_model().config.num_hidden_layers + len(variant["windows"])
    for made in watch.rounds[::3]:
        ids, n = whole("greedy")[made.key], made.length - 1
        expected = stock_states(model, ids[n], taps[made.key][:n], 1 + len(made.states))
        assert_near(made.states, expected[1:], layers)
        longest = max(longest, n)
    assert longest > 9


def test_a_config_that_transformers_saved_is_read(tmp_path: Path) -> None:
    drafter = drafter_of("meta", windows=(9, 9), block_size=6, rope_theta=5e5)
    stock(drafter).save_pretrained(tmp_path)
    config = read_dflash_config(tmp_path)
    assert (config.format, config.block_size, config.mask_token_id) == ("meta", 6, MASK)
    assert (config.windows, config.causal, config.tap_ids) == ((9, 9), (False, False), drafter.taps)
    assert (config.rope["rope_theta"], config.eps, config.vocab_size) == (5e5, drafter.eps, None)
