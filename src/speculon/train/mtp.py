"""Training method `mtp`: the prediction modules of a target's checkpoint, trained further."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache

from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.drafters.mtp.load import (
    EXPERTS,
    JOINED,
    load_modules,
    mtp_needs,
    read_tensors,
    target_rotary,
)
from speculon.drafters.mtp.network import Module
from speculon.drafters.mtp.tensors import MTP, PARTS, MtpConfig, find_mtp
from speculon.loading.locate import locate
from speculon.loading.probe import discover, use_attention
from speculon.target.target import Target
from speculon.train.data import Rows
from speculon.train.losses import StepDrafter
from speculon.train.settings import MtpSettings
from speculon.train.teacher import Batch, Teacher
from speculon.train.training import WEIGHTS, Training

TRAINED = ("embed_norm", "state_norm", "proj", "layer", "norm")


Rotary = Callable[[Tensor, Tensor], Any]


class MtpDrafter(StepDrafter, nn.Module):
    """Step k is that of module k; the last module makes all steps after its own, from its own states."""

    def __init__(
        self, modules: list[Module], rotary: Rotary, windows: list[int | None], settings: MtpSettings
    ):
        super().__init__()
        self.steps, self.decay, self.goal = settings.ttt, settings.decay, settings.loss
        self.chain, self.rotary, self.windows = modules, rotary, windows
        parts = [{name: getattr(module, name) for name in TRAINED} for module in modules]
        self.parts = nn.ModuleList(nn.ModuleDict(each) for each in parts).float().requires_grad_(True)

    def use_attention(self, name: str) -> None:
        """The attention function of all layers, by its name in transformers: `sdpa` or `eager`."""
        self.attention = name
        for module in self.chain:
            module.use_attention(name)

    def states(self, batch: Batch) -> Iterator[Tensor]:
        """Row i of step k reads row i of the step before, or the target's state of position i.

        A module attends to its rows up to i, of its first step, and to row i of its later steps. Its rotary
        positions are i in its first step, and one more in each later one.
        """
        rows, last = batch.ids.shape[1] - self.steps, len(self.chain) - 1
        x, cache = batch.last[:, :rows].float(), DynamicCache()
        for k in range(self.steps):
            number, again = min(k, last), max(k - last, 0)
            positions = torch.arange(again, again + rows, device=x.device)[None]
            x = self.chain[number].batch(
                batch.ids[:, k + 1 : k + 1 + rows],
                x,
                self.rotary(x, positions),
                positions,
                self._mask(rows, again, self.windows[number], x),
                cache if number == last else None,
            )
            yield x

    def head_of(self, step: int) -> Tensor:
        head: Any = self.chain[min(step, len(self.chain) - 1)].head
        weight: Tensor = head.weight
        return weight

    def _mask(self, rows: int, again: int, window: int | None, x: Tensor) -> Tensor:
        """[1, 1, N, (1 + again) * N]: the rows of the first step, then those of each later one."""
        ages = torch.arange(rows, device=x.device)[:, None] - torch.arange(rows, device=x.device)
        age = torch.cat([ages + again - step for step in range(again + 1)], -1)
        own = torch.cat([ages >= 0, *[ages == 0] * again], -1)
        seen = (own & (age < (window or 2 * rows + again)))[None, None]
        if self.attention == "sdpa":
            return seen
        return torch.zeros(seen.shape, device=x.device).masked_fill(~seen, torch.finfo(x.dtype).min)


class MtpTraining(Training[MtpSettings, MtpDrafter]):
    """How `train mtp` makes its drafter, and writes it at the end."""

    method = proposer = MTP

    @property
    def spare(self) -> int:
        return self.settings.ttt

    def check(self, teacher: Teacher) -> None:
        """Raises InvalidParameter or ModelError where there are no modules, or they do not fit the target."""
        config = self._config(teacher)
        if self.settings.ttt < len(config.modules):
            raise InvalidParameter("ttt", self.settings.ttt, f"there are {len(config.modules)} MTP modules")
        self._network(teacher)

    def drafter(self, teacher: Teacher, rows: Rows) -> MtpDrafter:
        """The modules as they are in the checkpoint, with the target's embedding and output head."""
        return self._network(teacher)

    def write(self, drafter: MtpDrafter, teacher: Teacher, target: str, folder: Path) -> None:
        """The modules alone, under the names and in the dtypes of the checkpoint they were read from."""
        config = self._config(teacher)
        before = read_tensors(config)
        tensors: dict[str, Tensor] = {}
        for module, names in zip(drafter.chain, config.modules, strict=True):
            # copies of what the target has
            shared = {
                "embed.weight": module.embed is teacher.embed,
                "head.weight": module.head is teacher.head,
            }
            tensors |= {name: before[name] for own, name in names.items() if not shared.get(own)}
            tensors |= stored_tensors(module, names)
        stored = {
            name: value.detach().to("cpu", before[name].dtype).contiguous() for name, value in tensors.items()
        }
        of_target = (config.path / "config.json").read_bytes()  # the layout depends on it
        folder.mkdir(parents=True, exist_ok=True)
        save_file(stored, folder / WEIGHTS, {"format": "pt"})
        (folder / "config.json").write_bytes(of_target)

    def _config(self, teacher: Teacher) -> MtpConfig:
        folder = teacher.folder if self.settings.start is None else locate(self.settings.start)
        config = find_mtp(folder)
        if config is None:
            advice = "start (--start) names a folder that has some"
            raise UnsupportedModel(f"{folder}: no MTP modules to train; {advice}")
        return config

    def _network(self, teacher: Teacher) -> MtpDrafter:
        config, target = self._config(teacher), target_of(teacher)
        layers = mtp_needs(config, target, rows=0, scored=0).layers
        modules = load_modules(config, target)
        refuse_other_heads(modules, teacher)
        windows = [layer.window for layer in layers[1 : 1 + len(modules)]]
        drafter = MtpDrafter(modules, target_rotary(target, layers), windows, self.settings)
        drafter.use_attention("sdpa" if teacher.model._supports_sdpa else "eager")
        return drafter


