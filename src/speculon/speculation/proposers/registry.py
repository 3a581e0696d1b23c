"""The names of the drafting methods: built in, registered in this process, and from installed packages.

Only names are known here of methods with weights, because the runtime makes their proposers.
"""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import entry_points

from speculon.checkpoints.locate import refuse_missing, usual_drafters
from speculon.core.config.models import Methods
from speculon.core.config.speculation import AUTO as AUTO
from speculon.core.config.speculation import OFF as OFF
from speculon.core.errors import UnknownMethod
from speculon.speculation.proposers.base import ProposerFactory

ENTRY_POINTS = "speculon.proposers"
DRAFTERS = "speculon.drafters"  # of those with weights

# name -> module:factory, imported when first used
TABLE: dict[str, str] = {
    "ngram": "speculon.speculation.proposers.ngram:NGram.build",
    "suffix": "speculon.speculation.proposers.suffix:Suffix.build",
    "prediction": "speculon.speculation.proposers.prediction:PredictionLookup.build",
    "grammar": "speculon.speculation.proposers.grammar:Forced.build",
    "synthetic": "speculon.speculation.proposers.synthetic:Synthetic.build",
}
LOOKUPS = ("suffix",)  # what `auto` asks before any model; docs/decisions/014 says why not ngram too
# methods that need a `draft`
WITH_CHECKPOINT = ("draft_model", "pard", "eagle3", "dflash", "gemma4_assistant")
OF_TARGET = ("mtp",)  # methods whose weights are in the target's checkpoint, where no `draft` is named
WITH_WEIGHTS = (*WITH_CHECKPOINT, *OF_TARGET)
registered: dict[str, ProposerFactory | None] = {}  # None: it has weights


def register(name: str, factory: ProposerFactory | None) -> None:
    """Makes a drafting method known in this process, under `name`.

    >>> register("echo", lambda config, target: Echo())

    A package does the same for all processes with an entry point in the group `speculon.proposers`. With
    None as the factory, the method has weights and its runtime makes the proposer.
    """
    registered[name] = factory


def known_methods() -> list[str]:
    """The names of all methods: `off`, `auto`, then the others in alphabetical order."""
    plugins = {point.name for group in (ENTRY_POINTS, DRAFTERS) for point in entry_points(group=group)}
    return [OFF, AUTO, *sorted({*TABLE, *WITH_WEIGHTS, *plugins, *registered})]


def methods() -> Methods:
    """What the settings of models need to know of the methods: which there are, and which need a drafter."""
    known, with_draft = frozenset(known_methods()), frozenset(WITH_CHECKPOINT)
    return Methods(known, with_draft, frozenset({*TABLE, OFF}), refuse_missing, usual_drafters)


def check_method(name: str) -> str:
    """Returns the name. Raises `UnknownMethod`, which lists the known names, if there is no such method."""
    # reading all entry points takes milliseconds
    built_in = name in (OFF, AUTO, *WITH_WEIGHTS) or name in TABLE or name in registered
    if not built_in and name not in known_methods():
        message = f"method = {name!r}: must be one of {', '.join(known_methods())}"
        raise UnknownMethod(message).about("parameters.method")
    return name


def has_weights(name: str) -> bool:
    """Whether a method has weights, so that a runtime makes its proposer."""
    if name in registered:
        return registered[name] is None
    return name in WITH_WEIGHTS or (name not in TABLE and bool(entry_points(group=DRAFTERS, name=name)))


def find_factory(name: str) -> ProposerFactory:
    """The factory of a method without weights."""
    if (factory := registered.get(name)) is not None:
        return factory
    if name in TABLE:
        module, _, path = TABLE[name].partition(":")
        target = import_module(module)
        for part in path.split("."):
            target = getattr(target, part)
        return target
    return next(iter(entry_points(group=ENTRY_POINTS, name=name))).load()
