"""A checked Target from a folder, a GGUF file, a hub id or a model in memory."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

from speculon.checkpoints.adapter_config import read_adapters
from speculon.checkpoints.gguf.header import is_gguf
from speculon.checkpoints.headers import Checkpoint, read_checkpoint, refuse_unsafe
from speculon.checkpoints.locate import first_line, locate
from speculon.checkpoints.reading import quiet, release_memory
from speculon.core.config.speculation import Quantization
from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    MissingWeights,
    ModelError,
    UnsafeCheckpoint,
    UnsupportedModel,
)
from speculon.runtimes.torch.loading.adapters import add_adapters
from speculon.runtimes.torch.loading.ends import eos_ids
from speculon.runtimes.torch.loading.gguf.config import read_config as read_gguf_config
from speculon.runtimes.torch.loading.gguf.weights import load_gguf
from speculon.runtimes.torch.loading.invariant import decide
from speculon.runtimes.torch.loading.load_check import (
    ImageSample,
    check_images,
    check_logits,
    image_sample,
    logits_in_fp32,
    stock_image_logits,
    stock_logits,
)
from speculon.runtimes.torch.loading.probe import discover, use_attention
from speculon.runtimes.torch.loading.quantization import (
    model_class,
    native_bf16,
    round_weights,
    will_be_packed,
)
from speculon.runtimes.torch.model import attention
from speculon.runtimes.torch.model.fuse import fuse, fuse_norms, pack_rest
from speculon.runtimes.torch.model.kept_weights import keeping
from speculon.runtimes.torch.model.recurrent import decide as decide_continuation
from speculon.runtimes.torch.model.remembered import passed, passes, remembering
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.model.vision import vision_of

# elements; smaller buffers (rotary tables) are copied, larger ones (packed weights) shared
OWN_BUFFER = 1 << 16
# guesses, for a config without a limit: where keys and values take memory per token, and where nothing does
DEFAULT_CONTEXT, WITHOUT_ATTENTION = 4096, 1 << 17
RECURRENT = "it keeps a recurrent state: its layers are not fused, except norms"

OnStage = Callable[[str], None]  # called with the name of each stage as it begins


def load_target(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    max_context: int | None = None,
    fused: bool = True,
    compile: bool = False,
    batch_invariant: bool | None = False,
    quantization: Quantization = "auto",
    adapters: Mapping[str, str] | None = None,
    progress: OnStage | None = None,
) -> Target:
    """A checked Target from a folder, a GGUF file, a hub id or a name, with `adapters` (folders by name).

    Raises `ModelError` with path and reason.
    """
    report = progress or (lambda stage: None)
    report("reading the checkpoint")
    folder = locate(path, trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
    checkpoint = read_checkpoint(folder)
    refuse_unsafe(checkpoint, allow_pickle=allow_pickle)
    own = read_adapters(adapters or {})
    with quiet():
        config = load_config(checkpoint, trust_remote_code)
        place = pick_device(device)
        precision = dtype_of(checkpoint, config, dtype, quantization, place)
        report("loading the weights")
        notes: tuple[str, ...] = ()
        if quantization == "auto" and will_be_packed(quantization, checkpoint, config, precision, place):
            model = load_gguf(checkpoint.path, config, precision, packed_on=place).to(place)
        else:
            model = load_model(checkpoint, config, precision, torch.device("cpu"), trust_remote_code)
            notes = quantized_elsewhere(checkpoint.quantization, model)
            round_weights(model, quantization, checkpoint, place)
            model = model.to(place)
        release_memory()
        settings: tuple[object, ...] = precision, place, max_context, fused, compile, batch_invariant
        settings += quantization, *sorted({layer for adapter in own for layer in adapter.layers})
        files = [*checkpoint.files, *configs(folder)]
        with remembering(files, *settings), keeping(files, precision, place, quantization, fused):
            report("checking the model against its stock forward")
            sample = partial(image_sample, folder, trust_remote_code)
            fast = {"fused": fused, "compile": compile}
            mapped = not is_gguf(checkpoint.path)
            target = make_target(model, str(path), max_context, **fast, mapped=mapped, sample=sample)
            target.source = str(folder)
            target.notes += notes
            add_adapters(target, own)
            release_memory()  # of what was packed
            if batch_invariant is not False:
                report("checking that logits do not depend on the batch")
                decide(target, batch_invariant)
        release_memory()
        return target


def quantized_elsewhere(method: str | None, model: PreTrainedModel) -> tuple[str, ...]:
    """What became of weights that another library quantised."""
    if method is None:
        return ()
    if all(type(p.data) is Tensor and p.is_floating_point() for p in model.parameters()):
        return (f"quantised by {method}, whose library made numbers of it",)
    return (f"quantised by {method}: its layers run as its library has them",)


def configs(folder: Path) -> list[Path]:
    """Files that say what the weights mean, with a model's own code; a GGUF file says it itself."""
    return sorted([*folder.glob("*config.json"), *folder.glob("*.py")]) if folder.is_dir() else []


