"""One prompt with two settings of speculation: both answers, their tokens and their figures."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from time import perf_counter
from typing import Any

from nicegui import ui

from speculon.core.config import MAX_DRAFTS
from speculon.core.config.speculation import AUTO, OFF
from speculon.core.errors import SpeculonError
from speculon.decoding.sequence import Event
from speculon.operations.admin.requests import token_rows, with_texts
from speculon.operations.admin.schemas import TokenRow
from speculon.operations.admin.ui.in_process import complete
from speculon.operations.admin.ui.shell import PageView
from speculon.operations.admin.ui.token_view import CSS, KEYS, html_of, legend
from speculon.server.answer import Answer
from speculon.server.errors import Failure
from speculon.server.pool.pooled import PooledModel

LOOKUPS = ("suffix", "ngram")  # need no checkpoint
SECONDS = 0.1  # between two updates of a side
BLOCK = 64  # tokens of one element: an update sends the last element again
MOST = 2**31
FIGURES = ("speed", "per_call", "drafted", "accepted")


class ShownAnswer:
    """One answer as it arrives."""

    def __init__(self) -> None:
        self.rows: list[TokenRow] = []
        self.account: dict[str, Any] | None = None  # of speculation, at the end
        self.reason: str | None = None  # why it ended
        self._first = self._last = 0.0
        self._first_rows = 0

    def push(self, answer: Answer, events: list[Event]) -> None:
        new = [row for event in events for row in with_texts(token_rows(event), answer.tokenizer)]
        self.reason = answer.choices[0].finish_reason
        self.account = answer.speculation() if self.reason else None
        if new:
            self._last = perf_counter()
            if not self.rows:
                self._first, self._first_rows = self._last, len(new)
            self.rows += new

    @property
    def speed(self) -> float | None:
        """Tokens per second after the first ones; None without later ones."""
        seconds = self._last - self._first
        return (len(self.rows) - self._first_rows) / seconds if seconds > 0 else None

    def figures(self) -> dict[str, str]:
        speed, account = self.speed, self.account or {}
        calls = account.get("tokens_per_target_call") if self.rows else None
        return {
            "speed": "-" if speed is None else f"{speed:,.1f}",
            "per_call": "-" if calls is None else f"{calls:.2f}",
            "drafted": f"{account['drafted']:,}" if account else "-",
            "accepted": f"{account['accepted']:,}" if account else "-",
        }


class PlaygroundSide:
    """One setting, and the answer with it."""

    def __init__(self, name: str, method: str, view: PageView):
        self._view, self._words = view, view.words
        with ui.card().classes("sp-card").props(f"data-side={name}"):
            ui.label(self._words(f"playground.{name}")).props("role=heading aria-level=2").classes("text-lg")
            self.method = ui.select([OFF, AUTO], value=OFF, label=self._words("playground.method"))
            self.k = ui.number(self._words("playground.k"))
            self.k.props["hint"] = self._words("playground.k_hint")
            for shown in (self.method, self.k):
                shown.props("outlined dense").classes("w-full")
            self._status = ui.label("").props("role=status").classes("text-sm min-h-6")
            with ui.element().classes("sp-numbers"):
                self._figures = {figure: self._figure(figure) for figure in FIGURES}
            self._tokens = ui.element().classes("w-full")
            detail = ui.label("").classes("text-sm w-full min-h-6")
        ui.run_javascript(f"({KEYS})(getHtmlElement({self._tokens.id}), getHtmlElement({detail.id}))")
        self._preset, self._shown = method, 0
        self._block: ui.html | None = None  # the last one

    def _figure(self, name: str) -> ui.label:
        with ui.column().classes("gap-0"):
            ui.label(self._words(f"playground.{name}")).classes("text-xs opacity-70")
            return ui.label("-").classes("text-lg").props(f"data-figure={name}")

    def offer(self, methods: list[str]) -> None:
        """Takes another model's methods; the chosen one stays where there is such a one."""
        method = self._preset or self.method.value
        self._preset = ""
        self.method.set_options(methods, value=method if method in methods else OFF)

    def clear(self) -> None:
        self._tokens.clear()
        self._shown, self._block = 0, None
        self._say("")
        for label in self._figures.values():
            label.text = "-"

    def wait(self) -> None:
        self.clear()
        self._say(self._words("playground.waiting"))

    def speculation(self) -> dict[str, Any]:
        # without a pool: the second side must not draft from the answer of the first
        fields: dict[str, Any] = {"method": self.method.value, "pool": "", "explain": True}
        return fields if self.k.value is None else fields | {"num_speculative_tokens": int(self.k.value)}

    async def run(self, body: dict[str, Any]) -> ShownAnswer | None:
        """The whole answer; None where the server refused it or it ended early."""
        state, output, due = self._view.admin.state, ShownAnswer(), 0.0
        self._say(self._words("playground.running"))
        try:
            async with aclosing(complete(state, body | {"speculation": self.speculation()})) as batches:
                async for answer, events in batches:
                    output.push(answer, events)
                    if (now := perf_counter()) >= due:
                        self._show(output)
                        due = now + SECONDS
        except SpeculonError as error:
            self._show(output)
            status = "-" if output.rows else Failure.of(error).status
            self._say(self._words("playground.failed", status=status, message=error), wrong=True)
            return None
        except asyncio.CancelledError:
            self._say(self._words("playground.stopped"))
            raise
        self._show(output)
        if output.reason in (None, "abort"):
            self._say(self._words("playground.broken"), wrong=True)
            return None
        self._say(self._words("playground.ended", reason=output.reason))
        return output

    def _say(self, text: str, *, wrong: bool = False) -> None:
        self._status.text = text
        self._status.props(f"role={'alert' if wrong else 'status'}")

    def _show(self, output: ShownAnswer) -> None:
        """Adds the new tokens: full blocks stay as they are."""
        while self._shown < len(output.rows):
            if self._block is None or self._shown % BLOCK == 0:
                with self._tokens:
                    self._block = ui.html("", sanitize=False).classes("sp-tokens").style("display: inline")
            start = self._shown - self._shown % BLOCK
            rows = output.rows[start : start + BLOCK]
            self._block.set_content(html_of(rows, self._words))
            self._shown = start + len(rows)
        for name, text in output.figures().items():
            self._figures[name].text = text


