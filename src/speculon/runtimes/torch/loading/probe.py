"""Probes an architecture: one forward with recording functions finds its layers, masks, heads and mixers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.loading.older import adapt
from speculon.runtimes.torch.model import attention
from speculon.runtimes.torch.model.quantized import shapes_alone
from speculon.runtimes.torch.model.recurrent import Mixer
from speculon.runtimes.torch.needs import LayerSpec, StateSpec

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
CACHE_ARGUMENTS = ("past_key_values", "cache_params")  # of a model's forward

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
    read_text_alone(model)
    recurrent = recurrent_part(model)
    use_attention(model, NAME)
    token = _record.set(record := Record())
    try:
        ids = torch.arange(8, device=model.device)[None] % model.get_input_embeddings().weight.shape[0]
        positions = torch.arange(8, device=model.device)[None]
        row = {"input_ids": ids, "position_ids": positions, "logits_to_keep": 1}
        mixers: tuple[Mixer, ...] = ()
        if recurrent is None:
            with shapes_alone():
                out = model(**row, use_cache=False)
        else:
            out, mixers = watched_forward(model, row, recurrent)
    finally:
        _record.reset(token)
    return layer_specs(model, record, mixers), out.logits.shape[-1], mixers


def recurrent_part(model: PreTrainedModel) -> str | None:
    """What shows, before a forward, that a model keeps more of a sequence than keys and values."""
    name, config = type(model).__name__, model.config.get_text_config()
    if stateful := STATE_ARGUMENTS & set(inspect.signature(model.forward).parameters):
        return f"{name} is recurrent (its forward takes `{stateful.pop()}`)"
    for path, module in model.named_modules():
        if isinstance(module, nn.Conv1d):
            parent = type(model.get_submodule(path.rpartition(".")[0])).__name__
            return f"{name}: {parent} keeps a recurrent state ({path})"
    if recurrent := RECURRENT_LAYERS & set(getattr(config, "layer_types", None) or ()):
        return f"{name} has layers of type {', '.join(sorted(recurrent))}"
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
    arguments = {name: value for name, value in row.items() if name in accepted}
    try:
        with watching(model) as cache:
            out = model(**arguments, use_cache=True, **{argument: cache})
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModel(f"{recurrent}, and refuses the cache that it is given: {error}") from error
    mixers = tuple(cache.mixers.values())
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


def read_text_alone(model: PreTrainedModel) -> None:
    """Attention in both directions within an image has no meaning here: without images it masks nothing."""
    config: Any = model.config.get_text_config()
    if getattr(config, "use_bidirectional_attention", None) == "vision":
        config.use_bidirectional_attention = None


def use_attention(model: PreTrainedModel, name: str) -> None:
    """Switches the attention function, and checks that it took effect: transformers only warns."""
    if adapt(model):
        model.config.get_text_config()._attn_implementation = name
    elif hasattr(model.base_model, "get_image_features"):
        text = model.config.get_text_config()
        parts = {part: getattr(model.config, part) for part in model.config.sub_configs}
        # a vision tower has no pages
        model.set_attn_implementation({part: name if x is text else "sdpa" for part, x in parts.items()})
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


def layer_specs(
    model: PreTrainedModel, record: Record, mixers: tuple[Mixer, ...] = ()
) -> tuple[LayerSpec, ...]:
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


# recurrent mixers


class Watched(DynamicCache):
    """A cache that notes which module writes which state."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(config=model.config)
        self.calls: list[tuple[nn.Module, str, str, Tensor]] = []  # that run now and were given this cache
        self.mixers: dict[int, Mixer] = {}  # by id of the module

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        result: Tensor = super().update_conv_state(conv_states, layer_idx, state_idx, **kwargs)
        self._note(("conv", state_idx), layer_idx, self.layers[layer_idx].conv_states[state_idx])
        return result

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        result: Tensor = super().update_recurrent_state(recurrent_states, layer_idx, state_idx, **kwargs)
        self._note(("recurrent", state_idx), layer_idx, self.layers[layer_idx].recurrent_states[state_idx])
        return result

    def _note(self, key: tuple[str, int], layer: int, state: Tensor) -> None:
        module, argument, row, rows = self.calls[-1]
        mixer = self.mixers.get(id(module))
        if mixer is None:
            mixer = Mixer(module, layer, argument, {}, row, rows.shape[-1], len(self.mixers))
            self.mixers[id(module)] = mixer
        if mixer.layer != layer or key in mixer.states:
            raise UnsupportedModel(f"{mixer.where} is called more than once in a forward")
        mixer.states[key] = StateSpec(tuple(state.shape[1:]), state.dtype)


@contextmanager
def watching(model: PreTrainedModel) -> Iterator[Watched]:
    """A cache for one forward of the model, within which calls are watched."""
    cache = Watched(model)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if any(value is cache for value in (*args, *kwargs.values())):
            bound = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            named = {**bound, **kwargs}
            argument = next(name for name, value in named.items() if value is cache)
            row, rows = next((n, v) for n, v in named.items() if isinstance(v, Tensor))
            cache.calls.append((module, argument, row, rows))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        if cache.calls and cache.calls[-1][0] is module:
            rows = cache.calls.pop()[-1]
            if mixer := cache.mixers.get(id(module)):
                first, *others = out if isinstance(out, tuple) else (out,)
                if first.shape[:2] != rows.shape[:2] or any(other is not None for other in others):
                    raise UnsupportedModel(f"{mixer.where} returns more than a row per token")
                mixer.tupled = isinstance(out, tuple)

    modules = list(model.modules())
    hooks = [module.register_forward_pre_hook(enter, with_kwargs=True) for module in modules]
    hooks += [module.register_forward_hook(leave) for module in modules]
    try:
        yield cache
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def expected_states(config: PreTrainedConfig, dtype: torch.dtype) -> tuple[tuple[StateSpec, ...], ...]:
    """The states of each mixer that a config implies, from one forward without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.deepcopy(config), dtype=dtype)
        model.set_experts_implementation("batched_mm")  # which needs no numbers
        if (argument := cache_argument(model)) is None:
            return ()
        with watching(model) as cache:
            model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=True, **{argument: cache})
    return tuple(mixer.specs for mixer in cache.mixers.values())


def cache_argument(model: PreTrainedModel) -> str | None:
    """The name by which a model's forward takes a cache."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in accepted), None)
