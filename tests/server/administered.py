"""A server with an administration, and calls of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from speculon.core.config.models import ModelSettingsFile
from speculon.server.pool.catalogue import Catalogue
from speculon.speculation.proposers.registry import methods
from tests.server.inside import Inside, ScriptedLoader, serving

API = "/admin/api"
KEY = {"authorization": "Bearer secret"}
K = "num_speculative_tokens"


@contextmanager
def administered(
    folder: Path,
    loader: ScriptedLoader | None = None,
    models: tuple[str, ...] = ("a",),
    paths: dict[str, str] | None = None,
    drafters: Mapping[str, str] | None = None,
    **settings: Any,
) -> Iterator[Inside]:
    serve = {"admin": True, **settings.pop("serve", {})}
    file = ModelSettingsFile(folder / "speculon-models.toml", methods())
    given = {"model": "path-a", "serve": serve, **settings}
    paths = paths or {name: f"path-{name}" for name in models}
    catalogue = Catalogue(given, paths, drafters or {}, file=file, writable=file)
    with serving(catalogue, loader or ScriptedLoader()) as inside:
        yield inside


def ask(inside: Inside, **body: Any) -> dict[str, Any]:
    answer = inside.post("completions", **{"prompt": "x", "max_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def change(inside: Inside, name: str = "a", **changes: Any) -> Any:
    return inside.client.patch(f"{API}/models/{name}", json={"changes": changes})


def setting(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in view["settings"] if one["name"] == name)


def written(folder: Path) -> str:
    path = folder / "speculon-models.toml"
    return path.read_text() if path.exists() else ""
