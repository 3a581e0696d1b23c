"""A checkpoint of every recorded form is read as it was written, and what its config means is understood."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.errors import CorruptWeights, UnsafeCheckpoint, UnsupportedModel, WrongPair
from speculon.runtimes.torch.drafters.config import (
    DrafterConfig,
    TargetShape,
    check_offsets,
    check_pair,
    read_offsets,
)
from speculon.runtimes.torch.drafters.dflash.config import DFlashConfig
from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config
from speculon.runtimes.torch.drafters.families import (
    UNSUPPORTED,
    family_of,
    read_dflash_config,
    read_eagle3_config,
)
from tests.formats.writer import (
    Checkpoint,
    make_checkpoint,
    names,
    record,
    write_checkpoint,
    write_published,
)
from tests.tiny.heads import LLAMA3, TAPLESS, deep_model, deep_target
from tests.tiny.scripted import make_engine, proposer_of

SHAPE = TargetShape(32, 96, 8, "Qwen3ForCausalLM")
EAGLE3, DFLASH = names("eagle3"), names("dflash")
HEADS: dict[str, dict[str, Any]] = {
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
}
SCALES = {"input_embedding_scale": 2, "output_multiplier": 0.5, "final_logit_softcapping": 20.0}
BLOCKS: dict[str, dict[str, Any]] = {
    "usual": {},
    "windows": {"windows": (9, 9)},
    "one layer, one tap": {"layers": 1, "taps": (3,)},
    "taps in another order": {"taps": (4, -1, 2)},
    "wider": {"hidden": 48, "heads": 6, "kv_heads": 3},
    "biases, heads without norms": {"bias": True, "qk_norm": False},
    "the anchor's row drafts": {"from_anchor": True},
    "the anchor's row does not": {"from_anchor": False},
}
SPARKS: dict[str, dict[str, Any]] = {
    "vanilla": {"markov": "vanilla", "confidence": "h and e"},
    "gated": {"markov": "gated", "confidence": "h"},
    "rnn": {"markov": "rnn"},
    "confidence alone": {"confidence": "h"},
}
FLASH2: dict[str, dict[str, Any]] = {
    "scales": {"scales": SCALES},
    "windows without causality": {"windows": (9, 9), "causal": False},
    "three taps": {"conv_taps": 3},
}
SPARK = ("dflash/specforge", "dflash/deepspec", "dflash/speculators")
FORMS = [
    *((name, how, sizes) for name in EAGLE3 for how, sizes in HEADS.items()),
    *((name, how, sizes) for name in DFLASH for how, sizes in BLOCKS.items()),
    *((name, how, sizes) for name in SPARK for how, sizes in SPARKS.items()),
    ("dflash/deepspec", "own head", {"own_head": True}),
    *(("dflash/dflash2", how, sizes) for how, sizes in FLASH2.items()),
    ("dflash/speculators", "DFlash2", {"group": 8, "scales": SCALES, "windows": (9, 9), "causal": False}),
    ("dflash/speculators", "some of the vocabulary", {"draft_vocab": 40, "markov": "gated"}),
]
READ_ALIKE = ("hidden", "layers", "heads", "kv_heads", "head_dim", "intermediate", "eps", "windows")


def stored(config: DrafterConfig) -> dict[str, torch.Tensor]:
    """The tensors that a config's names lead to."""
    found = {}
    for path in config.files:
        with safe_open(path, "pt") as file:
            found |= {o: file.get_tensor(t) for o, t in config.names.items() if t in file.keys()}
    return found


def differences(config: DrafterConfig, made: Checkpoint) -> list[str]:
    """Of what is read from what was made."""
    expected = {name: getattr(made, name) for name in READ_ALIKE}
    expected |= {"target_hidden": made.target_hidden, "taps": len(made.taps)}
    if isinstance(config, Eagle3Config):
        flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "logit_scale")
        alike = ("vocab_size", "draft_vocab_size", "rope", *flags)
        expected |= {name: getattr(made, name) for name in alike} | {"format": made.form}
    if isinstance(config, DFlashConfig):
        expected |= means(made)
    wrong = [name for name, value in expected.items() if getattr(config, name) != value]
    if config.tap_layouts(made.target_layers)[0] != tuple(made.taps):
        wrong.append("taps")
    here = {
        name if ".0." in name else name.replace(".hidden_norm.", ".input_layernorm."): tensor
        for name, tensor in made.tensors.items()
        if name != "t2d"
    }
    tensors = stored(config)
    wrong += here.keys() ^ tensors.keys()
    return wrong + [
        name for name in here.keys() & tensors.keys() if not torch.equal(here[name], tensors[name])
    ]


