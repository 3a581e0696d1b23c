"""The address of a server: opening it, and what is said of it on stderr."""

from __future__ import annotations

import json
import socket
import sys
import textwrap
from ipaddress import ip_address
from time import time

from rich.panel import Panel

from speculon import __version__
from speculon.cli.screen import errors
from speculon.core.config.serve import ServeConfig
from speculon.core.errors import ConfigError

OPEN_SERVER = (
    "Everybody who reaches this address can use the model, without a key.",
    "Set SPECULON_SERVE__API_KEY, or listen on 127.0.0.1 behind a proxy that checks its clients.",
)


def announce_address(host: str, port: int, config: ServeConfig) -> None:
    if open_to_others(host, config):
        warn_of_open_server(host, as_json=config.log_format == "json")
    say(f"speculon {__version__} listens on http://{f'[{host}]' if ':' in host else host}:{port}")


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=2048)
        # connections inherit it; asyncio sets it on sockets of a named protocol only
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None


def open_to_others(host: str, config: ServeConfig) -> bool:
    """Whether other machines may reach this numeric address and need no key."""
    return not config.api_key and not ip_address(host.partition("%")[0]).is_loopback


def warn_of_open_server(host: str, *, as_json: bool) -> None:
    if as_json:
        fields = {"time": round(time(), 3), "level": "WARNING", "message": f"{host}: {' '.join(OPEN_SERVER)}"}
        sys.stderr.write(json.dumps(fields) + "\n")
    elif errors().is_terminal:
        title = f"WARNING: {host} without an API key"
        errors().print(Panel("\n".join(OPEN_SERVER), title=title, style="bold red", expand=False))
    else:
        lines = [f"{host} without an API key.", *OPEN_SERVER]
        errors().print("\n".join(f"WARNING: {line}" for line in lines), markup=False)


def say(text: str) -> None:
    errors().print(wrapped(text), style="dim", markup=False)


def wrapped(text: str) -> str:
    """On a terminal, lines that end between words; elsewhere the text as it is."""
    if not sys.stderr.isatty():
        return text
    width = errors().width
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
