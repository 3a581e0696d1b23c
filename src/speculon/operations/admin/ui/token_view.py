"""The tokens of one answer: where each comes from, by colour and by shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import exp

from nicegui import ui

from speculon.core.errors import SpeculonError
from speculon.operations.admin.schemas import TokenRow, TokenView
from speculon.operations.admin.ui.shell import PageView
from speculon.operations.admin.ui.words import UiWords

FATES = ("accepted", "correction", "bonus", "plain")
MOST_SHOWN = 2000  # of one page: a reader's browser lays out each token
VISIBLE = str.maketrans({" ": "·", "\t": "⇥", "\r": "␍"})
# Four shapes of border beside four colours of Okabe and Ito: either alone tells the fates apart.
CSS = """
.sp-tokens { font-family: ui-monospace, monospace; line-height: 2.1; overflow-wrap: anywhere;
  white-space: pre-wrap; content-visibility: auto; contain-intrinsic-size: auto 20rem }
.sp-tokens > span { padding: 1px 0; margin-right: 2px; border-bottom: 3px solid transparent }
.sp-tokens > span:focus-visible { outline: 3px solid #e69f00 }
.sp-accepted { border-bottom: 3px solid #009e73 !important; background: rgba(0,158,115,.16) }
.sp-correction { border: 2px dashed #d55e00 !important; background: rgba(213,94,0,.14) }
.sp-bonus { border-bottom: 5px double #0072b2 !important; background: rgba(0,114,178,.16) }
.sp-plain { border-bottom: 2px dotted #808080 !important }
.sp-legend > span { display: inline-block }
"""
# One listener for all tokens: a tooltip of its own for each of thousands would be slow.
# Only one token is a stop of the tab key; arrows go on from there.
KEYS = """
(root, detail) => {
  const show = (t) => { if (t.dataset && t.dataset.d) detail.textContent = t.dataset.d };
  root.addEventListener('mouseover', (e) => show(e.target));
  root.addEventListener('focusin', (e) => show(e.target));
  root.addEventListener('keydown', (e) => {
    const step = {ArrowRight: 'nextElementSibling', ArrowLeft: 'previousElementSibling'}[e.key];
    let next = step && e.target[step];
    while (next && !next.dataset.d) next = next[step];
    if (!next) return;
    e.preventDefault(); e.target.tabIndex = -1; next.tabIndex = 0; next.focus();
  });
}
"""


def visible(text: str) -> str:
    """Whitespace as signs; a newline keeps its break."""
    return text.translate(VISIBLE).replace("\n", "↵\n")


def described(row: TokenRow, words: UiWords) -> str:
    parts = [repr(row.text), words(f"token_view.{row.fate}")]
    if row.source is not None:
        parts.append(words("token_view.source", source=row.source))
    if row.position is not None:
        parts.append(words("token_view.position", position=row.position + 1))
    if row.logprob is not None:
        parts.append(words("token_view.probability", share=f"{exp(row.logprob):.2%}"))
    if row.rank is not None:
        parts.append(words("token_view.rank", rank=row.rank))
    return " | ".join(parts)


def html_of(rows: Sequence[TokenRow], words: UiWords) -> str:
    """Spans of tokens; every text in them is escaped."""
    return "".join(span(row, words, first=i == 0) for i, row in enumerate(rows))


def span(row: TokenRow, words: UiWords, *, first: bool) -> str:
    fate = row.fate if row.fate in FATES else "plain"
    label = escape(described(row, words), quote=True)
    return (
        f'<span class="sp-{fate}" tabindex="{0 if first else -1}" data-d="{label}" aria-label="{label}" '
        f'role="img">{escape(visible(row.text))}</span>'
    )


def legend(words: UiWords, fates: Iterable[str] = FATES) -> None:
    shown = "".join(
        f'<span class="sp-{fate}">{escape(words(f"token_view.{fate}"))}</span> &nbsp; ' for fate in fates
    )
    ui.html(shown, sanitize=False).classes("sp-tokens sp-legend text-sm")


def tokens(rows: Sequence[TokenRow], words: UiWords) -> None:
    """Tokens in pages of `MOST_SHOWN`, and a line for the one that is pointed at or focused."""
    ui.add_css(CSS)
    pages = max(1, -(-len(rows) // MOST_SHOWN))
    root = ui.html(html_of(rows[:MOST_SHOWN], words), sanitize=False).classes("sp-tokens w-full")
    detail = ui.label("").classes("text-sm sticky bottom-0 w-full min-h-6").props("role=status")
    if pages > 1:

        def turn(event: object) -> None:
            start = (int(getattr(event, "value", 1)) - 1) * MOST_SHOWN
            root.set_content(html_of(rows[start : start + MOST_SHOWN], words))

        ui.pagination(1, pages, direction_links=True, on_change=turn).props("max-pages=5")
    ui.run_javascript(f"({KEYS})(getHtmlElement({root.id}), getHtmlElement({detail.id}))")


async def build(view: PageView) -> None:
    words, name = view.words, ui.context.client.request.query_params.get("id", "")
    try:
        shown: TokenView = view.admin.requests.tokens(name)
    except SpeculonError as error:
        ui.label(str(error)).props("role=alert")
        return
    legend(words)
    if shown.dropped:
        ui.label(words("token_view.dropped", count=shown.dropped))
    for rows in shown.choices:
        tokens(rows, words)
