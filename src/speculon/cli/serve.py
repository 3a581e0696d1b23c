"""`speculon serve`: the server in this process, its engine in another."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from speculon import __version__
from speculon.cli.app import SpeculativeConfig, command
from speculon.cli.listening import announce_address, listen, say, wrapped
from speculon.cli.options import Given, engine_settings, settings_from
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.config.models import ModelSettingsFile, models_file
from speculon.core.config.serve import ServeConfig
from speculon.core.errors import ConfigError, SpeculonError
from speculon.core.logs import LogFormatter
from speculon.loading.locate import name_of
from speculon.speculation.proposers.registry import check_method, methods

if TYPE_CHECKING:
    import uvicorn

    from speculon.server.app_state import AppState
    from speculon.server.pool.catalogue import Catalogue

# given to clients to read the end of requests that were aborted at the drain timeout
CLOSE_SECONDS = 2


class WrappedFormatter(LogFormatter):
    """Log messages that end between words on a terminal."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return wrapped(super().formatMessage(record))


@command("serve")
@settings_from(ServeConfig, SpeculationConfig, EngineConfig, without=("model",))
def serve(
    *,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="a folder, a GGUF file, a hub id, or a name such as `smollm2`; may be repeated, the first "
            "is the default (default: smollm2)"
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1, max=1024, help="engines of one model, on Ray Serve; needs pip install 'speculon[ray]'"
        ),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    given: Given,
) -> None:
    """Serve models over HTTP with OpenAI's API. Each request can set its speculation and get its figures."""
    models = model or []
    settings = engine_settings(given, speculative_config) | ({"model": models[0]} if models else {})
    if replicas is None:
        return run(settings, models)
    from speculon.cli.serve_replicas import run_replicas

    run_replicas(settings, models, replicas)


def run(settings: dict[str, Any], models: list[str]) -> None:
    """Serves until TERM or Ctrl-C, then finishes running requests, refuses new ones, and exits with 0."""
    started = perf_counter()
    config = EngineConfig(**settings)
    check_method(config.speculation.method)
    check_dashboard(config.serve)
    listener = listen(config.serve.host, config.serve.port)
    log_to_stderr(wrap=config.serve.log_format == "text")
    from speculon.cli.connections import raise_descriptor_limit
    from speculon.server.app_state import AppState
    from speculon.server.pool.pool import ModelPool

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
        if fault := runner.run(serve_to_end(state, http, listener, started)):
            raise fault
    say("stopped")


def check_dashboard(config: ServeConfig) -> None:
    """Raises `ConfigError` before the port is open where its packages are missing."""
    if config.admin:
        from speculon.operations.admin.ui import check_installed

        check_installed()


def catalogue_of(settings: dict[str, Any], config: EngineConfig, models: list[str]) -> Catalogue:
    """The models of `--model`, else of the settings' file of models, and those of `--models-dir`."""
    from speculon.cli.discover import find_models
    from speculon.server.pool.catalogue import Catalogue

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
    from speculon.cli.connections import HttpServer
    from speculon.server.app import create_app
    from speculon.server.pool.model_routes import add_models

    class DrainingServer(HttpServer):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            state.pool.drain()
            if count := state.pool.open_requests:
                say(f"finishing {count} request{'s' if count > 1 else ''}")
            await super().shutdown(sockets)

    seconds = math.ceil(state.config.drain_timeout) + CLOSE_SECONDS
    app = create_app(state, __version__)
    add_models(app, state)
    if state.config.admin:
        from speculon.operations.admin.ui import mount

        mount(app, state)
    return DrainingServer(app, state.config, seconds)


async def serve_to_end(
    state: AppState, http: uvicorn.Server, listener: socket.socket, started: float
) -> SpeculonError | None:
    """Returns the fault of the only engine where that ended the server."""
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


def log_to_stderr(*, wrap: bool) -> None:
    """Not wrapped, a message is one line for machines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(WrappedFormatter("%(message)s") if wrap else LogFormatter("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
