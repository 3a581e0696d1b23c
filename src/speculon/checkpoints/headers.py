"""What a model folder or a GGUF file holds, from its config and headers. Nothing is loaded."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speculon.checkpoints.gguf.header import TEMPLATE, is_gguf, read_split
from speculon.core.errors import (
    CorruptWeights,
    MissingWeights,
    ModelError,
    ModelNotFound,
    UnsafeCheckpoint,
    UnsupportedModel,
)

TOKENIZER_CONFIG = "tokenizer_config.json"
INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Facts about a model folder or a GGUF file. Numbers are None where config and headers have none."""

    path: Path
    architecture: str
    model_type: str
    num_layers: int | None
    hidden_size: int | None
    vocab_size: int | None
    max_context: int | None
    dtype: str | None  # that the config names, else of most parameters; of a GGUF file: of most
    num_parameters: int | None  # None for pickles, whose headers are not read
    num_bytes: int  # of the weight files
    files: tuple[Path, ...]
    pickled: bool
    remote_code: bool  # the config names Python code that comes with the checkpoint
    quantization: str | None
    blocks: bool = False  # it is a GGUF file with quantised tensors
    tensor_types: str | None = None  # of a GGUF file: each type, and the number of its tensors


def read_checkpoint(path: str | Path) -> Checkpoint:
    """Reads a model folder or a GGUF file. Raises `ModelError` with the path and the reason."""
    folder = Path(path).expanduser()
    if is_gguf(folder):
        return gguf_checkpoint(folder)
    config = read_config(folder)
    files, pickled = weight_files(folder)
    sizes: Counter[str] = Counter()
    for file in () if pickled else files:
        sizes.update(parameters_by_dtype(file))
    nested = (config[key] for key in ("text_config", "llm_config") if isinstance(config.get(key), dict))
    text = next(nested, config)

    def number(*names: str) -> int | None:
        return next((text[name] for name in names if isinstance(text.get(name), int)), None)

    return Checkpoint(
        path=folder,
        architecture=next(iter(config.get("architectures") or ()), "unknown"),
        model_type=config.get("model_type", "unknown"),
        num_layers=number("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=number("hidden_size", "n_embd", "d_model"),
        vocab_size=number("vocab_size"),
        max_context=number("max_position_embeddings", "n_positions", "max_sequence_length"),
        dtype=config_dtype(config) or (sizes.most_common(1)[0][0] if sizes else None),
        num_parameters=sum(sizes.values()) or None,
        num_bytes=sum(file.stat().st_size for file in files),
        files=files,
        pickled=pickled,
        remote_code="auto_map" in config,
        quantization=(config.get("quantization_config") or {}).get("quant_method"),
    )


def lacks_chat_template(path: Path) -> bool:
    """Whether the files of a model say that it has no chat template; code of its tokenizer may have one."""
    if is_gguf(path):
        metadata = read_split(path).metadata  # one template, or several by name behind a point
        return not any(metadata[key] for key in metadata if key.startswith(TEMPLATE))
    files = (path / TOKENIZER_CONFIG, *path.glob("chat_template*"), *path.glob("additional_chat_templates/*"))
    if not files[0].is_file() or len(files) > 1:
        return False
    config = read_json(files[0], ModelError)
    return isinstance(config, dict) and not config.get("chat_template") and "auto_map" not in config


def config_dtype(config: dict[str, Any]) -> str | None:
    """What the weights are computed in, which need not be what they are stored in."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    return dtype if dtype in DTYPES.values() else None


def gguf_checkpoint(file: Path) -> Checkpoint:
    """The same of a GGUF file. Its blocks are read by speculon, so it counts as not quantised.

    Of a split one `file` is the first part. Raises `ModelError` for one that is damaged, or another part.
    """
    header = read_split(file)
    vocab = header.metadata.get("tokenizer.ggml.tokens")
    return Checkpoint(
        path=file,
        architecture=header.architecture,
        model_type=header.architecture,
        num_layers=header.num_layers,
        hidden_size=header.number("embedding_length"),
        vocab_size=vocab if isinstance(vocab, int) else header.number("vocab_size"),
        max_context=header.number("context_length"),
        dtype=header.dtype,
        num_parameters=header.num_parameters,
        num_bytes=sum(part.stat().st_size for part in header.files),
        files=header.files,
        pickled=False,
        remote_code=False,
        quantization=None,
        blocks=header.has_blocks,
        tensor_types=", ".join(f"{count} {name}" for name, count in header.types.most_common()),
    )


def read_config(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise ModelNotFound(f"{folder}: no such folder")
    if not folder.is_dir():
        raise ModelNotFound(
            f"{folder}: this is a file, but a model is a GGUF file or a folder with config.json and "
            "safetensors files"
        )
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{folder}: no config.json{adapter_advice(folder)}")
    config = read_json(path, ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a JSON object")
    return config


def adapter_advice(folder: Path) -> str:
    """How to load an adapter whose folder was given as a model; empty for other folders."""
    path = folder / "adapter_config.json"
    if not path.is_file():
        return ""
    config = read_json(path, ModelError)
    base = config.get("base_model_name_or_path") if isinstance(config, dict) else None
    made = f" of {base}" if base else ""
    return f"; it is an adapter{made}: speculon serve --model {base or 'BASE'} --adapter NAME={folder}"


def read_json(path: Path, error: type[ModelError]) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as cause:
        raise error(f"{path}: not readable as JSON ({cause})") from cause


def weight_files(folder: Path) -> tuple[tuple[Path, ...], bool]:
    """The files that hold the weights, and whether they are pickles."""
    if (folder / INDEX).is_file():
        index = read_json(folder / INDEX, CorruptWeights)
        names = sorted(set((index.get("weight_map") or {}).values())) if isinstance(index, dict) else []
        if not names:
            raise CorruptWeights(f"{folder / INDEX}: it has no weight_map")
        if any(Path(name).name != name for name in names):
            raise CorruptWeights(
                f"{folder / INDEX}: it names a file outside of the folder, which is not allowed"
            )
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise MissingWeights(
                f"{folder}: {len(missing)} of {len(names)} weight files are missing, the first is "
                f"{missing[0]}"
            )
        return tuple(folder / name for name in names), False
    if (folder / "model.safetensors").is_file():
        return (folder / "model.safetensors",), False
    if shards := sorted(folder.glob("model-*-of-*.safetensors")):
        raise MissingWeights(f"{folder}: {len(shards)} weight files, but no {INDEX}")
    if pickles := sorted(
        file for pattern in PICKLES for file in folder.glob(pattern) if file.name != "training_args.bin"
    ):
        return tuple(pickles), True
    if ggufs := sorted(folder.glob("*.gguf")):
        raise UnsupportedModel(
            f"{folder}: the folder has GGUF weights; name the file itself, for example {ggufs[0]}"
        )
    raise MissingWeights(f"{folder}: it has no safetensors file")


def refuse_unsafe(checkpoint: Checkpoint, *, allow_pickle: bool) -> None:
    """Pickle weights are refused unless asked for."""
    if checkpoint.pickled and not allow_pickle:
        raise UnsafeCheckpoint(
            f"{checkpoint.files[0]}: pickle weights can run code; "
            "convert them to safetensors, or set allow_pickle if you trust the source"
        )


def parameters_by_dtype(path: Path) -> Counter[str]:
    """Number of parameters by dtype, from a safetensors header that must match the file's size."""
    counts: Counter[str] = Counter()
    end = 0
    header, begin = read_header(path)
    for name, tensor in header.items():
        try:
            first, last = tensor["data_offsets"]
            counts[DTYPES.get(tensor["dtype"], tensor["dtype"].lower())] += math.prod(tensor["shape"])
            good = 0 <= first <= last
        except (KeyError, TypeError, ValueError, AttributeError):
            good = False
        if not good:
            raise CorruptWeights(f"{path}: the header's entry {name!r} is invalid")
        end = max(end, last)
    size = path.stat().st_size
    if size != begin + end:
        state = "truncated" if size < begin + end else "damaged"
        raise CorruptWeights(f"{path}: {size} bytes, but its header says {begin + end}: {state}")
    return counts


def read_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a safetensors file without its metadata, and where the data begins."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise CorruptWeights(
                f"{path}: {size} bytes, but its header alone needs {8 + length}: "
                "truncated, or not a safetensors file"
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as cause:
            raise CorruptWeights(f"{path}: its header is not JSON ({cause})") from cause
    if not isinstance(header, dict):
        raise CorruptWeights(f"{path}: its header is not a JSON object")
    header.pop("__metadata__", None)
    return header, 8 + length
