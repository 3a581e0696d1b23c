"""What the configs of DFlash and DSpark drafters mean, which are refused, and what memory they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    MissingWeights,
    ModelError,
    SpeculonError,
    UnsupportedModel,
    WrongPair,
)
from speculon.drafters.config import TargetShape, check_pair
from speculon.drafters.dflash.config import DFlashConfig
from speculon.drafters.families import family_of, read_dflash_config, read_eagle3_config
from tests.tiny.checkpoint_formats import without, write_eagle3
from tests.tiny.dflash_checkpoints import FORMATS, MASK, make_drafter, write_dflash
from tests.tiny.heads import deep_target
from tests.tiny.scripted import make_engine

TARGET = SimpleNamespace(
    hidden_size=32, vocab_size=96, num_hidden_layers=7, architectures=["LlamaForCausalLM"]
)
SHAPE = TargetShape(32, 96, 7, "LlamaForCausalLM")
SPARK: dict[str, Any] = {"format": "deepspec", "markov": "gated", "confidence": "h and e"}


def read(folder: Path, format: str = "z-lab", **variant: Any) -> DFlashConfig:
    return read_dflash_config(write_dflash(folder, TARGET, format, **variant))


@pytest.mark.parametrize("format", FORMATS)
def test_every_format_is_recognised(format: str, tmp_path: Path) -> None:
    family = family_of(write_dflash(tmp_path, TARGET, format, windows=(9, 9)))
    config, drafter = family.head, make_drafter(TARGET, format, windows=(9, 9))
    assert isinstance(config, DFlashConfig)
    assert (family.method, config.format) == ("dflash", format)
    assert (config.tap_layouts(7), config.block_size, config.mask_token_id) == ((drafter.taps,), 8, MASK)
    assert (config.windows, config.causal) == (drafter.windows, drafter.causal)
    assert config.sample_from_anchor == drafter.from_anchor
    assert config.max_drafts == (8 if drafter.from_anchor else 7)
    assert check_pair(config, SHAPE) == () and not config.notes
    assert f"blocks of 8 rows with up to {config.max_drafts} drafts" in family.for_target(7).summary
    assert "after layers 1, 3, 4" in family.for_target(7).summary


@pytest.mark.parametrize("prefix", ["model.", "draft_model."])
def test_prefixes_of_names_are_ignored(prefix: str, tmp_path: Path) -> None:
    assert read(tmp_path, prefix=prefix).hidden == 32


@pytest.mark.parametrize(
    ("format", "config", "from_anchor"),
    [
        pytest.param("z-lab", {}, False, id="dflash"),
        pytest.param("z-lab", {"sample_from_anchor": True}, True, id="dflash with the flag"),
        pytest.param("z-lab", {"num_anchors": 64}, True, id="DSpark under a name of dflash"),
        pytest.param("specforge", {}, True, id="dspark, nested"),
        pytest.param("deepspec", {}, True, id="dspark, flat, without a Markov head"),
        pytest.param("deepspec", {"sample_from_anchor": False}, False, id="dspark, flag"),
        pytest.param("speculators", {}, False, id="speculators"),
        pytest.param("speculators", {"speculators_model_type": "dspark"}, False, id="speculators, dspark"),
        pytest.param("speculators", {"sample_from_anchor": True}, True, id="speculators, flag"),
        pytest.param("meta", {}, False, id="meta"),
    ],
)
def test_the_row_of_the_anchor_drafts_where_the_project_says_so(
    format: str, config: dict[str, Any], from_anchor: bool, tmp_path: Path
) -> None:
    assert read(tmp_path, format, config=config).sample_from_anchor == from_anchor


def test_a_markov_head_alone_is_no_dspark(tmp_path: Path) -> None:
    config = read(tmp_path, markov="vanilla", config={"markov_rank": 6})
    assert (config.sample_from_anchor, config.markov) == (False, "vanilla")


@pytest.mark.parametrize(("drafts", "from_anchor"), [(8, True), (7, False), (3, False)])
def test_as_many_drafts_as_rows_show_a_missing_flag(drafts: int, from_anchor: bool, tmp_path: Path) -> None:
    suggested = {"proposal_methods": [{"speculative_tokens": drafts}]}
    config = read(tmp_path, "speculators", config={"speculators_config": suggested})
    assert config.sample_from_anchor == from_anchor


@pytest.mark.parametrize(
    ("layers", "depth", "taps"),
    [
        pytest.param(1, 36, (18,), id="one"),
        pytest.param(5, 36, (1, 9, 17, 25, 33), id="Qwen3 4B"),
        pytest.param(5, 32, (1, 8, 15, 22, 29), id="Qwen3.5 4B"),
        pytest.param(5, 64, (1, 16, 31, 46, 61), id="Qwen3.5 27B"),
        pytest.param(5, 24, (1, 6, 11, 16, 21), id="Qwen2.5 0.5B"),
    ],
)
def test_without_ids_the_taps_are_spread_over_the_target(
    layers: int, depth: int, taps: tuple[int, ...], tmp_path: Path
) -> None:
    nested = {"dflash_config": {"mask_token_id": MASK}, "num_target_layers": None}
    config = read(tmp_path, layers=layers, taps=tuple(range(layers)), config=nested)
    assert config.tap_layouts(depth) == (taps,)


def test_a_flag_decides_on_causality(tmp_path: Path) -> None:
    window = {"windows": (9, None)}
    assert read(tmp_path / "a", **window).causal == (True, False)
    assert read(tmp_path / "b", **window, causal=True).causal == (True, True)
    nested = {"mask_token_id": MASK, "target_layer_ids": [1, 3, 4], "causal": False}
    assert read(tmp_path / "c", **window, config={"dflash_config": nested}).causal == (False, False)
    swa = {**nested, "use_swa": True, "swa_window_size": 6, "causal": None}
    assert read(tmp_path / "d", config={"dflash_config": swa}).windows == (6, 6)
    assert read(tmp_path / "e", "speculators", **window).causal == (True, False)
    loose = read(tmp_path / "f", "speculators", **window, causal=False)
    assert (loose.causal, loose.window_start) == ((False, False), "before_anchor")


REFUSED: list[Any] = [
    pytest.param({"config": {"block_size": None}}, ModelError, "block_size = None", id="no block"),
    pytest.param({"config": {"block_size": 1}}, ModelError, "block_size = 1, which", id="no masks"),
    pytest.param({"config": {"block_size": "8"}}, ModelError, "block_size = '8' is no number", id="text"),
    pytest.param(
        {"config": {"dflash_config": {"target_layer_ids": [1, 3, 4]}}},
        ModelError,
        "mask_token_id = None is no token",
        id="no mask",
    ),
    pytest.param(
        {"config": {"dflash_config": {"mask_token_id": 96, "target_layer_ids": [1, 3, 4]}}},
        ModelError,
        "mask_token_id = 96 is no token of 96",
        id="mask outside",
    ),
    pytest.param(
        {"config": {"dflash_config": {"mask_token_id": 2, "target_layer_ids": [1, 2, 3, 4, 5]}}},
        ModelError,
        "fc takes 96 numbers, which is no multiple of 5 taps",
        id="more taps",
    ),
    pytest.param(
        {"format": "speculators", "config": {"aux_hidden_state_layer_ids": None}},
        ModelError,
        "aux_hidden_state_layer_ids = None is no list",
        id="speculators without taps",
    ),
    pytest.param(
        {"config": {"input_embedding_scale": 2.0}},
        UnsupportedModel,
        "with input_embedding_scale = 2.0",
        id="scaled",
    ),
    pytest.param(
        {"config": {"layer_types": ["linear_attention"] * 2}},
        UnsupportedModel,
        "layer_types of 2",
        id="types",
    ),
    pytest.param(
        {"extra": {"layers.0.self_attn.g_proj.weight": torch.ones(8, 32)}},
        UnsupportedModel,
        "a DFlash drafter with layers.0.self_attn.g_proj.weight",
        id="gates",
    ),
    pytest.param({"extra": {"fc.bias": torch.ones(3)}}, CorruptWeights, r"fc.bias is \[3\]", id="fc's bias"),
    pytest.param(
        {**SPARK, "extra": {"markov_head.markov_w2.weight": torch.ones(96, 5)}},
        CorruptWeights,
        r"markov_w2.weight is \[96, 5\], not \[96, 6\]",
        id="Markov rank",
    ),
    pytest.param(
        {**SPARK, "extra": {"confidence_head.proj.weight": torch.ones(1, 33)}},
        CorruptWeights,
        "takes 33, not 32 or 38",
        id="confidence",
    ),
    pytest.param(
        {**SPARK, "config": {"markov_head_type": "rnn"}},
        ModelError,
        "is 'rnn', its tensors are gated",
        id="type",
    ),
    pytest.param(
        {"format": "deepspec", "config": {"markov_rank": 6}},
        MissingWeights,
        "markov_rank = 6, but there is no tensor markov_head.markov_w1.weight",
        id="no Markov head",
    ),
]


@pytest.mark.parametrize(("variant", "error", "message"), REFUSED)
def test_what_contradicts_itself_is_refused(
    variant: dict[str, Any], error: type[SpeculonError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, **variant)


@pytest.mark.parametrize(
    ("name", "variant", "message"),
    [
        ("layers.1.mlp.up_proj.weight", {}, "no tensor layers.1.mlp.up_proj.weight"),
        ("layers.1.self_attn.q_norm.weight", {}, "layer 1 has one of q_norm and k_norm"),
        ("hidden_norm.weight", {}, "config is a DFlash drafter's, but there is no tensor hidden_norm.weight"),
        ("markov_head.gate_proj.bias", SPARK, "no tensor markov_head.gate_proj.bias"),
        ("d2t", {"format": "speculators", "draft_vocab": 40}, "drafts from 40 of 96 tokens, but no d2t"),
        (
            "lm_head.weight",
            {"format": "speculators", "draft_vocab": 40},
            "no lm_head.weight; the target's",
        ),
        ("embed_tokens.weight", {"hidden": 48}, "no embed_tokens.weight; the target's are 32 wide, not 48"),
    ],
)
def test_a_missing_tensor_is_named(name: str, variant: dict[str, Any], message: str, tmp_path: Path) -> None:
    change: Callable[[Path], None] = without(name)
    path = write_dflash(tmp_path, TARGET, **variant)
    change(path)
    with pytest.raises(MissingWeights, match=message):
        read_dflash_config(path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (replace(SHAPE, hidden=64), "width 32, the target's are 64"),
        (replace(SHAPE, vocab_size=97), "a vocabulary of 96, the target's is 97"),
        (replace(SHAPE, num_layers=8), "was trained for a target of 7 layers, the target has 8"),
    ],
)
def test_a_wrong_pair_is_refused(target: TargetShape, message: str, tmp_path: Path) -> None:
    with pytest.raises(WrongPair, match=message):
        check_pair(read(tmp_path), target)


def test_a_tap_beyond_the_target_is_refused(tmp_path: Path) -> None:
    config = replace(read(tmp_path), tap_ids=(1, 3, 7))
    with pytest.raises(WrongPair, match="reads layers 1, 3, 7, the target's layers go from 0 to 6"):
        config.tap_layouts(7)


def test_families_are_not_confused(tmp_path: Path) -> None:
    """Two taps of one width look like EAGLE-1's joined layer, and the norms are named as EAGLE-3's."""
    assert family_of(write_dflash(tmp_path / "a", TARGET, taps=(1, 3))).method == "dflash"
    assert family_of(write_eagle3(tmp_path / "b", TARGET)).method == "eagle3"
    with pytest.raises(UnsupportedModel, match="no EAGLE-3 head, but a DFlash drafter by z-lab"):
        read_eagle3_config(tmp_path / "a")
    with pytest.raises(UnsupportedModel, match="no DFlash drafter, but an EAGLE-3 head by speculators"):
        read_dflash_config(tmp_path / "b")
    bare = write_dflash(tmp_path / "c", TARGET, config={"architectures": ["LlamaForCausalLM"]})
    assert family_of(bare).method == "dflash"


@pytest.mark.parametrize("options", [{"taps": [1, 3]}, {"taps": "1, 3, 4"}, {"sample_from_anchor": 1}])
def test_a_wrong_correction_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET)
    with pytest.raises(ConfigError, match=f"options.{next(iter(options))} = "):
        make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}, "options": options})


def test_options_correct_a_config(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, config={"num_target_layers": None})
    options = {"taps": [4, 1, 3], "sample_from_anchor": True}
    engine = make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}, "options": options})
    [needs] = engine.proposers.needs
    assert (needs.taps, needs.max_drafts) == ((4, 1, 3), 8)


def test_the_memory_estimate_has_weights_and_pages(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, **SPARK, windows=(9, None))
    engine = make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}})
    [needs] = engine.proposers.needs
    weights = sum(tensor.nbytes for tensor in make_drafter(TARGET, **SPARK).tensors.values())
    assert needs.bytes_fixed == weights == engine.memory.drafters
    assert [(spec.v_dim, spec.bytes_per_token, spec.window) for spec in needs.layers] == [
        (0, 3 * 32 * 4, None),
        (8, 2 * 2 * 8 * 4, 9),
        (8, 2 * 2 * 8 * 4, None),
    ]
    assert needs.bytes_scratch > 0


def test_ids_that_do_not_ascend_are_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, "speculators", draft_vocab=40)
    tensors = load_file(path / "model.safetensors")
    tensors["d2t"][3] -= 50
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CorruptWeights, match="which does not ascend"):
        make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}})
