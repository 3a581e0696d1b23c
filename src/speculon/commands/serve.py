"""`speculon serve`: the server in this process, its engine in another."""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import sys
from time import perf_counter

from speculon import __version__
from speculon.commands.options import Given, engine_settings
from speculon.commands.screen import errors
from speculon.config import EngineConfig
from speculon.errors import ConfigError, SpeculonError
from speculon.proposers.registry import check_method

LAST_WORDS = 2  # seconds to read them, for clients whose texts were ended at the drain timeout


def run(given: Given, speculative_config: str | None) -> None:
    """Serves until TERM or Ctrl-C: what runs is finished, what comes is refused, the exit status is 0."""
    began = perf_counter()
    settings = engine_settings(given, speculative_config)
    config = EngineConfig(**settings)
    check_method(config.speculation.method)
    listener = listen(config.serve.host, config.serve.port)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    import uvicorn

    from speculon.server.app import create_app
    from speculon.server.app_state import Server

    server = Server(settings, on_stage=lambda stage: say(f"loading {config.model}: {stage}"))
    options = uvicorn.Config(
        create_app(server, __version__),
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=math.ceil(config.serve.drain_timeout) + LAST_WORDS,
    )

    class Http(uvicorn.Server):
        async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
            server.drain()
            await super().shutdown(sockets)

    http = Http(options)
    if config.serve.capture is not None:
        whose = f"{len(config.serve.capture_key)} API keys" if config.serve.capture_key else "every API key"
        folder = config.serve.capture.absolute()
        say(
            f"captures what clients of {whose} ask and get in {folder}, {config.serve.capture_gb:g} GB at most"
        )

    async def attend() -> SpeculonError | None:
        """Serves to the end; the engine's fault where that was the end."""
        serving = asyncio.create_task(http.serve(sockets=[listener]))
        gone = asyncio.create_task(server.engine.gone.wait())
        ready = asyncio.create_task(announce())
        await asyncio.wait({serving, gone}, return_when=asyncio.FIRST_COMPLETED)
        fault = None if server.draining else server.engine.error
        http.should_exit = True
        await serving
        gone.cancel()
        ready.cancel()
        return fault

    async def announce() -> None:
        await server.loaded.wait()
        facts, ms = server.facts, (perf_counter() - began) * 1e3
        pool = f"{facts.pages} pages of {facts.page_tokens} tokens"
        say(
            f"serving {server.name}: context {facts.max_context}, {pool}, drafts by {facts.method}; ready in {ms / 1e3:.1f} s"
        )

    host, port = listener.getsockname()[:2]
    say(f"speculon {__version__} listens on http://{f'[{host}]' if ':' in host else host}:{port}")
    # uvicorn takes them over, ends in order, and raises them once more
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=options.get_loop_factory()) as runner:  # uvloop where there is one
        if fault := runner.run(attend()):
            raise fault


def listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None


def say(text: str) -> None:
    errors().print(text, style="dim", markup=False)
