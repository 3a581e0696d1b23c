"""`speculon serve`: the server, with its engine in another process, or replicas on a Ray of this machine."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from ipaddress import ip_address
from math import ceil
from pathlib import Path
from threading import Event
from time import perf_counter, time
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

from rich.panel import Panel
from typer import Option

from speculon import __version__
from speculon.checkpoints.locate import name_of
from speculon.cli.app import SpeculativeConfig, command
from speculon.cli.options import Flags, engine_settings, settings_from
from speculon.cli.screen import errors
from speculon.core.config import EngineConfig, ServeConfig, SpeculationConfig
from speculon.core.config.models import ModelSettingsFile, models_file
from speculon.core.errors import ConfigError, SpeculonError
from speculon.core.logs import LogFormatter
from speculon.speculation.proposers.registry import check_method, methods

if TYPE_CHECKING:
    import uvicorn

    from speculon.server.app_state import AppState
    from speculon.server.pool.catalogue import Catalogue

# given to clients to read the end of requests that were aborted at the drain timeout
CLOSE_SECONDS = 2
NAME = "speculon"  # of the application on Ray
OBJECTS = 100 * 2**20  # bytes of Ray's shared memory: events of steps are small
OPEN_SERVER = (
    "Everybody who can reach this address can use the model, because no API key is set.",
    "Set SPECULON_SERVE__API_KEY, or listen on 127.0.0.1 behind a proxy that checks its clients.",
)


@command("serve")
@settings_from(ServeConfig, SpeculationConfig, EngineConfig, without=("model",))
def serve(
    *,
    model: Annotated[
        list[str] | None,
        Option(
            help="a folder, a GGUF file, a hub id, or a name such as `smollm2`; may be repeated, the first "
            "is the default (default: smollm2)"
        ),
    ] = None,
    replicas: Annotated[
        int | None,
        Option(min=1, max=1024, help="engines of one model, on Ray Serve; needs pip install 'speculon[ray]'"),
    ] = None,
    speculative_config: SpeculativeConfig = None,
    flags: Flags,
) -> None:
    """Serve models over HTTP with OpenAI's API. Each request can set its speculation and get its figures."""
    models = model or []
    settings = engine_settings(flags, speculative_config) | ({"model": models[0]} if models else {})
    if replicas is None:
        run(settings, models)
    else:
        run_replicas(settings, models, replicas)


def run(settings: dict[str, Any], models: list[str]) -> None:
    """Serves until TERM or Ctrl-C, then finishes running requests, refuses new ones, and exits with 0."""
    started = perf_counter()
    config = EngineConfig(**settings)
    check_method(config.speculation.method)
    if config.serve.admin:  # refused before the port is open where its packages are missing
        from speculon.operations.admin.ui import check_installed

        check_installed()
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
    if capture := config.serve.capture:
        keys = f"{len(config.serve.capture_key)} API keys" if config.serve.capture_key else "every API key"
        limit = f"at most {config.serve.capture_gb:g} GB"
        say(f"capturing requests and answers of {keys} in {capture.absolute()}, {limit}")
    host, port = listener.getsockname()[:2]
    announce_address(host, port, config.serve)
    # uvicorn handles them, and raises them once more at its end
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=http.config.get_loop_factory()) as runner:  # uvloop if installed
        if fault := runner.run(serve_to_end(state, http, listener, started)):
            raise fault
    say("stopped")


def catalogue_of(settings: dict[str, Any], config: EngineConfig, models: list[str]) -> Catalogue:
    """The models of `--model`, else of the settings' file of models, and those of `--models-dir`."""
    from speculon.cli.discover import find_models
    from speculon.server.pool.catalogue import Catalogue

    folder, name, file = config.serve.models_dir, config.serve.served_model_name, file_of_models(config)
    writable = ModelSettingsFile(models_file(config.serve), methods()) if config.serve.admin else None
    tables, names = (file.tables(), file.names()) if file is not None else ({}, {})
    if folder is None and len(models) < 2 and not tables:
        return replace(Catalogue.of_one(settings), writable=writable)
    listed = [names.get(model, model) for model in models] or list(tables)
    if not listed and "model" in config.model_fields_set:
        listed = [config.model]
    if name is not None and listed and listed[0] in tables:
        raise ConfigError(
            f"served_model_name = {name!r}: {listed[0]!r} has a table in {file and file.path}; set its name "
            "there"
        )
    paths = {model: path_of(model, tables[model], folder, config) for model in listed if model in tables}
    here = find_models(listed, folder, name, paths)
    if len(here.models) > 1:
        say(f"models: {', '.join(here.models)}; requests that name no model use the first")
    return Catalogue(settings, here.models, here.drafters, file, writable)


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
    from speculon.server.answer import ABORT_SECONDS
    from speculon.server.app import create_app

    class DrainingServer(HttpServer):
        loop: asyncio.AbstractEventLoop | None = None  # once it has started
        hurried = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """A second Ctrl-C ends the running requests in order; a third one cuts them off."""
            if self.should_exit and sig == signal.SIGINT and self.loop and not self.hurried:
                self.hurried = True
                self.loop.call_soon_threadsafe(state.pool.end_requests)
            else:
                super().handle_exit(sig, frame)

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            self.loop = asyncio.get_running_loop()
            await super().startup(sockets)

        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            state.pool.drain()
            if count := state.pool.open_requests:
                say(
                    f"finishing {count} request{'s' * (count > 1)}, for at most "
                    f"{state.config.drain_timeout:g} s"
                )
            await super().shutdown(sockets)

    seconds = ceil(state.config.drain_timeout + ABORT_SECONDS) + CLOSE_SECONDS
    app = create_app(state, __version__)
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
    model, facts = state.pool.default, state.pool.default.facts
    limits = f"context {facts.max_context} tokens, {facts.pages} KV pages of {facts.page_tokens} tokens"
    ready = f"method {facts.method}; ready in {perf_counter() - started:.1f} s"
    say(f"serving {model.name}: {limits}, {ready}")