class Playground:
    """The page's fields, and the run of both sides."""

    def __init__(self, view: PageView):
        self._view, self._words, self._pool = view, view.words, view.admin.state.pool
        words, names = view.words, list(self._pool.models)
        self._task: asyncio.Task[Any] | None = None
        self._prompt = ui.textarea(words("playground.prompt")).props("outlined autogrow").classes("w-full")
        with ui.element().classes("sp-numbers"):
            default = self._pool.default.name
            self._model = ui.select(
                names, value=default, label=words("playground.model"), on_change=self._offer
            )
            self._max_tokens = ui.number(words("playground.max_tokens"), value=64)
            self._temperature = ui.number(words("playground.temperature"), value=0)
            self._seed = ui.number(words("playground.seed"))
            for shown in (self._model, self._max_tokens, self._temperature, self._seed):
                shown.props("outlined dense")
        with ui.row():
            self._start = ui.button(words("playground.run"), on_click=self.run)
            self._stop = ui.button(words("playground.stop"), on_click=self.cancel).props("flat")
            self._stop.disable()
        self._verdict = ui.label("").props("role=status data-verdict").classes("min-h-6")
        legend(words)
        with ui.element().classes("sp-grid"):
            self._sides = (PlaygroundSide("left", OFF, view), PlaygroundSide("right", AUTO, view))
        self._offer()

    def _offer(self) -> None:
        methods = offered_methods(self._pool.models[self._model.value])
        for side in self._sides:
            side.offer(methods)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def run(self) -> None:
        """The sides one after the other, so that neither slows the other."""
        if self._task is not None:
            return
        for side in self._sides:
            side.clear()
        if not self._fits():
            self._verdict.text = self._words("playground.bad_input")
            return
        self._verdict.text = ""
        self._task = asyncio.create_task(self._both(self._body()))
        self._start.disable()
        self._stop.enable()
        await asyncio.wait({self._task})
        task, self._task = self._task, None
        self._start.enable()
        self._stop.disable()
        self._offer()  # the run may have loaded the model
        if not task.cancelled():
            self._verdict.text = task.result()

    async def _both(self, body: dict[str, Any]) -> str:
        for side in self._sides:
            side.wait()
        answers = [await side.run(body) for side in self._sides]
        first, second = answers
        if first is None or second is None:
            return ""
        if body["temperature"] > 0 and "seed" not in body:
            return self._words("playground.may_differ")
        at = first_difference([row.id for row in first.rows], [row.id for row in second.rows])
        if at is None:
            return self._words("playground.same", count=len(first.rows))
        return self._words("playground.differs", position=at + 1)

    def _fits(self) -> bool:
        """Whether all values are in their ranges; each wrong one is named at its field."""
        self._prompt.error = None if self._prompt.value else self._words("playground.bad_prompt")
        heat = self._temperature
        heat.error = None if at_least_0(heat.value) else self._words("playground.bad_number")
        wholes: list[tuple[Any, int, int, bool]] = [(self._max_tokens, 1, MOST, False)]
        wholes += [(self._seed, 0, MOST, True)]
        wholes += [(side.k, 1, MAX_DRAFTS, True) for side in self._sides]
        for shown, low, high, optional in wholes:
            fits = optional if shown.value is None else is_whole(shown.value, low, high)
            shown.error = None if fits else self._words("playground.bad_whole", low=low, high=high)
        return not any(field.error for field in (self._prompt, heat, *(shown for shown, *_ in wholes)))

    def _body(self) -> dict[str, Any]:
        seed = {} if self._seed.value is None else {"seed": int(self._seed.value)}
        return seed | {
            "model": self._model.value,
            "prompt": self._prompt.value,
            "max_tokens": int(self._max_tokens.value),
            "temperature": float(self._temperature.value),
            "store": False,  # not captured: an administrator's try-out is no traffic of clients
        }


def offered_methods(model: PooledModel) -> list[str]:
    """Off, auto, the lookups, and the methods that the loaded model drafts with."""
    own = () if model.served is None else (model.served.method,)
    return list(dict.fromkeys((OFF, AUTO, *LOOKUPS, *model.drafters, *own)))


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first place, from 0, where the tokens are not the same; None: both are equal."""
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
    return min(len(one), len(other)) if at is None and len(one) != len(other) else at


def is_whole(value: Any, low: int, high: int) -> bool:
    return isinstance(value, int | float) and float(value).is_integer() and low <= value <= high


def at_least_0(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < float("inf")


async def build(view: PageView) -> None:
    ui.add_css(CSS)
    page = Playground(view)
    ui.context.client.on_delete(page.cancel)
