"""The family of a drafter's folder, its tap layouts, and the targets that it fits, from headers alone."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from speculon.core.errors import (
    CorruptWeights,
    MissingWeights,
    ModelError,
    UnsafeCheckpoint,
    UnsupportedModel,
    WrongPair,
)
from speculon.drafters.config import TargetShape, check_offsets, check_pair
from speculon.drafters.eagle3.config import Eagle3Config
from speculon.drafters.families import UNSUPPORTED, family_of, read_eagle3_config

Shapes = dict[str, tuple[int, ...]]

H = 8
EAGLE3: Shapes = {
    "fc.weight": (H, 3 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (H, 2 * H),
    "midlayer.self_attn.k_proj.weight": (4, 2 * H),
    "midlayer.self_attn.v_proj.weight": (4, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, H),
    "midlayer.mlp.gate_proj.weight": (12, H),
    "midlayer.mlp.up_proj.weight": (12, H),
    "midlayer.mlp.down_proj.weight": (H, 12),
    "norm.weight": (H,),
    "lm_head.weight": (20, H),
}
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "hidden_size": H,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "vocab_size": 20,
}
PLAIN: Shapes = {
    "model.embed_tokens.weight": (20, H),
    "model.layers.0.self_attn.q_proj.weight": (H, H),
    "model.layers.0.self_attn.o_proj.weight": (H, H),
    "model.norm.weight": (H,),
}
EAGLE1: Shapes = {
    "fc.weight": (H, 2 * H),
    "layers.0.self_attn.q_proj.weight": (H, H),
    "layers.0.self_attn.o_proj.weight": (H, H),
}
HEAD = Eagle3Config(
    path=Path("head"),
    files=(),
    format="specforge",
    names={},
    hidden=H,
    target_hidden=H,
    taps=3,
    layers=1,
    heads=2,
    kv_heads=1,
    head_dim=4,
    intermediate=12,
    vocab_size=20,
    draft_vocab_size=20,
    eps=1e-6,
    act="silu",
    rope={"rope_type": "default", "rope_theta": 1e4},
    windows=(None,),
    norm_before_residual=False,
    norm_before_fc=False,
    fc_norm=False,
    norm_output=False,
    logit_scale=1.0,
    tap_ids=None,
    after=True,
    speculative_tokens=None,
    verifier=("LlamaForCausalLM",),
)
TARGET = TargetShape(H, 20, 8, "LlamaForCausalLM")


def write(folder: Path, config: dict[str, Any], shapes: Shapes) -> Path:
    """A checkpoint of zeros."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        size = 4
        for side in shape:
            size *= side
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))
    return folder


# -- taps


@pytest.mark.parametrize(
    ("ids", "after", "layers", "tap_layouts"),
    [
        pytest.param(None, True, 32, [(1, 15, 28)], id="none named"),
        pytest.param(None, True, 7, [(1, 2, 3)], id="none named, fewest layers"),
        pytest.param((2, 18, 33), False, 36, [(1, 17, 32)], id="speculators, Qwen3"),
        pytest.param((2, 30, 57), False, 60, [(1, 29, 56)], id="speculators, gemma 4"),
        pytest.param((0, 4, 8), False, 8, [(-1, 3, 7)], id="embeddings and the last layer"),
        pytest.param((1, 29, 57), None, 61, [(1, 29, 57)], id="nested, DeepSeek V3"),
        pytest.param((1, 11, 21), None, 24, [(1, 11, 21)], id="nested, gpt-oss 20b: not quite the usual"),
        pytest.param((1, 46, 90), None, 94, [(1, 46, 90)], id="nested, Qwen3 235B"),
        pytest.param((2, 30, 58), None, 61, [(1, 29, 57)], id="nested, Kimi K2: the usual of the other way"),
        pytest.param((4, 20, 40), None, 45, [(4, 20, 40), (3, 19, 39)], id="nested, step 3.5: either"),
        pytest.param(
            (0, 20, 40), None, 45, [(0, 20, 40), (-1, 19, 39)], id="nested: either, one with embeddings"
        ),
        pytest.param((4, 20, 45), None, 45, [(3, 19, 44)], id="nested: only one lies within"),
    ],
)
def test_taps_are_outputs_of_layers(
    ids: tuple[int, ...] | None, after: bool | None, layers: int, tap_layouts: list[tuple[int, ...]]
) -> None:
    assert list(replace(HEAD, tap_ids=ids, after=after).tap_layouts(layers)) == tap_layouts


