"""The drafters of an engine: those in its settings and those near the model, checked before a load."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from speculon.checkpoints.headers import Checkpoint, read_checkpoint
from speculon.checkpoints.locate import locate, named, refuse_missing, usual_drafters
from speculon.checkpoints.spelling import compare
from speculon.core.config import EngineConfig, ModelObject
from speculon.core.errors import (
    ConfigError,
    CorruptWeights,
    ModelError,
    ModelNotFound,
    UnsupportedModel,
    WrongPair,
)
from speculon.runtimes.base import Fit
from speculon.runtimes.torch.drafters.families import DRAFT_MODEL, PARD, family_of
from speculon.runtimes.torch.drafters.mtp.tensors import MTP, find_mtp, mtp_of
from speculon.runtimes.torch.drafters.pairing import AUTO, around, examine, is_search, search
from speculon.speculation.proposers.registry import WITH_CHECKPOINT

log = logging.getLogger("speculon")


def with_drafts(config: EngineConfig) -> EngineConfig:
    """The settings with each drafter under its method. Raises `ModelError` for an unsupported one.

    Where none is set, the model's own ones are taken, as far as the method uses them.
    """
    draft, method = config.speculation.draft, config.speculation.method
    if draft is None:
        usual = {name: path for name, path in usual_drafters(config.model).items() if method in (AUTO, name)}
        return set_drafts(config, {**usual}) if usual else config
    if not isinstance(draft, str):
        return config
    if is_search(draft):
        return set_drafts(config, find_drafts(config, draft))
    return set_drafts(config, by_method(draft))


def set_drafts(config: EngineConfig, draft: str | dict[str, str | ModelObject]) -> EngineConfig:
    return config.model_copy(update={"speculation": config.speculation.model_copy(update={"draft": draft})})


def by_method(draft: str) -> str | dict[str, str | ModelObject]:
    """`{method: draft}`; a draft model's path stays as it is, and a missing one, which the loader reports."""
    try:
        folder = locate(draft)
        family = family_of(folder)
    except ModelNotFound:
        return draft
    if family.method is None:
        raise UnsupportedModel(f"{folder}: {family.refusal}")
    return draft if family.method == DRAFT_MODEL else {family.method: draft}


def find_drafts(config: EngineConfig, draft: str) -> dict[str, str | ModelObject]:
    """Searches the target's own folder for MTP layers, those around it and the hub's cache, with a log line
    for every one.
    """
    folder = locate(
        config.model, trust_remote_code=config.trust_remote_code, allow_pickle=config.allow_pickle
    )
    result = search(draft, read_checkpoint(folder), config.speculation.known_drafters)
    for line in result.lines:
        log.info("draft %s: %s", AUTO, line)
    own = {} if MTP in result.drafts else own_layers(folder)
    drafts: dict[str, str | ModelObject] = {**usual_drafters(config.model), **own, **result.drafts}
    if not drafts:
        log.info("draft %s: no drafter for %s: lookups only", AUTO, folder)
    return drafts


def fits(config: EngineConfig, drafts: Iterable[str]) -> list[Fit]:
    """Drafters around the target and in the hub's cache that fit it, then each of `drafts`. One that is
    spelled in several ways is there once, as `drafts` spell it first. Nothing is fetched or logged.

    Raises `ModelError` for a target that is not here or cannot be read.
    """
    target = read_checkpoint(locate(config.model, fetch=False))
    usual, known = usual_drafters(config.model).values(), config.speculation.known_drafters
    asked_for = by_place(drafts)
    near = by_place([*usual, *(str(path) for path, _ in around(AUTO, target.path, known))])
    beside = [draft for place, draft in near.items() if place not in asked_for]
    fitting = [its_fit for draft in beside if (its_fit := fit(draft, target)).refusal is None]
    return [*own_fit(target), *fitting, *(fit(draft, target) for draft in asked_for.values())]


