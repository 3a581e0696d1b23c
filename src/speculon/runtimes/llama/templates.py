"""Chat templates by jinja2 alone, with the functions that transformers gives them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from speculon.decoding.text.conversations import REASONING

if TYPE_CHECKING:
    from jinja2 import Template

GENERATION = re.compile(r"\{%(-?)\s*(?:end)?generation\s*(-?)%\}")  # marks what a model was trained on
MARK = "CONTINUES_HERE_9b1f "  # written at the end of a message that goes on


def render(
    source: str, messages: Seq[Mapping[str, Any]], continued: str, variables: Mapping[str, Any]
) -> str:
    """A conversation as the template writes it; with `continued`, up to the end of that field of its last
    message.

    Raises what the template raises, and `ValueError` where it does not write the field.
    """
    form = [with_thinking(message) for message in messages]
    if not continued:
        return compiled(source).render(messages=form, **variables)
    last, text = form[-1], str(form[-1][continued])
    for name in REASONING if continued in REASONING else (continued,):
        if last.get(name) == text:
            last[name] = text + MARK
    written, mark = compiled(source).render(messages=form, **variables), MARK.strip()
    if mark not in written:
        raise ValueError(f"the template does not write the last message's {continued}")
    written, _, after = written.rpartition(mark)
    return written if after.startswith(MARK[len(mark) :]) else written.rstrip()  # it trims messages


def with_thinking(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose thinking has the two names that most templates read."""
    thinking = next((text for name in REASONING if (text := message.get(name)) is not None), None)
    if thinking is None:
        return dict(message)
    return {"thinking": thinking, **message, "reasoning_content": thinking}


@lru_cache(maxsize=16)
def compiled(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = as_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(GENERATION.sub(r"{%\1 if true %}{% endif \2%}", source))


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own filter would write some characters as HTML does."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def refuse(message: str) -> NoReturn:
    raise TemplateError(message)