@pytest.mark.parametrize(
    ("ids", "after", "layers", "words"),
    [
        pytest.param(
            None, True, 6, "names no layers.*need 7 of them; the target has 6", id="too shallow for the usual"
        ),
        pytest.param(
            (1, 29, 57), None, 57, "reads layers 1, 29, 57, .* from 0 to 56", id="nested, out of range"
        ),
        pytest.param((1, 2, 9), False, 8, "reads layers 0, 1, 8, .* from 0 to 7", id="before, out of range"),
        pytest.param((-1, 2, 4), False, 8, "reads layers -2, 1, 3", id="before the embeddings"),
    ],
)
def test_taps_outside_the_target_are_refused(
    ids: tuple[int, ...] | None, after: bool | None, layers: int, words: str
) -> None:
    with pytest.raises(WrongPair, match=words):
        replace(HEAD, tap_ids=ids, after=after).tap_layouts(layers)


def test_the_summary_describes_the_taps() -> None:
    usual = HEAD.summary()
    assert "1 layer of 8, 3 taps of width 8 after layers 1, N/2 - 1, N - 4 of N (assumed: its" in usual
    assert "after layers 1, 3, 4 (assumed: its config names no layers)," in HEAD.summary(8)
    assert "assumed" not in replace(HEAD, tap_ids=(2, 4, 6)).summary(8)
    either = replace(HEAD, tap_ids=(2, 4, 6), after=None)
    assert "at layers 2, 4, 6 (before or after them)" in either.summary()
    assert "after layers 2, 4, 6 or after layers 1, 3, 5" in either.summary(16)
    assert "before layers 2, 4, 6" in replace(either, after=False).summary()


# -- pairs


@pytest.mark.parametrize(
    ("target", "words"),
    [
        pytest.param(replace(TARGET, hidden=16), "width 8, the target's are 16", id="hidden"),
        pytest.param(
            replace(TARGET, vocab_size=1000), "vocabulary of 20, the target's is 1,000", id="vocabulary"
        ),
        pytest.param(replace(TARGET, num_layers=6), "need 7 of them; the target has 6", id="layers"),
    ],
)
def test_a_wrong_pair_is_refused_with_both_numbers(target: TargetShape, words: str) -> None:
    assert check_pair(HEAD, TARGET) == ()
    with pytest.raises(WrongPair, match=words):
        check_pair(HEAD, target)


def test_another_architecture_is_a_warning() -> None:
    warnings = ("made for LlamaForCausalLM, the target is Qwen3ForCausalLM",)
    assert check_pair(HEAD, replace(TARGET, architecture="Qwen3ForCausalLM")) == warnings
    assert check_pair(replace(HEAD, verifier=()), replace(TARGET, architecture="Qwen3ForCausalLM")) == ()


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        pytest.param([3, 3, 2], "draft ids 1 and 2 to 4 and 4", id="two of one id"),
        pytest.param([5, 0], "0 and 1 to 5 and 1", id="descending"),
        pytest.param([0, 19], "maps a draft id to 20, outside the vocabulary of 20", id="beyond"),
        pytest.param([-1, 3], "to -1, outside", id="negative"),
        pytest.param([3, 9, 18], "to 20, outside", id="absolute ids"),
    ],
)
def test_offsets_ascend_within_the_vocabulary(offsets: list[int], words: str) -> None:
    check_offsets(Path("head"), [3, 8, 17], 20)
    check_offsets(Path("head"), [], 20)
    with pytest.raises(CorruptWeights, match=words):
        check_offsets(Path("head"), offsets, 20)


# -- families


