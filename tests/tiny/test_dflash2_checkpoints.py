"""What the configs of DFlash2 drafters mean, which are refused, and what memory they take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, SpeculonError, UnsupportedModel
from speculon.drafters.config import check_pair
from speculon.drafters.dflash.config import read_dflash
from speculon.drafters.families import family_of, read_dflash_config
from speculon.drafters.formats import Source, open_source
from tests.tiny.checkpoint_formats import without
from tests.tiny.dflash_checkpoints import make_drafter, write_dflash
from tests.tiny.heads import deep_target
from tests.tiny.scripted import make_engine
from tests.tiny.test_dflash_checkpoints import SHAPE, TARGET, read

SCALES = {"input_embedding_scale": 2, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
CODEBOOK = "candidate_selector.predecessor_codebook"


@pytest.mark.parametrize("format", ["z-lab", "speculators"])
def test_it_is_recognised(format: str, tmp_path: Path) -> None:
    form: dict[str, Any] = {"windows": (9, 9), "causal": False, "group": 8}
    family = family_of(write_dflash(tmp_path, TARGET, format, **form, scales=SCALES))
    assert family.method == "dflash"
    config: Any = family.head
    assert (config.format, config.conv_taps, config.conv_groups) == (format, 2, 4)
    assert (config.selector_rank, config.selector_top_k, config.max_drafts) == (6, 5, 7)
    assert (config.embedding_scale, config.logit_scale, config.logit_cap) == (2, 0.5, 20)
    assert config.causal == (False, False) and not config.notes and check_pair(config, SHAPE) == ()
    assert family.summary.startswith("DFlash2 drafter by ")
    block = "convolutions of 2 rows in 4 groups of channels, a selector of rank 6 over 5 candidates"
    assert config.describe_block() == f"8 rows, the anchor's row does not draft, {block}"


def test_its_tensors_are_enough_to_recognise_it(tmp_path: Path) -> None:
    config = read(tmp_path, group=8, config={"architectures": ["LlamaForCausalLM"]})
    assert config.family == "DFlash2"


def published(width: int, layers: int, vocab: int, rank: int, taps: int, inner: int) -> dict[str, Any]:
    """Names and shapes in the header of the drafter that z-lab/dflash has among its fixtures."""
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.hidden_projection.weight": (rank, width),
        "candidate_selector.predecessor_codebook": (vocab, rank),
        "candidate_selector.successor_codebook": (vocab, rank),
        "fc.weight": (width, taps * width),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for layer in range(layers):
        at = f"layers.{layer}"
        for name in ("attention_conv", "mlp_conv"):
            shapes[f"{at}.{name}.base_kernel"] = (2, 2, width)
            shapes[f"{at}.{name}.kernel_projection.weight"] = (4 * (width // 16), width)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{at}.{name}.weight"] = (width,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{at}.self_attn.{name}.weight"] = (128,)
        for name, heads in (("q", 32), ("k", 8), ("v", 8)):
            shapes[f"{at}.self_attn.{name}_proj.weight"] = (heads * 128, width)
        shapes[f"{at}.self_attn.o_proj.weight"] = (width, 32 * 128)
        shapes[f"{at}.mlp.gate_proj.weight"] = shapes[f"{at}.mlp.up_proj.weight"] = (inner, width)
        shapes[f"{at}.mlp.down_proj.weight"] = (width, inner)
    return shapes


def test_the_published_sizes_fit(tmp_path: Path) -> None:
    """Config and header of the DFlash2 drafter for Muse Glimmer 30B."""
    config = {
        "architectures": ["DFlash2DraftModel"],
        "attention_bias": False,
        "is_causal": False,
        "dflash_config": {
            "block_size": 16,
            "conv_group_size": 16,
            "conv_kernel_size": 2,
            "final_logit_softcapping": 20.0,
            "mask_token_id": 201818,
            "output_multiplier": 0.19611613513818404,
            "selector_rank": 256,
            "selector_top_k": 16,
            "target_layer_ids": [1, 13, 25, 37, 49],
        },
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 6656,
        "intermediate_size": 19968,
        "layer_types": ["sliding_attention"] * 5,
        "max_position_embeddings": 131072,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 5,
        "num_key_value_heads": 8,
        "num_target_layers": 52,
        "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"},
        "sliding_window": 2048,
        "tie_word_embeddings": False,
        "use_sliding_window": True,
        "vocab_size": 202048,
    }
    small = open_source(write_dflash(tmp_path, TARGET))
    shapes = published(6656, 5, 202048, 256, 5, 19968)
    names = {name: name for name in shapes}
    found = read_dflash(Source(tmp_path, small.files, False, config, shapes, names, small.sizes, ()))
    assert (found.family, found.max_drafts, found.conv_groups, found.selector_top_k) == (
        "DFlash2",
        15,
        416,
        16,
    )
    assert (found.logit_scale, found.logit_cap) == (pytest.approx(26**-0.5), 20.0)
    assert (found.windows, found.causal) == ((2048,) * 5, (False,) * 5)
    assert found.tap_layouts(52) == ((1, 13, 25, 37, 49),) and not found.notes


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, group=8)
    done = CliRunner().invoke(app, ["inspect", str(path), "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    assert done.exit_code == 0 and facts["method"] == "dflash"
    assert facts["found"].startswith("DFlash2 drafter by z-lab: 2 layers of 32, 3 taps of width 32")
    assert "a selector of rank 6 over 5 candidates" in facts["block"]


def nested(**change: Any) -> dict[str, Any]:
    """The config's table with another value, or without one."""
    sizes = {"conv_kernel_size": 2, "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 5}
    table = {"block_size": 8, "mask_token_id": 2, "target_layer_ids": [1, 3, 4], **sizes, **change}
    return {"config": {"dflash_config": {name: value for name, value in table.items() if value is not None}}}


REFUSED: list[Any] = [
    pytest.param(nested(conv_kernel_size=None), ModelError, "without conv_kernel_size", id="no kernel size"),
    pytest.param(nested(selector_rank=None), ModelError, "without selector_rank", id="no rank"),
    pytest.param(nested(selector_top_k=None), ModelError, "without selector_top_k", id="no candidates"),
    pytest.param(nested(selector_top_k=0), ModelError, "selector_top_k = 0 is no number", id="none"),
    pytest.param(nested(selector_top_k=97), ModelError, "selector_top_k = 97 of 96 tokens", id="too many"),
    pytest.param(nested(conv_group_size=5), ModelError, "= 5 does not divide the width 32", id="groups"),
    pytest.param(
        nested(conv_kernel_size=3),
        CorruptWeights,
        r"layers.0.attention_conv.base_kernel is \[2, 2, 32\], not \[2, 3, 32\]",
        id="another kernel",
    ),
    pytest.param(
        nested(conv_group_size=16),
        CorruptWeights,
        r"layers.0.attention_conv.kernel_projection.weight is \[16, 32\], not \[8, 32\]",
        id="another group",
    ),
    pytest.param(
        nested(selector_rank=7), CorruptWeights, r"codebook is \[96, 6\], not \[96, 7\]", id="another rank"
    ),
    pytest.param(
        nested(output_multiplier=-1.0),
        ModelError,
        "output_multiplier = -1.0 is no positive number",
        id="scale",
    ),
    pytest.param(
        nested(final_logit_softcapping="20"), ModelError, "softcapping = '20' is no positive", id="cap"
    ),
    pytest.param(nested(attention_sink_bias=True), UnsupportedModel, "with attention_sink_bias", id="sinks"),
    pytest.param({"markov": "vanilla"}, UnsupportedModel, "with a Markov head", id="Markov head"),
    pytest.param(
        {"format": "speculators", "draft_vocab": 40}, UnsupportedModel, "with a draft vocabulary", id="d2t"
    ),
    pytest.param(
        {"extra": {"candidate_selector.beam_projection.weight": torch.ones(6, 32)}},
        UnsupportedModel,
        "with candidate_selector.beam_projection.weight",
        id="unknown in the selector",
    ),
    pytest.param(
        {"extra": {"layers.0.mlp_conv.bias": torch.ones(32)}},
        UnsupportedModel,
        "with layers.0.mlp_conv.bias",
        id="unknown in a convolution",
    ),
]


@pytest.mark.parametrize(("variant", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused(
    variant: dict[str, Any], error: type[SpeculonError], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        read(tmp_path, **{"group": 8, **variant})


def test_a_codebook_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, group=8, extra={CODEBOOK: torch.ones(95, 6)})
    with pytest.raises(CorruptWeights, match=rf"{CODEBOOK} is \[95, 6\], not \[96, 6\]"):
        read_dflash_config(path)


@pytest.mark.parametrize("name", [CODEBOOK, "layers.1.mlp_conv.base_kernel"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, group=8)
    without(name)(path)
    with pytest.raises(MissingWeights, match=f"no tensor {name}"):
        read_dflash_config(path)


def test_a_plain_drafter_under_its_name_is_refused(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, group=8)
    plain = write_dflash(tmp_path / "plain", TARGET)
    (plain / "config.json").write_text(json.dumps(json.loads((path / "config.json").read_text())))
    with pytest.raises(MissingWeights, match="no tensor candidate_selector.predecessor_codebook"):
        read_dflash_config(plain)


def test_scales_stay_refused_in_other_drafters(tmp_path: Path) -> None:
    for name, value in SCALES.items():
        with pytest.raises(UnsupportedModel, match=f"with {name} = {value}"):
            read(tmp_path / name, config={name: value})


def test_the_memory_estimate_has_its_weights(tmp_path: Path) -> None:
    path = write_dflash(tmp_path, TARGET, group=8)
    engine = make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}})
    [needs] = engine.proposers.needs
    weights = sum(tensor.nbytes for tensor in make_drafter(TARGET, group=8).tensors.values())
    assert needs.bytes_fixed == weights == engine.memory.drafters
