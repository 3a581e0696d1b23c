"""Every visible string of the dashboard, by key: `page.key` is `key` in `locales/page.toml`."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path

from starlette.requests import HTTPConnection

LANGUAGES = {"en": "English", "ko": "한국어", "ja": "日本語", "zh": "中文"}
DEFAULT = "en"
FOLDER = Path(__file__).with_name("locales")


class UiWords:
    """The strings of one language."""

    def __init__(self, language: str):
        self.language = language if language in LANGUAGES else DEFAULT

    def __call__(self, key: str, **values: object) -> str:
        """The string of `page.key`, with its `{fields}` filled in. Raises `KeyError` for an unknown key."""
        return table()[key][self.language].format(**values)


@cache
def table() -> dict[str, dict[str, str]]:
    """`page.key` -> language -> string."""
    return {
        f"{file.stem}.{key}": strings
        for file in sorted(FOLDER.glob("*.toml"))
        for key, strings in tomllib.loads(file.read_text(encoding="utf-8")).items()
    }


def words_for(connection: HTTPConnection) -> UiWords:
    """In the language of a browser."""
    chosen = connection.cookies.get("speculon_language")
    return UiWords(language_of(chosen, connection.headers.get("accept-language", "")))


def language_of(chosen: str | None, accepted: str) -> str:
    """The language that was chosen; else the first known one of an Accept-Language header, by its weights."""
    if chosen in LANGUAGES:
        return chosen
    parts = [part.strip().partition(";q=") for part in accepted.split(",")]
    ranked = sorted(parts, key=lambda part: -weight(part[2]))
    names = (name.partition("-")[0].lower() for name, _, q in ranked if weight(q) > 0)
    return next((name for name in names if name in LANGUAGES), DEFAULT)


def weight(text: str) -> float:
    try:
        return float(text) if text else 1.0
    except ValueError:
        return 0.0
