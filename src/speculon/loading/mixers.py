"""Finds the recurrent mixers of a model: the modules that write states to the cache of transformers."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache

from speculon.core.errors import UnsupportedModel
from speculon.core.types import StateSpec
from speculon.target.recurrent import Mixer

CACHE_ARGUMENTS = ("past_key_values", "cache_params")  # of a model's forward


class Watched(DynamicCache):
    """A cache that notes which module writes which state."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(config=model.config)
        self.calls: list[tuple[nn.Module, str, str, Tensor]] = []  # that run now and were given this cache
        self.found: dict[int, Mixer] = {}  # by id of the module

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
        mixer = self.found.get(id(module))
        if mixer is None:
            mixer = Mixer(module, layer, argument, {}, row, rows.shape[-1], len(self.found))
            self.found[id(module)] = mixer
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
            if mixer := cache.found.get(id(module)):
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
    return tuple(mixer.specs for mixer in cache.found.values())


def cache_argument(model: PreTrainedModel) -> str | None:
    """The name by which a model's forward takes a cache."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in accepted), None)