FAMILIES: list[Any] = [
    pytest.param("P-EAGLE", {"speculators_model_type": "peagle"}, EAGLE3, id="peagle, speculators"),
    pytest.param("P-EAGLE", {"architectures": ["PEagleDraftModel"]}, EAGLE3, id="peagle, SpecForge"),
    pytest.param("P-EAGLE", CONFIG, {**EAGLE3, "mask_hidden": (1, 1, 3 * H)}, id="peagle, by its tensor"),
    pytest.param(
        "DFlash2 with a beam", {"architectures": ["DFlash2BeamDraftModel"]}, EAGLE1, id="dflash2, beam"
    ),
    pytest.param("Domino", {"dflash_config": {"projector_type": "domino"}}, EAGLE1, id="domino"),
    pytest.param("LiLiCorr", {"architectures": ["LiLiCorrDraftModel"]}, EAGLE1, id="lilicorr"),
    pytest.param(
        "Gemma 4 DSpark",
        {"architectures": ["Gemma4DSparkModel"], "num_anchors": 512},
        EAGLE1,
        id="gemma4 dspark",
    ),
    pytest.param(
        "MTP",
        {"speculators_model_type": "mtp"},
        {"mtp_layers.0.input_proj.weight": (H, 2 * H)},
        id="mtp, speculators",
    ),
    pytest.param("MTP", {}, {"mtp.depth.fc.weight": (H, 2 * H)}, id="mtp, by its tensors"),
    pytest.param("Medusa", {"medusa_num_heads": 4}, {"0.0.linear.weight": (H, H)}, id="medusa"),
    pytest.param("Medusa", {}, {"medusa_heads.0.0.linear.weight": (H, H)}, id="medusa, by its tensors"),
    pytest.param(
        "MLP speculator", {"model_type": "mlp_speculator"}, {"speculator.emb.0.weight": (20, H)}, id="mlp"
    ),
    pytest.param(
        "LSTM speculator",
        {"architectures": ["ArcticLSTMSpeculatorPreTrainedModel"]},
        {"projs.0": (H, H)},
        id="lstm",
    ),
    pytest.param(
        "an EAGLE-3 head with latent attention",
        {"architectures": ["Eagle3DeepseekV2ForCausalLM"]},
        EAGLE3,
        id="mla, by its config",
    ),
    pytest.param(
        "an EAGLE-3 head with latent attention",
        {},
        {"fc.weight": (H, 3 * H), "midlayer.self_attn.kv_a_proj_with_mqa.weight": (4, 2 * H)},
        id="mla, by its tensors",
    ),
    pytest.param(
        "an EAGLE-3 head without taps",
        {**CONFIG, "eagle_config": {"use_aux_hidden_state": False}},
        {name: shape for name, shape in EAGLE3.items() if name != "fc.weight"},
        id="tapless",
    ),
    pytest.param(
        "EAGLE-1/2",
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1},
        EAGLE1,
        id="eagle, by its tensors",
    ),
    pytest.param("EAGLE-1/2", {"architectures": ["EagleLlamaForCausalLM"]}, PLAIN, id="eagle, by its config"),
]


@pytest.mark.parametrize(("name", "config", "shapes"), FAMILIES)
def test_what_is_not_supported_is_refused_by_name(
    name: str, config: dict[str, Any], shapes: Shapes, tmp_path: Path
) -> None:
    family = family_of(write(tmp_path / "drafter", config, shapes))
    assert (family.method, family.head, family.checkpoint) == (None, None, None)
    assert family.summary.startswith(f"{name}: ")
    with pytest.raises(UnsupportedModel, match=rf"drafter: {name} \(.*\) is recognised, but not supported"):
        read_eagle3_config(family.path)


def test_every_unsupported_family_has_a_case() -> None:
    assert {one.name for one in UNSUPPORTED} == {case.values[0] for case in FAMILIES}


def test_an_unknown_speculators_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="speculators_model_type 'oracle' is not known here"):
        read_eagle3_config(write(tmp_path / "head", {**CONFIG, "speculators_model_type": "oracle"}, EAGLE3))


@pytest.mark.parametrize(
    "shapes",
    [
        pytest.param(PLAIN, id="plain"),
        pytest.param(
            {**PLAIN, "mtp.fc.weight": (H, 2 * H), "mtp.norm.weight": (H,)},
            id="with prediction layers of its own",
        ),
    ],
)
def test_a_language_model_is_a_draft_model(shapes: Shapes, tmp_path: Path) -> None:
    folder = write(
        tmp_path / "model",
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "hidden_size": H},
        shapes,
    )
    family = family_of(folder)
    assert (family.method, family.refusal) == ("draft_model", None)
    assert family.checkpoint is not None
    assert "language model LlamaForCausalLM: 1 layer of 8" in family.summary
    with pytest.raises(UnsupportedModel, match="no EAGLE-3 head, but a language model"):
        read_eagle3_config(folder)


def test_tensors_decide_whatever_the_config_says(tmp_path: Path) -> None:
    assert (
        family_of(write(tmp_path / "a", {**CONFIG, "architectures": ["LlamaForCausalLM"]}, EAGLE3)).method
        == "eagle3"
    )
    assert family_of(write(tmp_path / "b", CONFIG, EAGLE1)).summary.startswith(
        "EAGLE-1/2"
    )  # and not what it claims
    with pytest.raises(MissingWeights, match="there is no tensor fc.weight"):
        family_of(write(tmp_path / "c", CONFIG, PLAIN))
    with pytest.raises(ModelError, match=r"fc is \[9, 24\] and the first q_proj \[8, 16\]"):
        family_of(write(tmp_path / "d", CONFIG, {**EAGLE3, "fc.weight": (9, 24)}))


@pytest.mark.parametrize("config", [CONFIG, {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 10}])
def test_pickles_are_refused(config: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(
        UnsafeCheckpoint, match=r"pytorch_model.bin: pickle weights can run code; .* convert them"
    ):
        family_of(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "head", CONFIG, EAGLE3)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptWeights, match="truncated"):
        family_of(folder)
