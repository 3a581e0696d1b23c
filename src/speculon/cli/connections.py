"""Connections: how many there may be, in all and of each address, and how long they may be silent.

uvicorn limits the time between two requests, not the time for a header, and accepts without a limit.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import Counter
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol
from uvicorn.protocols.utils import get_remote_addr

from speculon.core.config.serve import ServeConfig

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

OWN_DESCRIPTORS = 64  # for pipes, files and sockets of the server itself
MOST_DESCRIPTORS = 65_536
SOCKET_BYTES = 1_000_000  # of one message; those of the dashboard have some hundred
WARNING_SECONDS = 60.0  # between two warnings of a kind
# guess: seconds from the end of what a client sends to the first look whether it still reads, which is late,
# because simple clients take an interim response for the answer; a quarter of it to the second; then doubled
FIRST_PROBE = 2.0
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = logging.getLogger("speculon.server")


def raise_descriptor_limit() -> None:
    """Allows this process as many descriptors as the system lets it have, up to `MOST_DESCRIPTORS`."""
    if resource is not None:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
        with suppress(ValueError, OSError):  # macOS allows less than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def descriptor_limit() -> int:
    if resource is None:
        return 512
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


class ConnectionLimits:
    """Counts the open connections, and refuses those beyond the limits."""

    def __init__(self, config: ServeConfig):
        self.header_timeout, self.keep_alive = config.header_timeout, config.keep_alive
        self._descriptors = descriptor_limit()
        self.most = self._descriptors - min(OWN_DESCRIPTORS, self._descriptors // 2)
        self.most_per_address = config.max_connections_per_address or max(1, self.most // 2)
        self._open: Counter[str] = Counter()
        self._warned: dict[str, float] = {}

    def enter(self, address: str) -> bool:
        """Counts a new connection; False where there is no room for it."""
        if self._open.total() >= self.most:
            self._warn_of_descriptors()
            return False
        if self._open[address] >= self.most_per_address:
            limit = (
                f"{self.most_per_address} open connections, the limit of serve.max_connections_per_address"
            )
            self._warn("address", f"{address} has {limit}, so further ones from this address are closed")
            return False
        self._open[address] += 1
        return True

    def leave(self, address: str) -> None:
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """One warning for all connections that cannot be accepted."""
        if getattr(context.get("exception"), "errno", None) in (errno.EMFILE, errno.ENFILE):
            self._warn_of_descriptors()
        else:
            loop.default_exception_handler(context)

    def _warn_of_descriptors(self) -> None:
        limit = f"{self._descriptors} file descriptors (ulimit -n)"
        self._warn(
            "all", f"{limit} allow {self.most} connections, and all are in use, so new ones are closed"
        )

    def _warn(self, kind: str, message: str) -> None:
        now = monotonic()
        if now - self._warned.get(kind, -WARNING_SECONDS) >= WARNING_SECONDS:
            self._warned[kind] = now
            log.warning(message)


class CountedProtocol(asyncio.Protocol):
    """What a protocol of uvicorn does beside: it enters the limits, or closes the connection."""

    limits: ConnectionLimits
    address: str | None = None  # while it is counted

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        address = (get_remote_addr(transport) or ("", 0))[0]
        if self.limits.enter(address):
            self.address = address
        else:
            transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self.leave()

    def leave(self) -> None:
        if self.address is not None:
            self.limits.leave(self.address)
            self.address = None


class LimitedProtocol(CountedProtocol):
    """It waits for no header for ever."""

    if TYPE_CHECKING:  # uvicorn's own
        cycle: Any
        scope: Any
        timeout_keep_alive: float
        transport: asyncio.Transport

    def __init__(self, limits: ConnectionLimits, **options: Any):
        super().__init__(**options)
        self.limits, self.timeout_keep_alive = limits, limits.keep_alive
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None  # of a client that sends nothing more
        self._upgraded = False  # a websocket's protocol has the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._upgraded:
            return self._stop_timer()
        if self.cycle is None or self.cycle.response_complete:
            self._await_header()
        else:
            self._stop_timer()

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._stop_timer()
        if self._probe is not None:
            self._probe.cancel()

    def eof_received(self) -> bool:
        """Whether the connection stays open, although its client sends nothing more: for the answer to a
        whole request. TCP does not tell whether the client still reads, or has closed the connection.
        """
        cycle = self.cycle
        if self._upgraded or cycle is None or cycle.response_complete or cycle.more_body:
            return False
        self._await_answer(FIRST_PROBE, FIRST_PROBE / 4)
        return True

    def on_response_complete(self) -> None:
        """Closes the connection after the last answer to a client that sends nothing more."""
        super().on_response_complete()  # type: ignore[misc]
        if self._probe is not None and self.cycle.response_complete:
            self.transport.close()

    def _await_answer(self, seconds: float, then: float) -> None:
        self._probe = asyncio.get_running_loop().call_later(seconds, self._look_for_client, then)

    def _look_for_client(self, then: float) -> None:
        """Writes an interim response, which HTTP/1.1 allows before the answer. A closed connection answers
        with a reset, so the next write fails, and the request ends. The chunks of a stream do the same.
        """
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        # while an earlier request of the connection is answered, this one waits in the pipeline
        if not self.cycle.response_started and not getattr(self, "pipeline", ()):
            if self.scope["http_version"] != "1.1":
                return self.transport.close()
            self.transport.write(CONTINUE)
        self._await_answer(then, 2 * then)

    def handle_websocket_upgrade(self) -> None:
        """The websocket's protocol enters the limits in the place of this one."""
        self._upgraded = True
        self.leave()
        super().handle_websocket_upgrade()  # type: ignore[misc]

    def _await_header(self) -> None:
        """From the connection, or the first byte after an answer, to the end of the header."""
        if self._timer is None and not self.transport.is_closing():
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self.limits.header_timeout, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class HttpProtocol(LimitedProtocol, AutoHTTPProtocol):  # type: ignore[misc,valid-type]
    """The fastest of uvicorn's protocols, with limits."""


def socket_protocol(connections: ConnectionLimits) -> type[asyncio.Protocol]:
    """uvicorn's websocket protocol, with limits. `websockets` comes with the extra `admin`."""
    from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

    class SocketProtocol(CountedProtocol, WebSocketsSansIOProtocol):
        limits = connections

    return SocketProtocol


class HttpServer(uvicorn.Server):
    """uvicorn as the server runs it."""

    def __init__(self, app: Any, config: ServeConfig, seconds_to_end: int):
        self.limits = ConnectionLimits(config)
        options: dict[str, Any] = {
            "http": partial(HttpProtocol, self.limits),
            "ws": socket_protocol(self.limits) if config.admin else "none",
            "ws_max_size": SOCKET_BYTES,
            "log_config": None,  # one handler and one format for all
            "log_level": "warning",
            "access_log": False,
            "server_header": False,
            # with the administration an address counts wrong keys, so a client must not choose it
            "proxy_headers": not config.admin,
            "timeout_graceful_shutdown": seconds_to_end,
        }
        super().__init__(uvicorn.Config(app, **options))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self.limits.on_loop_error)
        await super().startup(sockets)
