"""The login page: plain HTML, since a page without a session has no socket."""

from __future__ import annotations

from html import escape

from starlette.requests import HTTPConnection

from speculon.operations.admin.ui.words import words_for

STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;display:grid;place-items:center;"
    "min-height:90vh;margin:0}main{width:min(22rem,90vw)}label,input,button{display:block;width:100%;"
    "box-sizing:border-box;font:inherit}input,button{padding:.6rem;margin:.4rem 0 1rem}"
    "[role=alert]{border-left:4px solid #d55e00;padding-left:.6rem}"
)


def login_page(connection: HTTPConnection, fault: str | None) -> str:
    """`fault`: None, `wrong` or `too_many`."""
    words = words_for(connection)
    faults = {"wrong": "login.wrong", "too_many": "login.too_many"}
    alert = f'<p role="alert">{escape(words(faults[fault]))}</p>' if fault is not None else ""
    title, key, enter = (escape(words(name)) for name in ("login.title", "login.key", "login.enter"))
    return (
        f'<!doctype html><html lang="{words.language}"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{STYLE}</style></head>'
        f'<body><main><h1>{title}</h1>{alert}<form method="post" action="/admin/login">'
        f'<label for="key">{key}</label><input id="key" name="key" type="password" required autofocus'
        f' autocomplete="current-password"><button>{enter}</button></form></main></body></html>'
    )