def by_place(drafts: Iterable[str]) -> dict[Path, str]:
    """Where each draft lies -> its first spelling: a path may be relative, and a folder may have a name."""
    places: dict[Path, str] = {}
    for draft in drafts:
        try:
            place = named(draft) or Path(draft).expanduser()
        except ModelNotFound:  # a model by name that was not fetched yet
            place = Path(draft)
        places.setdefault(place.resolve(), draft)
    return places


def own_fit(target: Checkpoint) -> list[Fit]:
    """Prediction layers in the target's folder."""
    try:
        return [Fit(str(target.path), MTP)] if find_mtp(target.path) is not None else []
    except ModelError as error:
        return [Fit(str(target.path), MTP, refusal=str(error))]


def fit(draft: str, target: Checkpoint) -> Fit:
    try:
        refuse_missing(draft)
    except ModelNotFound as error:
        return Fit(draft, "", refusal=str(error))
    try:
        candidate = examine(locate(draft, fetch=False), 0, target)
    except ModelNotFound:
        return Fit(draft, "", (f"{draft} is fetched from the hub, and examined, when it is loaded",))
    method = (candidate.family.method if candidate.family is not None else None) or ""
    return Fit(draft, method, candidate.warnings, candidate.refusal)


def own_layers(folder: Path) -> dict[str, str]:
    """`{"mtp": folder}` where the target's own checkpoint has prediction layers that can be used."""
    try:
        modules = find_mtp(folder)
    except ModelError as error:
        log.info("draft %s: %s: MTP layers left out: %s", AUTO, folder, error)
        return {}
    if modules is None:
        return {}
    log.info("draft %s: %s: %s: taken as %s", AUTO, folder, modules.summary(), MTP)
    return {MTP: str(folder)}


def check_drafts(config: EngineConfig) -> None:
    """Raises `ConfigError` for a method without a drafter, `WrongPair` for a draft model that cannot fit.

    For method `mtp`, raises `ModelError` for a target without such layers.
    """
    method, drafts = config.speculation.method, config.speculation.drafts
    if method in WITH_CHECKPOINT and method not in drafts:
        raise ConfigError(f"method = {method!r} needs a drafter: set draft (--draft FOLDER)")
    if method == MTP and method not in drafts:
        mtp_of(locate(config.model, trust_remote_code=config.trust_remote_code))
    for draft in (drafts.get(DRAFT_MODEL), drafts.get(PARD)):
        if isinstance(draft, str):
            check_draft(draft, config)


def check_draft(draft: str, config: EngineConfig) -> None:
    """Raises `WrongPair` for a language model that cannot draft for the settings' target."""
    try:
        mine = read_checkpoint(locate(draft))
        target = read_checkpoint(locate(config.model, trust_remote_code=config.trust_remote_code))
    except ModelError:
        return  # the loader names what is wrong with a checkpoint
    check_sizes(mine, target)
    check_tokenizers(mine.path, target.path)


def check_sizes(draft: Checkpoint, target: Checkpoint) -> None:
    """A draft model with more parameters than its target never saves time: most likely they are swapped."""
    if draft.quantization or target.quantization:
        return  # packed weights: the headers do not tell the number of parameters
    mine, theirs = draft.num_parameters, target.num_parameters
    if mine and theirs and mine > theirs:
        raise WrongPair(
            f"the draft model is larger than the target: {draft.path} has {mine:,} parameters, "
            f"{target.path} has {theirs:,}; are draft and model swapped?"
        )


def check_tokenizers(draft: Path, target: Path) -> None:
    """A draft model of another tokenizer needs enough of the target's tokens."""
    if not all((folder / "tokenizer.json").is_file() for folder in (draft, target)):
        return  # of another format: compared when both are loaded
    try:
        overlap = compare(draft, target)
    except CorruptWeights:
        return  # the loader names what is wrong with it
    if overlap is not None:
        overlap.check(draft, target)
