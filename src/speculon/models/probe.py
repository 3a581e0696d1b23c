"""What a model really does, learned by running it once with recording functions; and the proof that our path
does the same.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from speculon.core import LayerSpec
from speculon.errors import UnsupportedModel
from speculon.models import attention

NAME = "speculon_probe"
CARRIED_LAYERS = {"full_attention", "sliding_attention"}
# What architectures pass down to attention that either is honoured there or changes nothing.
HONOURED = {"scaling", "softcap", "s_aux", "view"}
HARMLESS = {
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
class Seen:
    """One call of the attention function."""

    layer: int
    where: str
    spec: LayerSpec
    mask: int | None  # which of the recorded masks


@dataclass(slots=True)
class Record:
    layers: list[Seen] = field(default_factory=list)
    # and the local size it was asked with
    masks: list[tuple[MaskFunction, int | None]] = field(default_factory=list)


_record: ContextVar[Record] = ContextVar("speculon_probe_record")


def record_mask(
    *, mask_function: MaskFunction, q_length: int, local_size: int | None = None, **_: Any
) -> Tensor:
    """Stands in for mask creation: notes what was asked for, and hands down a mask that carries its number."""
    masks = _record.get().masks
    masks.append((mask_function, local_size))
    return torch.full((1, 1, q_length, q_length), float(len(masks)))


def record_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Stands in for attention: notes the layer's shape and traits, refuses what `attend` would not carry."""
    where, layer = type(module).__name__, getattr(module, "layer_idx", None)
    if layer is None:
        raise UnsupportedModel(f"{where} does not know its layer index")
    if key.dtype != value.dtype:
        raise UnsupportedModel(f"{where} keeps keys in {key.dtype} and values in {value.dtype}")
    refuse_arguments(module, where, kwargs)
    spec = LayerSpec("attention", key.shape[1], key.shape[3], value.shape[3], key.dtype)
    _record.get().layers.append(Seen(layer, where, spec, mask_number(attention_mask, where)))
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(attention.NAME, attention.attend)
AttentionInterface.register(NAME, record_attention)
# None is registered for `attention.NAME`: transformers then makes no mask at all, which is what a step wants.
AttentionMaskInterface.register(NAME, record_mask)


def refuse_arguments(module: nn.Module, where: str, kwargs: dict[str, Any]) -> None:
    if kwargs.get("dropout"):
        raise UnsupportedModel(f"{where} asks for dropout {kwargs['dropout']}")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModel(f"{where} attends in both directions (is_causal = False)")
    for name, value in kwargs.items():
        if name not in HONOURED | HARMLESS and isinstance(value, Tensor):
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
def discover(model: PreTrainedModel) -> tuple[tuple[LayerSpec, ...], int]:
    """The layers' claims on the page pool and the vocabulary's size, from one forward of a few tokens."""
    refuse_kind(model)
    use_attention(model, NAME)
    token = _record.set(record := Record())
    try:
        ids = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        positions = torch.arange(8, device=model.device)[None]
        out = model(input_ids=ids, position_ids=positions, use_cache=False, logits_to_keep=1)
    finally:
        _record.reset(token)
    return specs_of(model, record), out.logits.shape[-1]


def refuse_kind(model: PreTrainedModel) -> None:
    """Refuses, by name, what cannot be carried and shows before a forward."""
    name, config = type(model).__name__, model.config.get_text_config()
    if model.config.is_encoder_decoder:
        raise UnsupportedModel(f"{name} is an encoder-decoder")
    accepted = inspect.signature(model.forward).parameters
    if stateful := STATE_ARGUMENTS & set(accepted):
        raise UnsupportedModel(f"{name} is recurrent (its forward takes `{stateful.pop()}`)")
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
            raise UnsupportedModel(f"{name}: {parent} keeps a recurrent state ({path})")
    if other := set(getattr(config, "layer_types", None) or ()) - CARRIED_LAYERS:
        raise UnsupportedModel(f"{name} has layers of type {', '.join(sorted(other))}")
    for argument in ("input_ids", "position_ids", "logits_to_keep"):
        if argument not in accepted:
            raise UnsupportedModel(f"{name} takes no `{argument}`")


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switches the attention function, and makes sure that it took: transformers only warns."""
    model.set_attn_implementation(name)
    configs = [m.config for m in model.modules() if isinstance(getattr(m, "config", None), PreTrainedConfig)]
    stuck = [c for c in configs if c._attn_implementation != name]
    if stuck:
        raise UnsupportedModel(
            f"{type(model).__name__} keeps its own attention ({type(stuck[0]).__name__} did not take ours)"
        )


@contextmanager
def stock_attention(model: PreTrainedModel) -> Iterator[None]:
    """The library's own eager attention for a while."""
    use_attention(model, "eager")
    try:
        yield
    finally:
        use_attention(model, attention.NAME)


def specs_of(model: PreTrainedModel, record: Record) -> tuple[LayerSpec, ...]:
    name, config = type(model).__name__, model.config.get_text_config()
    count = config.num_hidden_layers
    layers = {seen.layer: seen for seen in record.layers}
    if sorted(layers) != list(range(count)) or len(record.layers) != count:
        raise UnsupportedModel(
            f"{name}: {len(record.layers)} attention calls of layers {sorted(layers)}, but {count} layers"
        )
    limit = getattr(config, "max_position_embeddings", None) or 1 << 20
    windows: dict[int, int | None] = {}
    specs = []
    for seen in (layers[i] for i in range(count)):
        if seen.mask is None:
            raise UnsupportedModel(f"{name}: {seen.where} is given no mask, so what it may see is unknown")
        if seen.mask not in windows:
            windows[seen.mask] = window_of(*record.masks[seen.mask], limit, f"{name}: {seen.where}")
        s = seen.spec
        specs.append(LayerSpec(s.kind, s.heads, s.k_dim, s.v_dim, s.dtype, windows[seen.mask]))
    return tuple(specs)


def window_of(mask_function: MaskFunction, local_size: int | None, limit: int, where: str) -> int | None:
    """The sliding window of a mask, None for a plain causal one; anything else is refused."""
    points = landmarks(local_size, limit)
    row, column = points[:, None], points[None]
    zero = torch.zeros((), dtype=torch.long)
    try:
        seen = mask_function(zero, zero, row, column)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(
            f"{where} asks for a mask that is no function of two positions ({error})"
        ) from error
    causal = column <= row
    if torch.equal(seen.expand_as(causal), causal):
        return None
    if local_size is not None and torch.equal(seen.expand_as(causal), causal & (column > row - local_size)):
        return local_size
    q, k = (int(points[i]) for i in (seen != (causal & (column > row - (local_size or limit)))).nonzero()[0])
    raise UnsupportedModel(
        f"{where} asks for a mask that is neither causal nor a sliding window (position {q} and key {k})"
    )


def landmarks(local_size: int | None, limit: int) -> Tensor:
    """Positions at which masks differ: small ones, around powers of two, around multiples of the window."""
    size = local_size or 16
    near = {
        0,
        1,
        2,
        3,
        limit - 1,
        *(2**i for i in range(21)),
        *(size * i for i in range(1, 5)),
        *(size // 2 * i for i in range(1, 6)),
    }
    return torch.tensor(sorted({p + d for p in near for d in (-1, 0, 1) if 0 <= p + d < limit}))
