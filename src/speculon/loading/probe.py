"""Probes an architecture: one forward with recording functions finds its layers, masks and heads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from speculon.core.errors import UnsupportedModel
from speculon.core.types import LayerSpec
from speculon.loading.mixers import cache_argument, watching
from speculon.loading.older import adapt
from speculon.target import attention
from speculon.target.recurrent import Mixer

NAME = "speculon_probe"
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
# they may keep states, attend, do both, or neither: what they do is watched
RECURRENT_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}
# arguments that architectures pass to attention: those used there, and those that change nothing
USED = {"scaling", "softcap", "s_aux"}
IGNORED = {
    "sliding_window",
    "position_ids",
    "cache_position",
    "position_embeddings",
    "use_cache",
    "past_key_values",
}
STATE_ARGUMENTS = {"state", "cache_params"}

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of the attention function."""

    layer: int
    where: str
    spec: LayerSpec
    mask: int | None  # which of the recorded masks


@dataclass(slots=True)
class Record:
    layers: list[AttentionCall] = field(default_factory=list)
    masks: list[tuple[MaskFunction, int | None]] = field(default_factory=list)  # and its local size
    attending: list[nn.Module] = field(default_factory=list)


_record: ContextVar[Record] = ContextVar("speculon_probe_record")


def record_mask(
    *, mask_function: MaskFunction, q_length: int, local_size: int | None = None, **_: Any
) -> Tensor:
    """Replaces mask creation: records the request, and returns a mask filled with its number."""
    masks = _record.get().masks
    masks.append((mask_function, local_size))
    return torch.full((1, 1, q_length, q_length), float(len(masks)))


def record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Replaces attention: records the layer's shape, and refuses what `attend` does not support."""
    where, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"{where} does not know its layer index")
    if key.dtype != value.dtype:
        raise UnsupportedModel(f"{where} keeps keys in {key.dtype} and values in {value.dtype}")
    refuse_arguments(module, where, kwargs)
    spec = LayerSpec("attention", key.shape[1], key.shape[3], value.shape[3], key.dtype)
    _record.get().attending.append(module)
    _record.get().layers.append(AttentionCall(layer, where, spec, mask_number(attention_mask, where)))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(attention.NAME, attention.attend)
AttentionInterface.register(NAME, record_attention)
# No mask is registered for `attention.NAME`: transformers then makes none, as a step needs none.
AttentionMaskInterface.register(NAME, record_mask)


def refuse_arguments(module: nn.Module, where: str, kwargs: dict[str, Any]) -> None:
    if kwargs.get("dropout"):
        raise UnsupportedModel(f"{where} uses dropout {kwargs['dropout']}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{where} attends in both directions (is_causal = False)")
    for name, value in kwargs.items():
        if name not in USED | IGNORED and isinstance(value, Tensor):
            raise UnsupportedModel(
                f"{where} passes `{name}` {list(value.shape)} to attention, which is not supported"
            )


def mask_number(mask: Tensor | None, where: str) -> int | None:
    if mask is None:
        return None
    number = mask.flatten()[0].item()
    if mask.dtype == torch.bool or number < 1 or number != int(number) or not bool((mask == number).all()):
        raise UnsupportedModel(f"{where} builds an attention mask of its own")
    return int(number) - 1


@torch.inference_mode()
def discover(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], int, tuple[Mixer, ...]]:
    """Each layer's part of a page, the vocabulary's size and the recurrent mixers, from one forward of a few
    tokens.
    """
    refuse_unsupported(model)
    recurrent = recurrent_part(model)
    use_attention(model, NAME)
    token = _record.set(record := Record())
    try:
        ids = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        positions = torch.arange(8, device=model.device)[None]
        row = {"input_ids": ids, "position_ids": positions, "logits_to_keep": 1}
        mixers: tuple[Mixer, ...] = ()
        if recurrent is None:
            out = model(**row, use_cache=False)
        else:
            out, mixers = watched_forward(model, row, recurrent)
    finally:
        _record.reset(token)
    return specs_of(model, record, mixers), out.logits.shape[-1], mixers


def recurrent_part(model: PreTrainedModel) -> str | None:
    """What shows, before a forward, that a model keeps more of a sequence than keys and values."""
    name, config = type(model).__name__, model.config.get_text_config()
    if stateful := STATE_ARGUMENTS & set(inspect.signature(model.forward).parameters):
        return f"{name} is recurrent (its forward takes `{stateful.pop()}`)"
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
            return f"{name}: {parent} keeps a recurrent state ({path})"
    if found := RECURRENT_LAYERS & set(getattr(config, "layer_types", None) or ()):
        return f"{name} has layers of type {', '.join(sorted(found))}"
    return None


