"""Models by name: those that are given, and the subfolders and GGUF files of a folder, drafters apart."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from speculon.checkpoints.gguf.header import is_gguf, is_later_part
from speculon.checkpoints.locate import name_of
from speculon.core.errors import ConfigError, ModelError
from speculon.runtimes.torch.drafters.families import DRAFT_MODEL, family_of

log = logging.getLogger("speculon")


@dataclass(frozen=True, slots=True)
class Models:
    """Name -> the value of `model`, in order; and name -> method of the drafters beside them."""

    models: dict[str, str]
    drafters: dict[str, str]


def find_models(
    paths: list[str],
    folder: Path | None,
    first_name: str | None = None,
    named: Mapping[str, str] = MappingProxyType({}),
) -> Models:
    """Those that are given come first, as paths or as names of `named`, which has their paths; `first_name`
    is that of the first of all.

    Raises `ConfigError` for two of one name, and where there is none.
    """
    models: dict[str, str] = {}
    drafters: dict[str, str] = {}
    for model in paths:
        add(models, model if model in named else name_of(model), named.get(model, model))
    for inner in inside(folder) if folder is not None else ():
        try:
            family = family_of(inner)
        except ModelError as error:
            log.warning("models_dir: %s is left out: %s", inner, error)
            continue
        if family.method == DRAFT_MODEL:
            add(models, name_of(str(inner)), str(inner))
        elif family.method is not None:
            drafters[inner.name] = family.method
        else:
            log.warning("models_dir: %s is left out: %s", inner, family.refusal)
    if not models:
        raise ConfigError(f"models_dir = {str(folder)!r}: it has no subfolder with a model, and no GGUF file")
    if first_name is not None:
        first = next(iter(models))
        if first_name != first and first_name in models:
            raise clash(first_name, models[first], models[first_name])
        models = {first_name if name == first else name: path for name, path in models.items()}
    return Models(models, {name: method for name, method in drafters.items() if name not in models})


def inside(folder: Path) -> list[Path]:
    """Subfolders with a config, and GGUF files, of split ones the first.

    Raises `ConfigError` where the folder is not there.
    """
    if not folder.is_dir():
        raise ConfigError(f"models_dir = {str(folder)!r}: no such folder")
    files = (path for path in folder.iterdir() if not is_later_part(path))
    return sorted(path for path in files if (path / "config.json").is_file() or is_gguf(path))


def add(models: dict[str, str], name: str, path: str) -> None:
    known = models.setdefault(name, path)
    if Path(known).expanduser().resolve() != Path(path).expanduser().resolve():
        raise clash(name, known, path)


def clash(name: str, first: str, other: str) -> ConfigError:
    return ConfigError(f"two models are named {name!r}: {first} and {other}; rename one of them")
