"""Names to proposers: the table, this process, installed packages."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from speculon.checkpoints.locate import refuse_missing, usual_drafters
from speculon.core.config.models import Methods
from speculon.core.config.speculation import AUTO as AUTO
from speculon.core.config.speculation import OFF as OFF
from speculon.core.errors import UnknownMethod
from speculon.speculation.proposers.base import Factory

ENTRY_POINTS = "speculon.proposers"

# name -> module:factory, imported when first used
TABLE: dict[str, str] = {
    "ngram": "speculon.speculation.proposers.ngram:NGram.build",
    "suffix": "speculon.speculation.proposers.suffix:Suffix.build",
    "prediction": "speculon.speculation.proposers.prediction:Prediction.build",
    "grammar": "speculon.speculation.proposers.grammar:Forced.build",
    "draft_model": "speculon.runtimes.torch.drafters.draft_model.proposer:DraftModel.build",
    "pard": "speculon.runtimes.torch.drafters.draft_model.pard:Pard.build",
    "eagle3": "speculon.runtimes.torch.drafters.eagle3.proposer:Eagle3Drafter.build",
    "dflash": "speculon.runtimes.torch.drafters.dflash.proposer:DFlashDrafter.build",
    "mtp": "speculon.runtimes.torch.drafters.mtp.proposer:Mtp.build",
    "gemma4_assistant": "speculon.runtimes.torch.drafters.gemma4_assistant.proposer:Gemma4Assistant.build",
    "synthetic": "speculon.speculation.proposers.synthetic:Synthetic.build",
}
LOOKUPS = ("suffix",)  # what `auto` asks before any model; docs/decisions/014 says why not ngram too
# methods that need a `draft`
WITH_CHECKPOINT = ("draft_model", "pard", "eagle3", "dflash", "gemma4_assistant")
OF_TARGET = ("mtp",)  # methods whose weights are in the target's checkpoint, where no `draft` is named
registered: dict[str, Factory] = {}


def register(name: str, factory: Factory) -> None:
    """Adds a drafting method for this process; a package does the same with an entry point."""
    registered[name] = factory


def known_methods() -> list[str]:
    plugins = {point.name for point in entry_points(group=ENTRY_POINTS)}
    return [OFF, AUTO, *sorted({*TABLE, *plugins, *registered})]


def methods() -> Methods:
    """What per-model settings must know of the methods; a plug-in may read a drafter or none."""
    own = frozenset(TABLE).difference(WITH_CHECKPOINT, OF_TARGET)
    known, with_draft = frozenset(known_methods()), frozenset(WITH_CHECKPOINT)
    return Methods(known, with_draft, own | {OFF}, refuse_missing, usual_drafters)


def check_method(name: str) -> str:
    """The name itself, or `UnknownMethod` with the names there are."""
    # reading all entry points takes milliseconds
    built_in = name in (OFF, AUTO) or name in TABLE or name in registered
    if not built_in and name not in known_methods():
        message = f"method = {name!r}: known are {', '.join(known_methods())}"
        raise UnknownMethod(message).about("parameters.method")
    return name


def find_factory(name: str) -> Factory:
    if name in registered:
        return registered[name]
    if name in TABLE:
        module, _, path = TABLE[name].partition(":")
        target = import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return target
    return next(iter(entry_points(group=ENTRY_POINTS, name=name))).load()