def target_of(teacher: Teacher) -> Target:
    """The teacher's model, as the loader of its modules reads it. The model stays as it was."""
    attention = teacher.model.config.get_text_config()._attn_implementation
    layers, vocab_size, _ = discover(teacher.model)
    use_attention(teacher.model, attention)
    context, name = getattr(teacher.config, "max_position_embeddings", 0), str(teacher.folder)
    return Target(
        teacher.model, layers, name=name, vocab_size=vocab_size, max_context=context, eos_ids=frozenset()
    )


def refuse_other_heads(modules: Sequence[Module], teacher: Teacher) -> None:
    """Raises UnsupportedModel where logits are more than a matrix over the states, or of other tokens."""
    if getattr(teacher.config, "final_logit_softcapping", None):
        raise UnsupportedModel(f"{teacher.folder}: its logits are capped, so MTP modules cannot learn them")
    expected = teacher.head.weight.shape
    for number, module in enumerate(modules):
        head = module.head
        if not isinstance(head, nn.Linear) or head.bias is not None or head.weight.shape != expected:
            what = f"a matrix {list(expected)} without bias as its output head"
            raise UnsupportedModel(f"{teacher.folder}: MTP module {number} needs {what}")


def stored_tensors(module: Module, names: Mapping[str, str]) -> dict[str, Tensor]:
    """A module's tensors by stored name, without embedding and head: the inverse of its loader."""
    own = {f"{part}.weight": getattr(module, part).weight for part in PARTS}
    own |= {f"layer.{name}": tensor for name, tensor in module.layer.state_dict().items()}
    parts = {name: part for joined, tensor in own.items() for name, part in separate(joined, tensor, names)}
    return {names[name]: part for name, part in parts.items()}


def separate(name: str, tensor: Tensor, names: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """A tensor itself, or those of single experts where they are stored one by one."""
    if name in names:
        yield name, tensor
        return
    at, _, last = name.rpartition(EXPERTS)
    parts = JOINED[EXPERTS + last]
    for i, expert in enumerate(tensor):
        for part, weight in zip(parts, expert.chunk(len(parts)), strict=True):
            yield f"{at}{EXPERTS}{i}.{part}.weight", weight
