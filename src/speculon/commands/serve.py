"""`speculon serve`: the server in this process, its engine in another."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import socket
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from ipaddress import ip_address
from pathlib import Path
from time import perf_counter, time
from typing import TYPE_CHECKING, Any

from rich.panel import Panel

from speculon import __version__
from speculon.checkpoints.locate import name_of
from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import errors
from speculon.config import EngineConfig
from speculon.config.models import ModelSettingsFile, models_file
from speculon.config.serve import ServeConfig
from speculon.errors import ConfigError, SpeculonError
from speculon.logs import LogFormatter
from speculon.proposers.registry import check_method, methods

if TYPE_CHECKING:
    import uvicorn

    from speculon.server.app_state import AppState
    from speculon.server.catalogue import Catalogue

# given to clients to read the end of requests that were aborted at the drain timeout
CLOSE_SECONDS = 2
OPEN_SERVER = (
    "Everybody who reaches this address can use the model, without a key.",
    "Set SPECULON_SERVE__API_KEY, or listen on 127.0.0.1 behind a proxy that checks its clients.",
)


class WrappedFormatter(LogFormatter):
    """Log messages that end between words on a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return wrapped(super().formatMessage(record))


def run(given: Given, models: list[str], speculative_config: str | None) -> None:
    """Serves until TERM or Ctrl-C, then finishes running requests, refuses new ones, and exits with 0."""
    started = perf_counter()
    settings = engine_settings(given, speculative_config) | ({"model": models[0]} if models else {})
    config = EngineConfig(**settings)
    check_method(config.speculation.method)
    check_dashboard(config.serve)
    listener = listen(config.serve.host, config.serve.port)
    log_to_stderr(wrap=config.serve.log_format == "text")
    from speculon.server.app_state import AppState
    from speculon.server.connections import raise_descriptor_limit
    from speculon.server.pool import ModelPool

    raise_descriptor_limit()
    catalogue = catalogue_of(settings, config, models)
    pool = ModelPool(catalogue, on_stage=lambda model, stage: say(f"loading {model}: {stage}"))
    state = AppState(pool)
    http = http_server(state)
    if config.serve.capture is not None:
        keys = f"{len(config.serve.capture_key)} API keys" if config.serve.capture_key else "every API key"
        folder, limit = config.serve.capture.absolute(), f"{config.serve.capture_gb:g} GB"
        say(f"capturing requests and answers of {keys} in {folder}, at most {limit}")
    host, port = listener.getsockname()[:2]
    announce_address(host, port, config.serve)
    # uvicorn handles them, and raises them once more at its end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:  # uvloop if installed
        if fault := runner.run(serve(state, http, listener, started)):
            raise fault
    say("stopped")


def announce_address(host: str, port: int, config: ServeConfig) -> None:
    if open_to_others(host, config):
        warn_of_open_server(host, as_json=config.log_format == "json")
    say(f"speculon {__version__} listens on http://{f'[{host}]' if ':' in host else host}:{port}")


def check_dashboard(config: ServeConfig) -> None:
    """Raises `ConfigError` before the port is open where its packages are missing."""
    if config.admin:
        from speculon.server.admin.ui import check_installed

        check_installed()


def catalogue_of(settings: dict[str, Any], config: EngineConfig, models: list[str]) -> Catalogue:
    """The models of `--model`, else of the settings' file of models, and those of `--models-dir`."""
    from speculon.checkpoints.discover import find_models
    from speculon.server.catalogue import Catalogue

    folder, name, file = config.serve.models_dir, config.serve.served_model_name, file_of_models(config)
    writable = ModelSettingsFile(models_file(config.serve), methods()) if config.serve.admin else None
    tables, names = (file.tables(), file.names()) if file is not None else ({}, {})
    if folder is None and len(models) < 2 and not tables:
        return replace(Catalogue.of_one(settings), writable=writable)
    given = [names.get(model, model) for model in models] or list(tables)
    if not given and "model" in config.model_fields_set:
        given = [config.model]
    if name is not None and given and given[0] in tables:
        raise ConfigError(f"served_model_name = {name!r}: {given[0]!r} has its names in {file and file.path}")
    paths = {model: path_of(model, tables[model], folder, config) for model in given if model in tables}
    found = find_models(given, folder, name, paths)
    if len(found.models) > 1:
        say(f"models: {', '.join(found.models)}; the first is the default")
    return Catalogue(settings, found.models, found.drafters, file, writable)


def path_of(name: str, table: Mapping[str, Any], folder: Path | None, config: EngineConfig) -> str:
    """Of a model with a table: what the table says, else the subfolder of its name, else the model of the
    settings that has this name, else the name itself.
    """
    if "model" in table:
        return str(table["model"])
    if folder is not None and (folder / name / "config.json").is_file():
        return str(folder / name)
    return config.model if name_of(config.model) == name else name


def file_of_models(config: EngineConfig) -> ModelSettingsFile | None:
    """The file with the settings of each model, if there is one. Raises `ConfigError` for what it says."""
    path = models_file(config.serve)
    if not path.is_file():
        if config.serve.models_file is not None:
            raise ConfigError(f"models_file = {str(path)!r}: no such file")
        return None
    say(f"settings of models from {path}")
    return ModelSettingsFile(path, methods())


def http_server(state: AppState) -> uvicorn.Server:
    from speculon.server.app import create_app
    from speculon.server.connections import HttpServer

    class DrainingServer(HttpServer):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            state.pool.drain()
            if count := state.pool.open_requests:
                say(f"finishing {count} request{'s' if count > 1 else ''}")
            await super().shutdown(sockets)

    seconds = math.ceil(state.config.drain_timeout) + CLOSE_SECONDS
    app = create_app(state, __version__)
    if state.config.admin:
        from speculon.server.admin.ui import mount

        mount(app, state)
    return DrainingServer(app, state.config, seconds)


async def serve(
    state: AppState, http: uvicorn.Server, listener: socket.socket, started: float
) -> SpeculonError | None:
    """Serves to the end; returns the fault of the only engine where that was the end."""
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    ended = asyncio.create_task(state.pool.ended())
    ready = asyncio.create_task(announce(state, started))
    await asyncio.wait({serving, ended}, return_when=asyncio.FIRST_COMPLETED)
    fault = None if state.pool.draining or not ended.done() else state.pool.default.error
    http.should_exit = True
    await serving
    ended.cancel()
    ready.cancel()
    return fault


async def announce(state: AppState, started: float) -> None:
    await state.pool.started.wait()
    model, seconds = state.pool.default, perf_counter() - started
    facts = model.facts
    limits = f"context {facts.max_context}, {facts.pages} pages of {facts.page_tokens} tokens"
    say(f"serving {model.name}: {limits}, method {facts.method}; ready in {seconds:.1f} s")


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


def log_to_stderr(*, wrap: bool) -> None:
    """Not wrapped, a message is one line for machines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WrappedFormatter("%(message)s") if wrap else LogFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def wrapped(text: str) -> str:
    """On a terminal, lines that end between words; elsewhere the text as it is."""
    if not sys.stderr.isatty():
        return text
    width = errors().width
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