def log_to_stderr(*, wrap: bool) -> None:
    """Wrapped, messages end between words on a terminal; else one is a line for machines."""

    class Wrapped(LogFormatter):
        def formatMessage(self, record: logging.LogRecord) -> str:
            return wrapped(super().formatMessage(record))

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter((Wrapped if wrap else LogFormatter)("%(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


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
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose another --host or --port"
        ) from None


def open_to_others(host: str, config: ServeConfig) -> bool:
    """Whether other machines may reach this numeric address and need no key."""
    return not config.api_key and not ip_address(host.partition("%")[0]).is_loopback


def warn_of_open_server(host: str, *, as_json: bool) -> None:
    if as_json:
        fields = {"time": round(time(), 3), "level": "WARNING", "message": f"{host}: {' '.join(OPEN_SERVER)}"}
        sys.stderr.write(json.dumps(fields) + "\n")
    elif errors().is_terminal:
        title = f"WARNING: {host} is open to others without an API key"
        errors().print(Panel("\n".join(OPEN_SERVER), title=title, style="bold red", expand=False))
    else:
        lines = [f"{host} is open to others without an API key.", *OPEN_SERVER]
        errors().print("\n".join(f"WARNING: {line}" for line in lines), markup=False)


def say(text: str) -> None:
    errors().print(wrapped(text), style="dim", markup=False)


def wrapped(text: str) -> str:
    """On a terminal, lines that end between words; elsewhere the text as it is."""
    if not sys.stderr.isatty():
        return text
    width = errors().width
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def own_ray() -> dict[str, str]:
    """The environment of a Ray that is this command's alone."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without a cluster of machines its ports are on 127.0.0.1
        "RAY_memory_monitor_refresh_ms": "0",  # else it ends an engine for what other programs take
        "RAY_worker_niceness": "0",  # else engines run only where no other program wants the processor
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray keeps one in the home folder
    }


def http_options(host: str, port: int, config: ServeConfig) -> dict[str, Any]:
    """Of Ray's proxy, which is what clients connect to."""
    return {"host": host, "port": port, "keep_alive_timeout_s": ceil(config.keep_alive)}


def run_replicas(settings: dict[str, Any], models: list[str], replicas: int) -> None:
    """Serves until TERM or Ctrl-C, then finishes running requests, and exits with 0."""
    if len(models) > 1:
        raise ConfigError(
            f"replicas = {replicas}: replicas serve one model, and --model names {len(models)}: "
            f"{', '.join(models)}"
        )
    if find_spec("ray") is None:
        raise ConfigError(
            f"replicas = {replicas}: needs Ray, which is not installed: pip install 'speculon[ray]'"
        )
    started = perf_counter()
    config = EngineConfig(**settings)
    listener = listen(config.serve.host, config.serve.port)
    host, port = listener.getsockname()[:2]
    listener.close()  # Ray's proxy opens it once more
    for name, value in own_ray().items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from speculon.operations.cluster import app

    stopped = Event()
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, replicas),  # logical: more replicas than cores may be asked for
        include_dashboard=False,
        object_store_memory=OBJECTS,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(http_options=http_options(host, port, config.serve))
        gpus = 1.0 if config.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= replicas else 0.0
        say(f"loading {config.model}: {replicas} replicas")
        serve.run(app({**settings, "replicas": replicas, "gpus": gpus}), name=NAME)
        announce_address(host, port, config.serve)
        say(f"serving {config.model}: {replicas} replicas; ready in {perf_counter() - started:.1f} s")
        stopped.wait()
        serve.delete(NAME)
    finally:
        serve.shutdown()
        ray.shutdown()
    say("stopped")