def means(made: Checkpoint) -> dict[str, Any]:
    """What the form of a block drafter means."""
    known = made.form != "meta" or made.hidden != made.target_hidden  # whose config has no vocabulary
    starts = {"speculators": "before_anchor", "meta": "before_row"}
    embedding, multiplier, cap = (made.scales.get(name) for name in SCALES)
    return {
        "format": "z-lab" if made.form == "dflash2" else made.form,
        "vocab_size": made.vocab_size if known else None,
        "block_size": made.block_size,
        "mask_token_id": made.mask,
        "sample_from_anchor": made.anchor_drafts,
        "max_drafts": made.block_size - (not made.anchor_drafts),
        "causal": made.layer_causal,
        "window_start": starts.get(made.form, "row"),
        "markov": made.markov,
        "markov_rank": made.rank if made.markov else 0,
        "confidence": bool(made.confidence),
        "confidence_with_markov": made.confidence == "h and e",
        "conv_taps": made.conv_taps if made.group else 0,
        "conv_groups": made.hidden // made.group if made.group else 0,
        "selector_rank": made.rank if made.group else 0,
        "selector_top_k": made.top_k if made.group else 0,
        "embedding_scale": embedding or 1.0,
        "logit_scale": multiplier or 1.0,
        "logit_cap": cap,
    }


@pytest.mark.parametrize(("name", "sizes"), [pytest.param(n, s, id=f"{n} {how}") for n, how, s in FORMS])
def test_a_checkpoint_is_read_as_it_was_written(name: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    family, made = family_of(write_checkpoint(tmp_path, name, **sizes)), make_checkpoint(name, **sizes)
    config = family.head
    assert config is not None and family.method == name.partition("/")[0]
    assert not differences(config, made)
    assert all("target_hidden_size" in note for note in config.notes) and not check_pair(config, SHAPE)
    spoken = made.form == "speculators"
    assert config.verifier == (("Qwen3ForCausalLM",) if spoken else ())
    drafts = 3 if isinstance(config, Eagle3Config) else config.max_drafts
    assert config.speculative_tokens == (drafts if spoken else None)


WRITING: dict[str, dict[str, Any]] = {
    "shards": {"shards": 3},
    "prefix": {"prefix": "model."},
    "two prefixes": {"prefix": "draft_model.model."},
    "tables that nobody reads": {
        "tensors": {
            "midlayer.self_attn.rotary_emb.inv_freq": (4,),
            "verifier_norm.weight": (4,),
        }
    },
}


@pytest.mark.parametrize("writing", WRITING)
@pytest.mark.parametrize("name", [*EAGLE3, *DFLASH])
def test_it_is_read_from_any_files(name: str, writing: str, tmp_path: Path) -> None:
    config = family_of(write_checkpoint(tmp_path, name, **WRITING[writing])).head
    assert config is not None and not differences(config, make_checkpoint(name)) and not config.notes


def test_in_bf16_and_under_old_names(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", "eagle3/specforge", dtype=torch.bfloat16)
    config = read_eagle3_config(path)
    assert config.dtype == "bfloat16" and {t.dtype for t in stored(config).values()} == {torch.bfloat16}
    old = {f"fc_norm.{i}": f"aux_norm_{name}" for i, name in enumerate(("low", "mid", "high"))}
    path = write_checkpoint(tmp_path / "b", "eagle3/specforge", fc_norm=True, rename=old)
    assert not differences(read_eagle3_config(path), make_checkpoint("eagle3/specforge", fc_norm=True))
    path = write_checkpoint(
        tmp_path / "c", "dflash/deepspec", markov="rnn", rename={"markov_head": "logit_head.markov_head"}
    )
    assert not differences(read_dflash_config(path), make_checkpoint("dflash/deepspec", markov="rnn"))


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("eagle3/specforge", {"draft_vocab": 41}),
        ("eagle3/specforge", {"seed": 1}),
        ("eagle3/specforge", {"norm_output": True}),
        ("eagle3/specforge", {"rope_theta": 5e5}),
        ("eagle3/specforge", {"taps": (1, 3, 5)}),
        ("eagle3/specforge", {"windows": 6}),
        ("dflash/specforge", {"from_anchor": False}),
        ("dflash/specforge", {"seed": 1}),
        ("dflash/specforge", {"causal": True}),
        ("dflash/specforge", {"markov": "rnn"}),
    ],
)
def test_another_checkpoint_is_found(name: str, other: dict[str, Any], tmp_path: Path) -> None:
    config = family_of(write_checkpoint(tmp_path, name)).head
    assert config is not None
    assert not differences(config, make_checkpoint(name)) and differences(
        config, make_checkpoint(name, **other)
    )