def watched_forward(
    model: PreTrainedModel, row: dict[str, Any], recurrent: str
) -> tuple[Any, tuple[Mixer, ...]]:
    """One forward with a cache, and the mixers that wrote states to it.

    Raises `UnsupportedModel` where there is none, or another convolution.
    """
    argument, accepted = cache_argument(model), inspect.signature(model.forward).parameters
    if argument is None:
        raise UnsupportedModel(recurrent)
    given = {name: value for name, value in row.items() if name in accepted}
    try:
        with watching(model) as cache:
            out = model(**given, use_cache=True, **{argument: cache})
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{recurrent}, and refuses the cache that it is given: {error}") from error
    mixers = tuple(cache.found.values())
    inside = {id(module): mixer for mixer in mixers for module in mixer.module.modules()}
    for module in _record.get().attending:
        if mixer := inside.get(id(module)):
            raise UnsupportedModel(f"{mixer.where} attends and keeps a state in one module")
    others = [m for m in model.modules() if isinstance(m, nn.Conv1d) and id(m) not in inside]
    if not mixers or others:
        raise UnsupportedModel(f"{recurrent}, which transformers' cache does not hold")
    return out, mixers


def refuse_unsupported(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModel` for what is visible before a forward."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder")
    supported = SUPPORTED_LAYERS | RECURRENT_LAYERS
    if other := set(getattr(config, "layer_types", None) or ()) - supported:
        raise UnsupportedModel(f"{name} has layers of type {', '.join(sorted(other))}")
    accepted = inspect.signature(model.forward).parameters
    # a purely recurrent model has no positions
    positions = () if STATE_ARGUMENTS & set(accepted) else ("position_ids",)
    for argument in ("input_ids", *positions, "logits_to_keep"):
        if argument not in accepted:
            raise UnsupportedModel(f"{name} takes no `{argument}`")


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switches the attention function, and checks that it took effect: transformers only warns."""
    if adapt(model):
        model.config.get_text_config()._attn_implementation = name
    else:
        model.set_attn_implementation(name)
    # those of rotary tables, which may be copies, and of vision towers play no part
    layers = [m for m in model.modules() if getattr(m, "layer_idx", None) is not None]
    configs = [model.config.get_text_config(), *(getattr(m, "config", None) for m in layers)]
    stuck = [c for c in configs if isinstance(c, PreTrainedConfig) and c._attn_implementation != name]
    if stuck:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its own attention ({type(stuck[0]).__name__} did not take ours)"
        )


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """Transformers' own eager attention within the context."""
    use_attention(model, "eager")
    try:
        yield
    finally:
        use_attention(model, attention.NAME)


def specs_of(model: PreTrainedModel, record: Record, mixers: tuple[Mixer, ...] = ()) -> tuple[LayerSpec, ...]:
    """One spec per layer. Only beside recurrent mixers may layers be without attention."""
    name, config = type(model).__name__, model.config.get_text_config()
    count = config.num_hidden_layers
    layers = {call.layer: call for call in record.layers}
    silent = set(range(count)) - set(layers) if mixers else set()
    if not (layers or mixers):
        raise UnsupportedModel(f"{name} keeps its own attention (no layer calls the registered function)")
    if sorted({*layers, *silent}) != list(range(count)) or len(record.layers) + len(silent) != count:
        calls = f"{len(record.layers)} times in layers {sorted(layers)}"
        raise UnsupportedModel(
            f"{name} calls attention {calls}; once in each of its {count} layers is supported"
        )
    limit = getattr(config, "max_position_embeddings", None) or 1 << 20
    seen: dict[int, tuple[int | None, int | None]] = {}
    specs = []
    for i in range(count):
        if i in silent:
            specs.append(LayerSpec("other", 0, 0, 0, model.dtype))
            continue
        call = layers[i]
        if call.mask is None:
            raise UnsupportedModel(
                f"{name}: {call.where} is given no mask, so its visible positions are unknown"
            )
        if call.mask not in seen:
            seen[call.mask] = visible(*record.masks[call.mask], limit, f"{name}: {call.where}")
        window, chunk = seen[call.mask]
        specs.append(replace(call.spec, window=window, chunk=chunk))
    return tuple(specs)


def visible(
    mask_function: MaskFunction, local_size: int | None, limit: int, where: str
) -> tuple[int | None, int | None]:
    """The sliding window of a mask, or the size of its chunks; neither for a causal one.

    Raises `UnsupportedModel` for other masks.
    """
    points = probe_positions(local_size, limit)
    row, column = points[:, None], points[None]
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = mask_function(zero, zero, row, column)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{where} needs a mask that is no function of two positions ({error})"
        ) from error
    causal = column <= row
    seen = seen.expand_as(causal)
    if torch.equal(seen, causal):
        return None, None
    if local_size is not None and torch.equal(seen, causal & (column > row - local_size)):
        return local_size, None
    if local_size is not None and torch.equal(seen, causal & (column // local_size == row // local_size)):
        return None, local_size
    q, k = (int(points[i]) for i in (seen != (causal & (column > row - (local_size or limit)))).nonzero()[0])
    raise UnsupportedModel(
        f"{where} needs a mask that is neither causal nor a window nor chunks (position {q} and key {k})"
    )


def probe_positions(local_size: int | None, limit: int) -> Tensor:
    """Positions at which masks differ: small ones, around powers of two, around multiples of the window."""
    size = local_size or 16
    multiples = {*(size * i for i in range(1, 5)), *(size // 2 * i for i in range(1, 6))}
    centres = {0, 1, 2, 3, limit - 1, *(2**i for i in range(21)), *multiples}
    return torch.tensor(sorted({p + d for p in centres for d in (-1, 0, 1) if 0 <= p + d < limit}))
