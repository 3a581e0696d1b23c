"""Taps: hidden states of chosen layers, captured during a forward for drafters that read them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from speculon.core.errors import UnsupportedModel

EMBEDDINGS = -1


class Taps:
    """The residual stream after each of `layers` in one forward; 0-based, -1 is the embeddings.

    Taken before any final norm: the states that the next layer would read.
    """

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers
        self._found: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def keep(self, layer: int, states: Tensor) -> None:  # [T, D]
        """Keeps the states after `layer` if that layer is tapped."""
        if layer in self.layers:
            self._found[layer] = states

    def take(self) -> dict[int, Tensor]:
        """The kept states by layer, which are released here."""
        states, self._found = self._found, {}
        return states

    def watch(self, model: nn.Module) -> None:
        """Captures states by hooks on a stock model. Raises `UnsupportedModel` where a layer is not found."""
        modules = decoder_layers(model)
        first = min(modules, default=0)
        for layer in self.layers:
            if layer != EMBEDDINGS and layer not in modules:
                raise UnsupportedModel(
                    f"{type(model).__name__}: no module is its layer {layer}, so it cannot be tapped"
                )
            for module in modules.get(first if layer == EMBEDDINGS else layer, ()):
                if layer == EMBEDDINGS:
                    self._hooks.append(module.register_forward_pre_hook(self._keep_input, with_kwargs=True))
                else:
                    self._hooks.append(module.register_forward_hook(self._keep_output(layer)))

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.keep(EMBEDDINGS, args[0][0] if args else kwargs["hidden_states"][0])

    def _keep_output(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.keep(layer, (out[0] if isinstance(out, tuple) else out)[0])

        return hook


NO_TAPS = Taps(())


def decoder_layers(model: nn.Module) -> dict[int, list[nn.Module]]:
    """Candidate modules for each layer number: the parents of modules with that `layer_idx`.

    The outermost of several returns last, so its states are kept; vision and audio towers are never called.
    """
    candidates: dict[int, list[nn.Module]] = {}
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            continue
        numbers = {getattr(child, "layer_idx", None) for child in parent.children()}
        own = getattr(getattr(parent, "block", None), "attention", None)  # a fused layer
        for number in {*numbers, getattr(own, "layer", None)}:
            if type(number) is int and parent not in candidates.setdefault(number, []):
                candidates[number].append(parent)
    return candidates