@pytest.mark.parametrize("name", [n for n in EAGLE3 if n.partition("/")[2] not in TAPLESS])
@pytest.mark.parametrize("taps", [(1, 4, 6), (0, 7), (2, 3, 5, 6)])
def test_configured_taps_are_among_the_layouts(name: str, taps: tuple[int, ...], tmp_path: Path) -> None:
    layouts = read_eagle3_config(write_checkpoint(tmp_path, name, taps=taps)).tap_layouts(8)
    known = name == "eagle3/speculators" or taps[0] == 1
    assert layouts[0] == taps and len(layouts) == (1 if known else 2)


PUBLISHED = [
    name
    for name in (*EAGLE3, *DFLASH)
    if "published" in record(name.partition("/")[0])["forms"][name.partition("/")[2]]
]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_read(name: str, tmp_path: Path) -> None:
    """From the header and the config of the published checkpoint, over a file of zeros."""
    published = write_published(tmp_path, name)
    family = family_of(tmp_path).for_target(published["target"]["num_hidden_layers"])
    assert family.summary.startswith(published["summary"]) and family.head is not None
    assert not family.head.notes
    for key, value in published.get("means", {}).items():
        found = getattr(family.head, key)
        assert found == pytest.approx(value) if isinstance(value, float) else list(found) == value


# -- what a config means


@pytest.mark.parametrize(("name", "changes", "note", "facts"), record("tables")["read"])
def test_what_a_config_means(
    name: str, changes: dict[str, Any], note: str, facts: dict[str, Any], tmp_path: Path
) -> None:
    config = family_of(write_checkpoint(tmp_path, name, **changes)).head
    assert config is not None and {fact: as_json(getattr(config, fact)) for fact in facts} == facts
    assert any(note in line for line in config.notes or ("",))


def as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def test_tied_embeddings_are_the_head(tmp_path: Path) -> None:
    tied = {"transformer_layer_config.tie_word_embeddings": True}
    sizes = {"lm_head": False, "own_embed": True, "hidden": 16}
    tensors = stored(
        read_eagle3_config(write_checkpoint(tmp_path, "eagle3/speculators", config=tied, **sizes))
    )
    assert torch.equal(tensors["lm_head.weight"], tensors["embed_tokens.weight"])


def test_offsets_are_read_without_torch(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "a", "eagle3/nebius", shards=2, draft_vocab=40)
    expected = make_checkpoint("eagle3/nebius", draft_vocab=40).tensors["d2t"].tolist()
    assert read_offsets(read_eagle3_config(path)) == expected
    assert read_offsets(read_eagle3_config(write_checkpoint(tmp_path / "b", "eagle3/nebius"))) == []


# -- taps


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Eagle3Config:
    return read_eagle3_config(write_checkpoint(tmp_path_factory.mktemp("head"), "eagle3/speculators"))


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
        pytest.param((0, 20, 40), None, 45, [(0, 20, 40), (-1, 19, 39)], id="nested: one with embeddings"),
        pytest.param((4, 20, 45), None, 45, [(3, 19, 44)], id="nested: only one lies within"),
    ],
)
def test_taps_are_outputs_of_layers(
    ids: Any, after: bool | None, layers: int, tap_layouts: list[tuple[int, ...]], head: Eagle3Config
) -> None:
    assert list(replace(head, tap_ids=ids, after=after).tap_layouts(layers)) == tap_layouts


