"""Hidden states from inside a model, for drafters that read them: those of the rows just computed, of chosen
layers only.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from speculon.errors import UnsupportedModel

EMBEDDINGS = -1


class Taps:
    """The residual stream after each of `layers` (0-based; -1: what enters the first), in one forward at a
    time.

    Before any final norm: what the next layer would read.
    """

    def __init__(self, layers: tuple[int, ...]):
        self.layers = layers
        self._found: dict[int, Tensor] = {}
        self._hooks: list[RemovableHandle] = []

    def keep(self, layer: int, states: Tensor) -> None:  # [T, D]
        """Remembers the states after `layer`, if they are wanted."""
        if layer in self.layers:
            self._found[layer] = states

    def take(self) -> dict[int, Tensor]:
        """What was kept, by layer; nothing is held on to."""
        found, self._found = self._found, {}
        return found

    def watch(self, model: nn.Module) -> None:
        """Keeps by hooks what a model's own forward computes.

        Raises `UnsupportedModel` where a layer is not to be found.
        """
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
        """Leaves the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def _keep_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.keep(EMBEDDINGS, args[0][0] if args else kwargs["hidden_states"][0])

    def _keep_output(self, layer: int) -> Any:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            self.keep(layer, (out[0] if isinstance(out, tuple) else out)[0])

        return hook


def decoder_layers(model: nn.Module) -> dict[int, list[nn.Module]]:
    """The modules that may be a model's layer of each number: those around whatever knows that number.

    Of several the outermost ends last, so that its states are those that stay; towers for other senses are
    never called.
    """
    found: dict[int, list[nn.Module]] = {}
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList):
            continue
        numbers = {getattr(child, "layer_idx", None) for child in parent.children()}
        own = getattr(getattr(parent, "block", None), "attention", None)  # a fused layer
        for number in {*numbers, getattr(own, "layer", None)}:
            if type(number) is int and parent not in found.setdefault(number, []):
                found[number].append(parent)
    return found
