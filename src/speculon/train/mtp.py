"""Training method `mtp`: the prediction modules of a target's checkpoint, trained further."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor, nn

from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.drafters.mtp.load import load_modules, mtp_needs, read_tensors, rotary_of, stored_tensors
from speculon.drafters.mtp.network import Module
from speculon.drafters.mtp.tensors import MTP, MtpConfig, find_mtp
from speculon.loading.locate import locate
from speculon.loading.probe import discover, use_attention
from speculon.target.target import Target
from speculon.train.data import Rows
from speculon.train.mtp_network import MtpDrafter
from speculon.train.settings import MtpSettings
from speculon.train.teacher import Teacher
from speculon.train.training import Training


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
            left_out = shared(module, teacher)
            tensors |= {stored: before[stored] for name, stored in names.items() if name not in left_out}
            tensors |= stored_tensors(module, names)
        made = {
            name: value.detach().to("cpu", before[name].dtype).contiguous() for name, value in tensors.items()
        }
        facts = (config.path / "config.json").read_bytes()  # of the target: the layout depends on it
        folder.mkdir(parents=True, exist_ok=True)
        save_file(made, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_bytes(facts)

    def _config(self, teacher: Teacher) -> MtpConfig:
        folder = teacher.folder if self.settings.start is None else locate(self.settings.start)
        found = find_mtp(folder)
        if found is None:
            advice = "start (--start) names a folder that has some"
            raise UnsupportedModel(f"{folder}: no MTP modules to train; {advice}")
        return found

    def _network(self, teacher: Teacher) -> MtpDrafter:
        config, target = self._config(teacher), target_of(teacher)
        layers = mtp_needs(config, target, rows=0, scored=0).layers
        modules = load_modules(config, target)
        refuse_other_heads(modules, teacher)
        windows = [layer.window for layer in layers[1 : 1 + len(modules)]]
        drafter = MtpDrafter(modules, rotary_of(target, layers), windows, self.settings)
        drafter.use_attention("sdpa" if teacher.model._supports_sdpa else "eager")
        return drafter


def target_of(teacher: Teacher) -> Target:
    """The teacher's model, as the loader of its modules reads it. The model stays as it was."""
    attention = teacher.model.config.get_text_config()._attn_implementation
    layers, vocab_size, _ = discover(teacher.model)
    use_attention(teacher.model, attention)
    context = getattr(teacher.config, "max_position_embeddings", 0)
    return Target(
        teacher.model,
        layers,
        name=str(teacher.folder),
        vocab_size=vocab_size,
        max_context=context,
        eos_ids=frozenset(),
    )


def refuse_other_heads(modules: Seq[Module], teacher: Teacher) -> None:
    """Raises UnsupportedModel where logits are more than a matrix over the states, or of other tokens."""
    if getattr(teacher.config, "final_logit_softcapping", None):
        raise UnsupportedModel(f"{teacher.folder}: its logits are capped, so MTP modules cannot learn them")
    expected = teacher.head.weight.shape
    for number, module in enumerate(modules):
        head = module.head
        if not isinstance(head, nn.Linear) or head.bias is not None or head.weight.shape != expected:
            what = f"a matrix {list(expected)} without bias as its output head"
            raise UnsupportedModel(f"{teacher.folder}: MTP module {number} needs {what}")


def shared(module: Module, teacher: Teacher) -> set[str]:
    """Names of copies of what the target has, which are not written."""
    found = {"embed.weight": module.embed is teacher.embed, "head.weight": module.head is teacher.head}
    return {name for name, same in found.items() if same}
