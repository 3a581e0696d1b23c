"""GGUF files are models: read as they say, or refused by name."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, GgufConfig, LlamaForCausalLM

from speculon import LLM, SamplingParams, SpeculationConfig
from speculon.checkpoints.gguf.header import HeaderReader, read_gguf
from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.locate import locate, refuse_missing
from speculon.checkpoints.reading import load_tokenizer
from speculon.cli.discover import find_models
from speculon.core.config import EngineConfig
from speculon.core.errors import (
    CorruptWeights,
    MissingWeights,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
)
from speculon.runtimes.torch.drafters.choose import fits
from speculon.runtimes.torch.drafters.families import DRAFT_MODEL, family_of
from speculon.runtimes.torch.loading.load import load_config, load_model, load_target
from speculon.runtimes.torch.loading.memory import weight_bytes
from tests.tiny.gguf_files import ALL, tiny_llama, write_gguf

IDS = torch.tensor([[1, 40, 41, 60, 90, 7, 8, 12, 30, 33, 44]])
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture(scope="module")
def file(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def loaded(path: Path) -> LlamaForCausalLM:
    checkpoint = read_checkpoint(path)
    config = load_config(checkpoint, False)
    return load_model(checkpoint, config, torch.float32, torch.device("cpu"), False).eval()


@torch.inference_mode()
def logits(model: LlamaForCausalLM, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids).logits


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(((one - other).abs().max() / other.abs().max()) < 1e-4)


def test_weights_are_those_of_the_model(model: LlamaForCausalLM, file: Path) -> None:
    assert near(logits(loaded(file)), logits(model))


def test_weights_in_another_order_are_seen(model: LlamaForCausalLM, tmp_path: Path) -> None:
    """The planted error of the test above."""
    wrong = write_gguf(model, tmp_path / "wrong.gguf", permute=False)
    assert not near(logits(loaded(wrong)), logits(model))


def test_quantised_weights_are_those_transformers_reads(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "q.gguf", quantise="Q8_0")
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    )
    assert torch.equal(logits(loaded(path)), logits(theirs))
    assert not torch.equal(logits(theirs), logits(model))


def test_a_load_parses_the_header_once(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path, readings = write_gguf(model, tmp_path / "new.gguf"), []
    with pytest.MonkeyPatch.context() as patch:
        parse = HeaderReader.header
        patch.setattr(HeaderReader, "header", lambda reader: readings.append(reader.path) or parse(reader))
        load_tokenizer(path)
        load_target(path)
    assert readings == [path]


def test_the_header_is_read_as_ggufs_own_reader_reads_it(file: Path) -> None:
    theirs = gguf.GGUFReader(str(file))
    ours = read_gguf(file, lists=frozenset(theirs.fields))
    fields = {name: one.contents() for name, one in theirs.fields.items() if not name.startswith("GGUF.")}
    assert ours.metadata == fields and ours.metadata["tokenizer.ggml.tokens"] == list(ALL)
    for tensor, their in zip(ours.tensors, theirs.tensors, strict=True):
        assert (tensor.name, tensor.type) == (their.name, their.tensor_type.name)
        assert ours.begin + tensor.begin == their.data_offset and tensor.num_bytes == their.n_bytes
        assert [*reversed(tensor.shape)] == their.shape.tolist()


def test_a_file_that_was_replaced_is_read_again(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "one.gguf")
    before = read_gguf(path)
    assert read_gguf(path) is before
    write_gguf(model, path, quantise="Q8_0")
    assert read_gguf(path).types != before.types


def test_generates_and_drafts_with_a_gguf_draft(model: LlamaForCausalLM, file: Path) -> None:
    expected = model.generate(IDS, max_new_tokens=12, do_sample=False, eos_token_id=[2, 3])
    expected = expected[0, IDS.shape[1] :].tolist()
    for draft in (None, str(file)):
        with LLM(str(file), dtype="float32", speculation=SpeculationConfig(draft=draft)) as llm:
            params = SamplingParams(max_tokens=12, temperature=0)
            result = llm.generate([IDS[0].tolist()], params)[0]
            assert result.outputs[0].token_ids == expected
            assert llm.tokenizer is not None


def test_facts(file: Path) -> None:
    checkpoint = read_checkpoint(file)
    assert (checkpoint.architecture, checkpoint.num_layers, checkpoint.hidden_size) == ("llama", 2, 32)
    assert (checkpoint.vocab_size, checkpoint.max_context, checkpoint.dtype) == (len(ALL), 128, "float32")
    assert checkpoint.tensor_types == "21 F32"
    assert family_of(file).method == DRAFT_MODEL


def test_size_is_that_of_dequantised_weights(model: LlamaForCausalLM, tmp_path: Path) -> None:
    checkpoint = read_checkpoint(write_gguf(model, tmp_path / "q.gguf", quantise="Q8_0"))
    count = sum(one.numel() for one in model.parameters())
    assert (checkpoint.num_parameters, checkpoint.dtype) == (count, "bfloat16")
    assert checkpoint.tensor_types == "16 Q8_0, 5 F32"
    assert weight_bytes(checkpoint, torch.bfloat16) == 2 * count


def test_context_and_ends_are_in_the_metadata(file: Path) -> None:
    target = load_target(file, dtype="float32")
    assert target.max_context == 128
    assert target.eos_ids == {2, 3}  # </s> by its id, <|im_end|> by its name


def test_a_named_template_ends_turns_too(model: LlamaForCausalLM, tmp_path: Path) -> None:
    named = {"tokenizer.chat_template": "{{ messages }}", "tokenizer.chat_template.tool_use": "<|im_end|>"}
    path = write_gguf(model, tmp_path / "named.gguf", more=named)
    assert load_target(path, dtype="float32").eos_ids == {2, 3}


def test_the_tokenizer_is_that_of_the_file_beside_another_one(file: Path, tmp_path: Path) -> None:
    """transformers would take the one that lies beside it."""
    beside = tmp_path / file.name
    shutil.copy(file, beside)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(locate("demo") / name, tmp_path)
    assert load_tokenizer(beside).get_vocab() == load_tokenizer(file).get_vocab()
    assert load_tokenizer(beside).get_vocab() != load_tokenizer("demo").get_vocab()


def test_tokenizer_and_chat_template(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    assert tokenizer.encode("ab!") == [ALL.index("ab"), ALL.index("!")]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab<|im_end|>"


def factors(base: float = 500000.0, dims: int = 8) -> torch.Tensor:
    """By transformers' own frequencies, with and without scaling."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = tiny_llama(rope_parameters=LLAMA3).config
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    return 1 / base ** (torch.arange(0, dims, 2) / dims) / scaled


