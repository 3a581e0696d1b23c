"""Compressed bodies (`content-encoding`), decoded as they arrive and never beyond a number of bytes.

Without limits a body of 4 MB would decode to 4 GB, and one of empty gzip members would decode for minutes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from speculon.core.logs import name_for_log

KNOWN = ("gzip", "x-gzip", "deflate")
NAMES = "gzip or deflate"
MAX_ENCODINGS = 2  # encodings applied on top of each other
MAX_MEMBERS = 16  # gzip streams in a row within one body
GZIP, ZLIB, RAW = 31, 15, -15  # zlib's names of formats, by the window's bits


class UnknownEncoding(Exception):
    """No body is decoded from it; the message is for the client."""


class DamagedBody(Exception):
    """It is not encoded as its header says; the message is for the client."""


class Encoding:
    """One encoding of a body, undone."""

    def __init__(self, name: str):
        self._gzip, self._name = name != "deflate", name
        self._inflate: zlib._Decompress | None = None  # of the stream that has begun and not ended
        self._members = 0

    def decode(self, data: bytes, most: int) -> bytes:
        """What these bytes add, at most `most` bytes. What is beyond them is lost."""
        decoded = bytearray()
        while data and len(decoded) < most:
            if self._inflate is None:
                self._inflate = self._begin(data)
            try:
                decoded += self._inflate.decompress(data, most - len(decoded))
            except zlib.error as error:
                raise self._damaged(str(error).rpartition(": ")[2]) from None
            ended, data = self._inflate.eof, self._inflate.unused_data
            if ended:
                self._inflate = None
        return bytes(decoded)

    def end(self) -> None:
        if self._inflate is not None:
            raise self._damaged("it ends early")

    def _begin(self, data: bytes) -> zlib._Decompress:
        self._members += 1
        if self._members > (MAX_MEMBERS if self._gzip else 1):
            raise self._damaged("there is more after its end")
        # "deflate" means zlib's format, and some clients send it without header: their first bits differ
        return zlib.decompressobj(GZIP if self._gzip else ZLIB if data[0] & 0xF == 8 else RAW)

    def _damaged(self, why: str) -> DamagedBody:
        return DamagedBody(f"content-encoding is {self._name}, but the body cannot be decoded as such: {why}")


class Encodings:
    """All encodings of a body; without any, it stays as it is."""

    def __init__(self, headers: Iterable[str]):
        """From the values of `content-encoding`. Raises `UnknownEncoding`."""
        names = [name.strip().lower() for header in headers for name in header.split(",")]
        names = [name for name in names if name not in ("", "identity")]
        if unknown := [name for name in names if name not in KNOWN]:
            shown = name_for_log(unknown[0])
            raise UnknownEncoding(f"content-encoding {shown}: send the body as it is, or as {NAMES}")
        if len(names) > MAX_ENCODINGS:
            raise UnknownEncoding(
                f"content-encoding has {len(names)} encodings, and may have at most {MAX_ENCODINGS}"
            )
        self._last_first = [Encoding(name) for name in reversed(names)]

    def decode(self, data: bytes, most: int) -> bytes:
        """What these bytes of the body add, at most `most` bytes where they are encoded."""
        for encoding in self._last_first:
            data = encoding.decode(data, most)
        return data

    def end(self) -> None:
        """Raises `DamagedBody` where the body ended within an encoding."""
        for encoding in self._last_first:
            encoding.end()
