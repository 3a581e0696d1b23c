"""Heads of every format are read as written, and tensors overrule wrong configs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from speculon.core.errors import CorruptWeights, MissingWeights, ModelError, UnsupportedModel
from speculon.drafters.config import TargetShape, check_pair, read_offsets
from speculon.drafters.eagle3.config import Eagle3Config
from speculon.drafters.families import read_eagle3_config
from tests.tiny.checkpoint_formats import FORMATS, LLAMA3, TAPLESS, Head, make_head, without, write_eagle3

TARGET = SimpleNamespace(
    hidden_size=32, vocab_size=96, num_hidden_layers=8, architectures=["Qwen3ForCausalLM"]
)
SHAPE = TargetShape(32, 96, 8, "Qwen3ForCausalLM")
VARIANTS: dict[str, dict[str, Any]] = {
    "usual": {},
    "some of the vocabulary": {"draft_vocab": 40},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "two layers": {"layers": 2},
    "two layers, the other name": {"layers": 2, "later_norm": "hidden_norm"},
    "windows": {"layers": 2, "windows": (None, 6)},
    "own embeddings": {"own_embed": True},
    "the target's head": {"lm_head": False},
    "narrower": {"hidden": 16, "draft_vocab": 40},
    "biases": {"fc_bias": True, "attention_bias": True},
    "normed queries": {"qk_norm": True},
    "rope": {"rope_theta": 5e5, "rope_scaling": LLAMA3},
    "logit_scale": {"logit_scale": 0.5},
    "bf16": {"dtype": torch.bfloat16},
}
WRITING: dict[str, dict[str, Any]] = {
    "shards": {"shards": 3},
    "prefix": {"prefix": "model."},
    "two prefixes": {"prefix": "draft_model.model."},
    "tables that nobody reads": {
        "extra": {
            "midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4),
            "verifier_norm.weight": torch.ones(4),
        }
    },
}
SAME = [
    name
    for name in Eagle3Config.__dataclass_fields__
    if name in Head.__dataclass_fields__ and name not in ("taps", "tap_ids")
]


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a config, by its names."""
    config, found = read_eagle3_config(folder), {}
    for path in config.files:
        with safe_open(path, "pt") as file:
            found |= {
                ours: file.get_tensor(theirs)
                for ours, theirs in config.names.items()
                if theirs in file.keys()
            }
    return found


def agrees(folder: Path, head: Head) -> bool:
    """The config says of a head what it was made with, and its names lead to the head's tensors."""
    config, tensors = read_eagle3_config(folder), read(folder)
    later = {
        name: name.replace(".hidden_norm", ".input_layernorm") for name in head.tensors if ".0." not in name
    }
    expected = {later.get(name, name): tensor for name, tensor in head.tensors.items() if name != "t2d"}
    return (
        all(getattr(config, name) == getattr(head, name) for name in SAME)
        and config.tap_layouts(head.target_layers)[0] == head.taps
        and config.taps == len(head.taps)
        and tensors.keys() == expected.keys()
        and all(torch.equal(tensors[name], expected[name]) for name in expected)
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("format", FORMATS)
def test_a_head_is_read_as_it_was_written(format: str, variant: str, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, format, **VARIANTS[variant])
    assert agrees(folder, make_head(TARGET, **VARIANTS[variant]))
    config = read_eagle3_config(folder)
    assert (config.format, config.tap_ids) == (format, None)
    assert all("target_hidden_size" in note for note in config.notes) and not check_pair(config, SHAPE)
    assert config.verifier == (("Qwen3ForCausalLM",) if format == "speculators" else ())
    assert config.speculative_tokens == (3 if format == "speculators" else None)


@pytest.mark.parametrize("writing", WRITING)
@pytest.mark.parametrize("format", FORMATS)
def test_a_head_is_read_from_any_files(format: str, writing: str, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, format, draft_vocab=40, **WRITING[writing])
    assert agrees(folder, make_head(TARGET, draft_vocab=40))
    assert not read_eagle3_config(folder).notes


def test_old_names_of_the_tap_norms(tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, "specforge", aux_norms=True, fc_norm=True)
    assert agrees(folder, make_head(TARGET, fc_norm=True))


@pytest.mark.parametrize("format", [format for format in FORMATS if format not in TAPLESS])
@pytest.mark.parametrize("taps", [(1, 4, 6), (0, 7), (2, 3, 5, 6)])
def test_configured_taps_are_among_the_layouts(format: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    config = read_eagle3_config(write_eagle3(tmp_path / "head", TARGET, format, taps=taps))
    assert config.tap_layouts(8)[0] == taps
    known = format == "speculators" or taps[0] == 1
    assert len(config.tap_layouts(8)) == (1 if known else 2)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"draft_vocab": 41}, id="vocabulary"),
        pytest.param({"seed": 1}, id="other tensors"),
        pytest.param({"norm_output": True}, id="a flag"),
        pytest.param({"rope_theta": 5e5}, id="another RoPE"),
        pytest.param({"taps": (1, 3, 5)}, id="other taps"),
        pytest.param({"windows": 6}, id="a window"),
    ],
)
def test_another_head_is_found(wrong: dict[str, Any], tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, "specforge", draft_vocab=40)
    assert agrees(folder, make_head(TARGET, draft_vocab=40))
    assert not agrees(folder, make_head(TARGET, **{"draft_vocab": 40, **wrong}))