def test_llama3_scaling_is_read_from_its_factors(tmp_path: Path) -> None:
    model = tiny_llama(rope_parameters=LLAMA3)
    path = write_gguf(model, tmp_path / "l3.gguf", tensors={"rope_freqs.weight": factors()})
    ids = torch.arange(4, 100)[None]
    assert near(logits(loaded(path), ids), logits(model, ids))
    assert read_checkpoint(path).num_parameters == sum(one.numel() for one in model.parameters())
    without = write_gguf(model, tmp_path / "none.gguf")
    assert not near(logits(loaded(without), ids), logits(model, ids))  # the factors matter here


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    model = tiny_llama(rope_parameters=linear)
    more = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert near(logits(loaded(write_gguf(model, tmp_path / "linear.gguf", more=more))), logits(model))


WrongFile = Callable[[Path], Path]


def cut(folder: Path) -> Path:
    path = write_gguf(tiny_llama(), folder / "cut.gguf")
    path.write_bytes(path.read_bytes()[:-5000])
    return path


def of_text(folder: Path) -> Path:
    (folder / "text.gguf").write_text("not a model")
    return folder / "text.gguf"


REFUSED: dict[str, tuple[WrongFile, type[ModelError], str]] = {
    "missing": (lambda folder: folder / "none.gguf", ModelNotFound, "no such file"),
    "text": (of_text, CorruptWeights, "does not begin with GGUF"),
    "cut data": (cut, CorruptWeights, "truncated"),
    "split": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", split=5),
        UnsupportedModel,
        "runtime torch only when `llama-gguf-split --merge`",
    ),
    "split by metadata": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", more={"split.count": 2}),
        UnsupportedModel,
        "split",
    ),
    "alignment of 0": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", more={"general.alignment": 0}),
        CorruptWeights,
        "damaged",
    ),
    "text for a number": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", more={"split.count": "two"}),
        CorruptWeights,
        "damaged",
    ),
    "architecture": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", architecture="nonsuch"),
        UnsupportedModel,
        "'nonsuch'",
    ),
    "tensor left out": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", leave_out="1.mlp.up_proj"),
        MissingWeights,
        "1 tensors are missing, first model.layers.1.mlp.up_proj",
    ),
    "other factors": (
        lambda folder: write_gguf(
            tiny_llama(), folder / "a.gguf", tensors={"rope_freqs.weight": torch.tensor([1.0, 2, 3, 9])}
        ),
        UnsupportedModel,
        "not those of Llama 3",
    ),
    "other scaling": (
        lambda folder: write_gguf(tiny_llama(), folder / "a.gguf", more={"llama.rope.scaling.type": "odd"}),
        UnsupportedModel,
        "'odd' RoPE",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, tmp_path: Path) -> None:
    make, error, words = REFUSED[name]
    path = make(tmp_path)
    with pytest.raises(error) as caught:
        load_target(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert words in str(caught.value)


def test_every_cut_of_the_header_is_named(file: Path, tmp_path: Path) -> None:
    data, path = file.read_bytes(), tmp_path / "cut.gguf"
    for size in range(0, len(data), 97):
        path.write_bytes(data[:size])
        with pytest.raises(CorruptWeights):
            read_checkpoint(path)


def test_a_missing_file_is_no_hub_id() -> None:
    with pytest.raises(ModelNotFound, match="no such file"):
        refuse_missing("none.gguf")
    assert locate("none.gguf") == Path("none.gguf")


def test_reading_the_header_imports_no_torch(file: Path) -> None:
    code = (
        "import sys, json; from speculon.checkpoints.headers import read_checkpoint; "
        f"found = read_checkpoint({str(file)!r}); "
        "print(json.dumps([found.num_layers, 'torch' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [2, False]


def test_files_in_a_folder_of_models(model: LlamaForCausalLM, tmp_path: Path) -> None:
    path = write_gguf(model, tmp_path / "small.gguf")
    (tmp_path / "damaged.gguf").write_text("not a model")
    assert find_models([], tmp_path).models == {"small": str(path)}
    assert find_models([str(path)], None).models == {"small": str(path)}


def test_a_smaller_file_fits_as_a_draft(file: Path, tmp_path: Path) -> None:
    small = write_gguf(tiny_llama(num_hidden_layers=1), tmp_path / "small.gguf")
    here, swapped = fits(EngineConfig(model=str(file)), [str(small), str(file)])
    assert (here.method, here.warnings, here.refusal) == (DRAFT_MODEL, (), None)
    assert swapped.refusal is not None and "parameters" in swapped.refusal