@pytest.mark.parametrize(
    ("ids", "after", "layers", "words"),
    [
        pytest.param(None, True, 6, "names no layers.*need 7 of them; the target has 6", id="too shallow"),
        pytest.param((1, 29, 57), None, 57, "reads layers 1, 29, 57, .* from 0 to 56", id="nested, beyond"),
        pytest.param((1, 2, 9), False, 8, "reads layers 0, 1, 8, .* from 0 to 7", id="before, beyond"),
        pytest.param((-1, 2, 4), False, 8, "reads layers -2, 1, 3", id="before the embeddings"),
    ],
)
def test_taps_outside_the_target_are_refused(
    ids: Any, after: bool | None, layers: int, words: str, head: Eagle3Config
) -> None:
    with pytest.raises(WrongPair, match=words):
        replace(head, tap_ids=ids, after=after).tap_layouts(layers)


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
def test_taps_of_blocks_without_ids_are_spread_over_the_target(
    layers: int, depth: int, taps: tuple[int, ...], tmp_path: Path
) -> None:
    unnamed = {"dflash_config.target_layer_ids": None, "num_target_layers": None}
    sizes = {"layers": layers, "taps": tuple(range(layers))}
    config = read_dflash_config(write_checkpoint(tmp_path, "dflash/z-lab", config=unnamed, **sizes))
    assert config.tap_layouts(depth) == (taps,)
    assert "after evenly spaced layers" in config.summary()


# -- pairs


@pytest.mark.parametrize(
    ("name", "target", "words"),
    [
        ("eagle3/specforge", {"hidden": 16}, "width 32, the target's are 16"),
        ("eagle3/specforge", {"vocab_size": 1000}, "vocabulary of 96, the target's is 1,000"),
        ("eagle3/specforge", {"num_layers": 6}, "need 7 of them; the target has 6"),
        ("dflash/z-lab", {"hidden": 64}, "width 32, the target's are 64"),
        ("dflash/z-lab", {"vocab_size": 97}, "a vocabulary of 96, the target's is 97"),
        ("dflash/z-lab", {"num_layers": 7}, "was trained for a target of 8 layers, the target has 7"),
        ("dflash/deepspec", {"num_layers": 4}, "reads layers 1, 3, 4, the target's layers go from 0 to 3"),
    ],
)
def test_a_wrong_pair_is_refused_with_both_numbers(
    name: str, target: dict[str, Any], words: str, tmp_path: Path
) -> None:
    config = family_of(write_checkpoint(tmp_path, name)).head
    assert config is not None and check_pair(config, SHAPE) == ()
    with pytest.raises(WrongPair, match=words):
        check_pair(config, replace(SHAPE, **target))


def test_another_architecture_is_a_warning(head: Eagle3Config) -> None:
    warnings = ("made for Qwen3ForCausalLM, the target is LlamaForCausalLM",)
    assert check_pair(head, replace(SHAPE, architecture="LlamaForCausalLM")) == warnings
    assert check_pair(replace(head, verifier=()), replace(SHAPE, architecture="LlamaForCausalLM")) == ()


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


@pytest.mark.parametrize(("family", "name", "changes"), record("tables")["unsupported"])
def test_what_is_not_supported_is_refused_by_name(
    family: str, name: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    found = family_of(write_checkpoint(tmp_path / "drafter", name, **changes))
    assert (found.method, found.head, found.checkpoint) == (None, None, None)
    assert found.summary.startswith(f"{family}: ")
    with pytest.raises(UnsupportedModel, match=rf"drafter: {family} \(.*\) is recognised, but not supported"):
        read_eagle3_config(found.path)


def test_an_unknown_speculators_type_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "eagle3/speculators", config={"speculators_model_type": "oracle"})
    with pytest.raises(UnsupportedModel, match="speculators_model_type 'oracle' is not known here"):
        read_eagle3_config(tmp_path)


def test_every_unsupported_family_has_a_case() -> None:
    assert {one.name for one in UNSUPPORTED} == {family for family, _, _ in record("tables")["unsupported"]}


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("draft_model", {}),
        (
            "draft_model",
            {"tensors": {"mtp.fc.weight": (32, 64), "mtp.norm.weight": (32,)}},
        ),
        ("draft_model", {"config": {"mask_token_id": 4}}),  # as encoders have
        ("pard", {"config": {"pard_token": 95}}),
        ("pard", {"config": {"spd_type": "pard", "mask_token_id": 95}}),
    ],
)
def test_a_language_model_is_a_draft_model(method: str, changes: dict[str, Any], tmp_path: Path) -> None:
    family = family_of(write_checkpoint(tmp_path, "others/llama", **changes))
    assert (family.method, family.refusal) == (method, None) and family.checkpoint is not None
    assert "language model LlamaForCausalLM: 2 layers of 32" in family.summary
    assert family.summary.startswith("PARD ") == (method == "pard")
    with pytest.raises(UnsupportedModel, match="no EAGLE-3 head, but a"):
        read_eagle3_config(tmp_path)