# -- wrong configs


@pytest.mark.parametrize(
    ("wrong", "note"),
    [
        pytest.param({"num_hidden_layers": 36}, "num_hidden_layers is 36, the tensors' 1", id="layers"),
        pytest.param({"hidden_size": 4096}, "hidden_size is 4096, the tensors' 32", id="hidden"),
        pytest.param({"intermediate_size": 7}, "intermediate_size is 7, the tensors' 48", id="intermediate"),
        pytest.param({"num_attention_heads": 32}, "num_attention_heads is 32, the tensors' 4", id="heads"),
        pytest.param({"num_key_value_heads": 8}, "num_key_value_heads is 8, the tensors' 2", id="kv heads"),
        pytest.param({"vocab_size": 40}, "vocab_size is 40, the tensors' 96", id="vocabulary"),
        pytest.param(
            {"draft_vocab_size": 96}, "draft_vocab_size is 96, the tensors' 40", id="draft vocabulary"
        ),
        pytest.param(
            {"target_hidden_size": 64}, "target_hidden_size is 64, the tensors' 32", id="target hidden"
        ),
        pytest.param({"num_aux_hidden_states": 5}, "num_aux_hidden_states is 5, the tensors' 3", id="taps"),
    ],
)
def test_a_wrong_config_is_noted_and_tensors_decide(wrong: dict[str, Any], note: str, tmp_path: Path) -> None:
    config = read_eagle3_config(
        write_eagle3(tmp_path / "head", TARGET, "specforge", draft_vocab=40, config=wrong)
    )
    assert any(note in line for line in config.notes)
    true = make_head(TARGET, draft_vocab=40)
    assert all(getattr(config, name) == getattr(true, name) for name in SAME)


def test_a_norm_with_a_tensor_is_used(tmp_path: Path) -> None:
    wrong = {"norm_before_fc": False}
    config = read_eagle3_config(
        write_eagle3(tmp_path / "head", TARGET, "specforge", norm_before_fc=True, config=wrong)
    )
    assert (
        config.norm_before_fc and "norm_before_fc is false, but there is a tensor for it" in config.notes[0]
    )


@pytest.mark.parametrize(("format", "value"), [("speculators", True), ("specforge", False)])
def test_the_default_of_norm_before_residual(format: str, value: bool, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, format, config={"norm_before_residual": None})
    config = read_eagle3_config(folder)
    assert config.norm_before_residual is value
    assert any("norm_before_residual" in note for note in config.notes) is value


