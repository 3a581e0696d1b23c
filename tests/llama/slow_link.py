"""A link between two machines, as far as its delay goes."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress


class SlowLink:
    """A port of this machine. What is sent there reaches another port `seconds` later, and so do answers."""

    def __init__(self, to: int, seconds: float):
        self._to, self._seconds, self._asked = to, seconds, False
        self.round_trips = 0  # answers that the client has waited for
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = "{}:{}".format(*self._listener.getsockname())
        self._threads = ThreadPoolExecutor()
        self._threads.submit(self._serve)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # which ends its wait for a client
        self._listener.close()

    def _serve(self) -> None:
        while True:
            self._threads.submit(self._connect, self._listener.accept()[0])

    def _connect(self, client: socket.socket) -> None:
        with client, socket.create_connection(("127.0.0.1", self._to)) as server:
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answers = self._threads.submit(self._forward, server, client, False)
            self._forward(client, server, True)
            answers.result()

    def _forward(self, source: socket.socket, sink: socket.socket, asks: bool) -> None:
        with ThreadPoolExecutor(1) as arrivals:
            with suppress(OSError):
                while data := source.recv(1 << 16):
                    self.round_trips += self._asked and not asks
                    self._asked = asks
                    arrivals.submit(send_at, time.monotonic() + self._seconds, sink, data)
            arrivals.submit(sink.shutdown, socket.SHUT_WR)


def send_at(due: float, sink: socket.socket, data: bytes) -> None:
    time.sleep(max(0.0, due - time.monotonic()))
    sink.sendall(data)