@pytest.mark.parametrize("name", names("mtp"))
def test_prediction_layers_without_a_target_are_named(name: str, tmp_path: Path) -> None:
    model = {"architectures": ["SomeForCausalLM"], "hidden_size": 32}
    family = family_of(write_checkpoint(tmp_path, name, config=model))
    layout = {"mtp/deepseek": "DeepSeek", "mtp/mimo": "MiMo"}.get(name, "Qwen")
    assert family.method == "mtp" and family.modules is not None
    assert family.summary.startswith(f"MTP, 1 module named as {layout}'s")
    assert family.modules.hidden_first == (name == "mtp/mimo")
    with pytest.raises(UnsupportedModel, match="no EAGLE-3 head, but a MTP, 1 module"):
        read_eagle3_config(tmp_path)


def test_families_are_not_confused(tmp_path: Path) -> None:
    """Two taps of one width look like EAGLE-1's joined layer, and the norms are named as EAGLE-3's."""
    assert family_of(write_checkpoint(tmp_path / "a", "dflash/z-lab", taps=(1, 3))).method == "dflash"
    write_checkpoint(tmp_path / "b", "eagle3/speculators")
    with pytest.raises(UnsupportedModel, match="no EAGLE-3 head, but a DFlash drafter by z-lab"):
        read_eagle3_config(tmp_path / "a")
    with pytest.raises(UnsupportedModel, match="no DFlash drafter, but an EAGLE-3 head by speculators"):
        read_dflash_config(tmp_path / "b")
    llama = {"architectures": ["LlamaForCausalLM"]}
    for name in ("dflash/z-lab", "eagle3/specforge"):
        assert family_of(write_checkpoint(tmp_path / "c", name, config=llama)).method == name.split("/")[0]


@pytest.mark.parametrize(
    "name", ["eagle3/specforge", "eagle3/safeailab", "dflash/z-lab", "gemma4_assistant/assistant"]
)
def test_pickles_are_refused(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name, pickled=True)
    with pytest.raises(
        UnsafeCheckpoint, match=r"pytorch_model.bin: pickle weights can run code; .* convert them"
    ):
        family_of(tmp_path)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    file = write_checkpoint(tmp_path, "eagle3/specforge") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    with pytest.raises(CorruptWeights, match="truncated"):
        family_of(tmp_path)


# -- engines and commands


def test_inspect_says_what_it_is(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "dflash/dflash2")
    done = CliRunner().invoke(app, ["inspect", str(path), "--json"], catch_exceptions=False)
    facts = json.loads(done.stdout)
    assert done.exit_code == 0 and facts["method"] == "dflash"
    assert facts["found"].startswith("DFlash2 drafter by z-lab: 2 layers of 32, 3 taps of width 32")
    block = "convolutions of 2 rows in 4 groups of channels, a selector of rank 6 over 5 candidates"
    assert facts["block"] == f"8 rows, the anchor's row does not draft, {block}"


def test_options_correct_a_config(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "dflash/z-lab", deep_model().config)
    options = {"taps": [4, 1, 3], "sample_from_anchor": True}
    engine = make_engine(deep_target(), speculation={"draft": {"dflash": str(path)}, "options": options})
    needs = proposer_of(engine, "dflash").needs
    assert (needs.taps, needs.max_drafts) == ((4, 1, 3), 8)


@pytest.mark.parametrize(
    ("name", "sizes", "layers"),
    [
        (
            "dflash/deepspec",
            {"markov": "gated", "confidence": "h and e", "windows": (9, None)},
            [(0, 384, None), (8, 128, 9), (8, 128, None)],
        ),
        ("dflash/dflash2", {}, [(0, 384, None), (8, 128, None), (8, 128, None)]),
        ("eagle3/specforge", {"windows": 6}, [(0, 384, None), (8, 128, 6)]),
    ],
)
def test_the_memory_estimate_has_weights_and_pages(
    name: str, sizes: dict[str, Any], layers: list[Any], tmp_path: Path
) -> None:
    method, config = name.partition("/")[0], deep_model().config
    path = write_checkpoint(tmp_path, name, config, **sizes)
    engine = make_engine(deep_target(), speculation={"draft": {method: str(path)}})
    needs = proposer_of(engine, method).needs
    weights = sum(tensor.nbytes for tensor in make_checkpoint(name, config, **sizes).tensors.values())
    assert needs.bytes_fixed == weights == engine.runtime.estimate.drafters
    assert [(spec.v_dim, spec.bytes_per_token, spec.window) for spec in needs.layers] == layers
    assert needs.bytes_scratch > 0