def test_taps_of_the_target_are_read_without_target_hidden_size(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"hidden": 16, "taps": (1, 4, 6), "config": {"target_hidden_size": None}}
    config = read_eagle3_config(write_eagle3(tmp_path / "head", TARGET, "specforge", **settings))
    assert (config.target_hidden, config.taps) == (32, 3)
    assert config.notes == ("the config's target_hidden_size is 16, the tensors' 32",)


@pytest.mark.parametrize(
    ("rope", "read_as"),
    [
        pytest.param({}, {"rope_type": "default", "rope_theta": 10000.0}, id="none: never the target's"),
        pytest.param({"rope_theta": 5e5}, {"rope_type": "default", "rope_theta": 5e5}, id="old"),
        pytest.param(
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            id="oldest",
        ),
        pytest.param(
            {"rope_theta": 1.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
            {"rope_type": "default", "rope_theta": 7.0},
            id="new before old",
        ),
        pytest.param(
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 2048,
            },
            id="stretched",
        ),
        pytest.param(
            {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
            {"rope_type": "default", "rope_theta": 10000.0},
            id="of several axes",
        ),
    ],
)
def test_rope_is_the_drafters_own(rope: dict[str, Any], read_as: dict[str, Any], tmp_path: Path) -> None:
    assert (
        read_eagle3_config(write_eagle3(tmp_path / "head", TARGET, "specforge", config=rope)).rope == read_as
    )


Q = torch.ones(1)
REFUSALS: list[Any] = [
    pytest.param(
        {"draft_vocab": 40},
        without("d2t"),
        MissingWeights,
        "40 of 96 tokens, but no d2t says which",
        id="no d2t",
    ),
    *(
        pytest.param(
            {"draft_vocab": 40, "extra": {"d2t": d2t}}, None, CorruptWeights, words, id=f"d2t of {name}"
        )
        for name, d2t, words in (
            ("zeros", torch.zeros(40, dtype=torch.long), r"draft id \d+ is \d+ by d2t, \d+ by t2d"),
            ("draft ids", torch.arange(40), "by d2t, .* by t2d"),
            ("32 bits", torch.full((40,), 50, dtype=torch.int32), "draft id 0 is 50 by d2t"),
        )
    ),
    pytest.param(
        {"draft_vocab": 40, "extra": {"t2d": torch.ones(96, dtype=torch.bool)}},
        None,
        CorruptWeights,
        "d2t has 40 tokens, t2d 96",
        id="t2d of all tokens",
    ),
    pytest.param(
        {"draft_vocab": 40},
        without("lm_head.weight"),
        MissingWeights,
        "no lm_head.weight; the target's is 96 x 32",
        id="no head",
    ),
    pytest.param(
        {"hidden": 16},
        without("embed_tokens.weight"),
        MissingWeights,
        "no embed_tokens.weight; .* 32 wide, not 16",
        id="no embed",
    ),
    pytest.param({}, without("norm.weight"), MissingWeights, "no tensor norm.weight", id="no norm"),
    pytest.param(
        {},
        without("midlayer.hidden_norm.weight"),
        MissingWeights,
        "no tensor layers.0.hidden_norm.weight",
        id="no hidden_norm",
    ),
    pytest.param(
        {"config": {"fc_norm": True}},
        None,
        MissingWeights,
        "fc_norm is set, but there is no tensor",
        id="fc_norm without",
    ),
    pytest.param(
        {"layers": 2, "later_norm": "x"},
        None,
        UnsupportedModel,
        "with layers.1.x.weight, which is not supported",
        id="unknown inside",
    ),
    pytest.param(
        {"extra": {"layers.2.mlp.up_proj.weight": Q}}, None, MissingWeights, r"of layers \[0, 2\]", id="a gap"
    ),
    pytest.param(
        {"extra": {"fc.weight_scale": Q}}, None, UnsupportedModel, "with fc.weight_scale", id="quantised"
    ),
    pytest.param(
        {"extra": {"midlayer.mlp.up_proj.bias": Q}},
        None,
        UnsupportedModel,
        "midlayer.mlp.up_proj.bias",
        id="unknown bias",
    ),
    pytest.param(
        {"extra": {"model.fc.weight": torch.ones(32, 96)}},
        None,
        CorruptWeights,
        "fc.weight and model.fc.weight|model.fc.weight and fc",
        id="twice",
    ),
    pytest.param(
        {"extra": {"fc.bias": Q}}, None, CorruptWeights, r"fc.bias is \[1\], not \[32\]", id="wrong shape"
    ),
    pytest.param(
        {"norm_before_fc": True, "fc_norm": True}, None, ModelError, "input_norm and fc_norm", id="both norms"
    ),
    pytest.param(
        {"config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4, 5]}},
        None,
        ModelError,
        "96 numbers.* 5, of layers",
        id="more ids",
    ),
    pytest.param(
        {"config": {"eagle_aux_hidden_state_layer_ids": [1, 1, 3]}},
        None,
        ModelError,
        "names a layer twice",
        id="same ids",
    ),
    pytest.param(
        {"config": {"eagle_aux_hidden_state_layer_ids": "1,2"}},
        None,
        ModelError,
        "no list of layers",
        id="no list",
    ),
    pytest.param(
        {"config": {"head_dim": 7}}, None, ModelError, "32 and 16, which are no heads of 7", id="head_dim"
    ),
    pytest.param(
        {"config": {"rope_is_neox_style": False}},
        None,
        UnsupportedModel,
        "interleaved RoPE",
        id="interleaved",
    ),
    pytest.param(
        {"config": {"rope_scaling": {"type": "dynamic", "factor": 2.0}}},
        None,
        UnsupportedModel,
        "rope_type 'dynamic' is not supported",
        id="moving rope",
    ),
    pytest.param(
        {"config": {"rope_scaling": {"rope_type": "yarn"}}},
        None,
        ModelError,
        "without its factor",
        id="no factor",
    ),
    pytest.param(
        {"config": {"rope_theta": "much"}}, None, ModelError, "cannot be read .*'much'", id="no number"
    ),
    pytest.param({"config": {"architectures": 5}}, None, ModelError, "cannot be read", id="architectures"),
    pytest.param({"config": {"rms_norm_eps": [1]}}, None, ModelError, "cannot be read", id="eps"),
    pytest.param(
        {"config": {"layer_types": ["chunked"]}}, None, UnsupportedModel, "layer_types", id="layer types"
    ),
    pytest.param(
        {"windows": 5, "config": {"sliding_window": None}},
        None,
        ModelError,
        "ask for a sliding_window",
        id="no window",
    ),
]


@pytest.mark.parametrize(("variant", "change", "error", "words"), REFUSALS)
def test_contradictions_are_refused(
    variant: dict[str, Any], change: Any, error: type[ModelError], words: str, tmp_path: Path
) -> None:
    folder = write_eagle3(tmp_path / "head", TARGET, "specforge", **variant)
    if change:
        read_eagle3_config(folder)
        change(folder)
    with pytest.raises(error, match=words):
        read_eagle3_config(folder)


def test_unordered_taps_are_sorted(tmp_path: Path) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [7, 2, 5]}
    config = read_eagle3_config(write_eagle3(tmp_path / "head", TARGET, "specforge", config=ids))
    assert (config.tap_ids, config.tap_layouts(8)) == ((2, 5, 7), ((1, 4, 6),))
    assert "[7, 2, 5] were put in order" in config.notes[0]


def test_offsets_are_read_without_torch(tmp_path: Path) -> None:
    head = make_head(TARGET, draft_vocab=40)
    config = read_eagle3_config(write_eagle3(tmp_path / "head", TARGET, "nebius", shards=2, draft_vocab=40))
    assert read_offsets(config) == head.tensors["d2t"].tolist()
    assert read_offsets(read_eagle3_config(write_eagle3(tmp_path / "whole", TARGET))) == []


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    folder = write_eagle3(
        tmp_path / "head",
        TARGET,
        lm_head=False,
        own_embed=True,
        hidden=16,
        config={"tie_word_embeddings": True},
    )
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"tie_word_embeddings": false', '"x": 0')
    )
    tensors = read(folder)
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])
