"""Files of images, also bad ones, and a server that hands them out and counts who asks."""

from __future__ import annotations

import base64
import io
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from PIL import Image

RED, BLUE = (200, 30, 40), (20, 60, 220)


def pixels(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """An image without two equal rows."""
    data = bytes((i * 7 + i // 5 + 31 * seed) % 256 for i in range(3 * width * height))
    return Image.frombytes("RGB", (width, height), data)


def file_of(image: Image.Image, form: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def data_url(data: bytes, media: str = "image/png") -> str:
    return f"data:{media};base64," + base64.b64encode(data).decode()


def png(width: int, height: int, rows: bytes) -> bytes:
    """A PNG of 1 bit a pixel that says it has this size, with these compressed rows."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def only_a_header(width: int = 10_000, height: int = 10_000) -> bytes:
    """100 megapixels, by its header."""
    return png(width, height, zlib.compress(b""))


def bomb(side: int = 12_000) -> bytes:
    """A whole image of `side` squared pixels in a few kilobytes."""
    packer = zlib.compressobj(9)
    row = b"\0" * (1 + side // 8)
    return png(side, side, b"".join(packer.compress(row * 500) for _ in range(side // 500)) + packer.flush())


def animated(form: str) -> bytes:
    frames = [pixels(seed=1), pixels(seed=2)]
    return file_of(frames[0], form, save_all=True, append_images=frames[1:], duration=50)


Answer = tuple[int, dict[str, str], bytes]


@contextmanager
def handing_out(answers: dict[str, Answer | Callable[[Any], None]]) -> Iterator[tuple[int, list[str]]]:
    """A local server with these answers by path: its port, and the paths of its requests."""
    paths: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            paths.append(self.path)
            answer = answers.get(self.path, (404, {}, b""))
            if callable(answer):
                return answer(self)
            status, headers, body = answer
            self.send_response(status)
            for name, value in ({"content-length": str(len(body))} | headers).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """It writes no lines."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], paths
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