def wrap_model(
    model: PreTrainedModel,
    *,
    name: str | None = None,
    max_context: int | None = None,
    fused: bool = True,
    share: bool = True,
    compile: bool = False,
    batch_invariant: bool | None = False,
) -> Target:
    """A checked Target over a model in memory, which is not modified.

    With `share` no matrix is copied, so fewer products are fused.
    """
    name = name or type(model).__name__
    with quiet():
        structure = own_structure(model)
        target = make_target(structure, name, max_context, fused=fused, share=share, compile=compile)
        decide(target, batch_invariant)
        return target


def own_structure(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in a new module tree; its own config holds the choice of attention."""
    shared = [*model.parameters(), *(b for b in model.buffers() if b.numel() > OWN_BUFFER)]
    memo: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    return copy.deepcopy(model, memo)


def make_target(
    model: PreTrainedModel,
    name: str,
    max_context: int | None,
    *,
    fused: bool,
    share: bool = False,
    compile: bool = False,
    mapped: bool = True,
    sample: Callable[[], ImageSample | None] | None = None,
) -> Target:
    """Fuses and checks a model that was read. With a `sample` images are checked, too."""
    model.eval()
    vision, no_images = vision_of(model)  # by its config, before it reads text alone
    layers, vocab_size, mixers = discover(model)
    decide_continuation(mixers)
    limit, notes = context_limit(model, max_context, any(layer.heads for layer in layers))
    if max_context is not None and max_context > limit:
        raise ConfigError(f"max_context = {max_context}: {name} reaches {limit}")
    target = Target(
        model,
        layers,
        name=name,
        vocab_size=vocab_size,
        max_context=max_context or limit,
        eos_ids=eos_ids(model),
        notes=(*notes, *([RECURRENT] if mixers else [])),
        mixers=mixers,
        vision=vision,
        no_images=no_images,
    )
    checked = "logits, compiled" if compile else "logits"
    known = passed(checked)
    expected, truth = (None, None) if known else (stock_logits(target), logits_in_fp32(target))
    release_memory()
    seen = stock_image_logits(target, sample)
    use_attention(model, attention.NAME)
    for mixer in mixers:
        mixer.install()
    if fused and compile and mixers:
        raise UnsupportedModel(f"{name}: compile is not supported for recurrent models ({mixers[0].where})")
    if fused and mixers:
        fuse_norms(target)
    elif fused:
        fuse(target, share=share, compile=compile, mapped=mapped)
    else:
        pack_rest(model)
    if expected is not None:
        check_logits(target, expected, truth)
        if not compile or target.runner.form in ("compiled", "captured"):  # else it may be, next time
            passes(checked)
    check_images(target, seen)
    return target


def load_config(checkpoint: Checkpoint, trust_remote_code: bool) -> PreTrainedConfig:
    if checkpoint.remote_code and checkpoint.model_type not in CONFIG_MAPPING and not trust_remote_code:
        advice = "read it, then pass trust_remote_code=True"
        raise UnsafeCheckpoint(f"{checkpoint.path}: needs Python code that comes with it; {advice}")
    if is_gguf(checkpoint.path):
        return read_gguf_config(checkpoint.path)
    try:
        config = AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=trust_remote_code, local_files_only=True
        )
    except Exception as error:
        if checkpoint.model_type not in CONFIG_MAPPING and not checkpoint.remote_code:
            known = f"this transformers does not know model_type {checkpoint.model_type!r}"
            raise UnsupportedModel(f"{checkpoint.path}: {known}") from error
        raise ModelError(f"{checkpoint.path / 'config.json'}: {first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{checkpoint.path}: {checkpoint.architecture} is an encoder-decoder")
    return config


def load_model(
    checkpoint: Checkpoint,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
) -> PreTrainedModel:
    if is_gguf(checkpoint.path):
        return load_gguf(checkpoint.path, config, dtype).to(device)
    refuse_unknown_method(checkpoint)
    try:
        model, info = (
            AutoModelForCausalLM if checkpoint.remote_code else model_class(config)
        ).from_pretrained(
            checkpoint.path,
            config=config,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            use_safetensors=not checkpoint.pickled,
            weights_only=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, with their names
            output_loading_info=True,
        )
    except Exception as error:
        raise loading_error(checkpoint, error) from error
    if missing := sorted(info["missing_keys"]):
        raise MissingWeights(f"{checkpoint.path}: {len(missing)} tensors are missing, first {missing[0]}")
    if wrong := sorted(info["mismatched_keys"]):
        name, found, expected = wrong[0]
        count = f"{len(wrong)} tensors have another shape than the config says"
        shapes = f"{[*found]} instead of {[*expected]}"
        raise CorruptWeights(f"{checkpoint.path}: {count}, first {name}: {shapes}")
    if scales := sorted(name for name in info["unexpected_keys"] if is_scale(name, model)):
        reason = f"transformers ignores {len(scales)} scales of its weights, first {scales[0]}"
        raise UnsupportedModel(f"{checkpoint.path}: {reason}")
    return model.to(device)


def is_scale(name: str, model: PreTrainedModel) -> bool:
    """Whether a tensor is the scale of a weight that the model has."""
    module, _, last = name.rpartition(".")
    return "scale" in last and f"{module}.weight" in dict(model.named_parameters(remove_duplicate=False))


def refuse_unknown_method(checkpoint: Checkpoint) -> None:
    """Raises `UnsupportedModel` for a quantisation whose scales transformers would ignore in silence."""
    method = checkpoint.quantization
    known = AUTO_QUANTIZER_MAPPING.keys() | {"bitsandbytes"}  # there with its bits
    if method is not None and method not in known:
        lacks = f"transformers does not know the quantisation {method!r}"
        raise UnsupportedModel(f"{checkpoint.path}: {lacks}; take the checkpoint that is not quantised")


def loading_error(checkpoint: Checkpoint, error: Exception) -> ModelError:
    if isinstance(error, pickle.UnpicklingError):  # torch's own message tells how to run what it holds
        reason = "it is damaged, or holds objects other than tensors, which can run code"
        return UnsafeCheckpoint(f"{checkpoint.files[0]}: not loaded, since {reason}")
    line = f"{checkpoint.path}: {first_line(error)}"
    if "mismatch" in str(error) or "size" in str(error) and "shape" in str(error):
        return CorruptWeights(line)
    if checkpoint.pickled:
        return CorruptWeights(f"{checkpoint.files[0]}: not readable as weights ({first_line(error)})")
    return UnsupportedModel(line)


def pick_device(device: str) -> torch.device:
    """The device of that name. Raises `ConfigError` for a missing one, before anything is loaded."""
    counts = {"cpu": 1, "mps": int(torch.backends.mps.is_available()), "cuda": torch.cuda.device_count()}
    if device == "auto":
        return torch.device("cuda" if counts["cuda"] else "mps" if counts["mps"] else "cpu")
    name, _, number = device.partition(":")
    if name not in counts or (number and not number.isdecimal()):
        raise ConfigError(f"device = {device!r}: must be auto, cpu, cuda, cuda:N or mps")
    if int(number or 0) >= counts[name]:
        raise ConfigError(f"device = {device!r}: this machine has {counts[name]} {name} devices")
    return torch.device(device)


def dtype_of(
    checkpoint: Checkpoint, config: PreTrainedConfig, dtype: str, setting: Quantization, device: torch.device
) -> torch.dtype:
    """As `pick_dtype`. `auto` is bf16 for packed weights, also on a CPU without it: it is fast with these."""
    picked = pick_dtype(dtype, checkpoint.dtype, device)
    if dtype != "auto" or picked is not torch.float32 or checkpoint.dtype != "bfloat16":
        return picked
    return torch.bfloat16 if will_be_packed(setting, checkpoint, config, torch.bfloat16, device) else picked


def pick_dtype(dtype: str, stored: str | None, device: torch.device) -> torch.dtype:
    """`auto` is the checkpoint's own dtype; fp32 on a CPU that cannot multiply it natively."""
    if dtype != "auto":
        return getattr(torch, dtype)
    own = {"float16": torch.float16, "bfloat16": torch.bfloat16}.get(stored or "", torch.float32)
    if device.type != "cpu" or own is torch.float32:
        return own
    return own if own is torch.bfloat16 and native_bf16() else torch.float32


def context_limit(
    model: PreTrainedModel, max_context: int | None = None, attends: bool = True
) -> tuple[int, tuple[str, ...]]:
    """The longest context of this model here, and notes for the user, who may have set one.

    Where the config has none, it is the one that is set, else an assumed one.
    """
    limit: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    assumed = DEFAULT_CONTEXT if attends else WITHOUT_ATTENTION
    notes = []
    if not (limit or max_context):
        notes = [f"the config has no context length; {assumed} is assumed, unless max_context is set"]
    limit = limit or max_context or assumed
    for rope_type, length in rope_limits(model):
        if length < limit:
            # The library scales by the longest position of a batch: one sequence would change the others.
            reason = f"{rope_type} RoPE beyond it depends on the other sequences of a batch"
            notes.append(f"context is {length} instead of {limit}: {reason}")
            limit = length
    for module in model.modules():
        # Llama 4 scales queries by their row in the batch, as if that were their position
        scale: Any = getattr(module, "floor_scale", None)
        if scale is not None and getattr(module, "attn_temperature_tuning", False) and scale - 1 < limit:
            length = int(scale) - 1
            notes.append(f"context is {length} instead of {limit}: attention scales by row beyond it")
            limit = length
    return limit, tuple(notes)


def rope_limits(model: PreTrainedModel) -> Iterator[tuple[str, int]]:
    """For each rotary table that changes with length: its type, and the length up to which it is constant."""
    module: Any
    for module in model.modules():
        types = getattr(module, "rope_type", None)
        for layer_type, rope_type in (types if isinstance(types, dict) else {None: types}).items():
            if not isinstance(rope_type, str) or not ("dynamic" in rope_type or rope_type == "longrope"):
                continue
            parameters = module.config.rope_parameters
            parameters = parameters if layer_type is None else parameters[layer_type]
            length = parameters.get("original_max_position_embeddings")
            length = length or getattr(module, "original_max_seq_len", None)
            if not length:
                raise UnsupportedModel(
                    f"{type(module).__name__}: {rope_type} RoPE without an original length"
                )
            yield rope_type, int(length)
