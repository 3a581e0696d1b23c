"""Compressed bodies over real sockets: decoded within the limit of a body, or refused by name."""

from __future__ import annotations

import gzip
import json
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx2 as httpx
import pytest

from speculon.server.encodings import MAX_MEMBERS, DamagedBody, Encodings
from tests.server.inside import Inside, served
from tests.server.test_abuse import refusal

BODY = json.dumps({"prompt": "say:yes", "metadata": {"filling": "x" * 5000}}).encode()
MB = 1_000_000


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served(max_body_mb=1.0, max_image_body_mb=2.0) as inside:
        yield inside


def raw_deflate(data: bytes) -> bytes:
    made = zlib.compressobj(wbits=-15)
    return made.compress(data) + made.flush()


def post(inside: Inside, content: Any, *encodings: str) -> httpx.Response:
    headers = [("content-type", "application/json"), *(("content-encoding", name) for name in encodings)]
    return inside.client.post("/v1/completions", content=content, headers=headers)


ENCODED: dict[str, tuple[Callable[[bytes], bytes], tuple[str, ...]]] = {
    "gzip": (gzip.compress, ("gzip",)),
    "an old name": (gzip.compress, ("x-gzip",)),
    "capitals and spaces": (gzip.compress, ("identity ,, GZip",)),
    "stored": (lambda data: gzip.compress(data, 0), ("gzip",)),
    "members": (
        lambda data: b"".join(gzip.compress(data[i : i + 999]) for i in range(0, 9999, 999)),
        ("gzip",),
    ),
    "zlib": (zlib.compress, ("deflate",)),
    "without a header": (raw_deflate, ("deflate",)),
    "identity": (bytes, ("identity",)),
    "identity and gzip": (gzip.compress, ("identity, gzip",)),
    "two": (lambda data: gzip.compress(zlib.compress(data)), ("deflate, gzip",)),
    "two headers": (lambda data: raw_deflate(gzip.compress(data)), ("gzip", "deflate")),
    "none": (bytes, ()),
}


@pytest.mark.parametrize("case", ENCODED)
def test_encoded_bodies_are_read(inside: Inside, case: str) -> None:
    encode, names = ENCODED[case]
    encoded = encode(BODY)
    for content in (encoded, (encoded[i : i + 1] for i in range(len(encoded)))):  # also in chunks of a byte
        answer = post(inside, content, *names)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"] == "yes", answer.text


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(gzip.compress(BODY)[:-9], id="cut"),
        pytest.param(gzip.compress(BODY)[:5], id="half a header"),
        pytest.param(BODY, id="plain"),
        pytest.param(zlib.compress(BODY), id="of another kind"),
        pytest.param(gzip.compress(BODY)[:-8] + bytes(8), id="another check sum"),
        pytest.param(gzip.compress(BODY) + b"more", id="more after it"),
        pytest.param(b"".join(gzip.compress(b" ") for _ in range(MAX_MEMBERS + 1)), id="too many members"),
    ],
)
def test_damaged_bodies_are_refused(inside: Inside, content: bytes) -> None:
    error = refusal(post(inside, content, "gzip"), 400)
    assert error["code"] == "damaged_body" and "content-encoding" in error["message"]
    assert inside.post("completions", prompt="say:yes").status_code == 200


def test_more_after_deflate_is_refused(inside: Inside) -> None:
    refusal(post(inside, zlib.compress(BODY) * 2, "deflate"), 400)


@pytest.mark.parametrize("names", [("br",), ("zstd",), ("gzip, br",), ("gzip, gzip, gzip",), ("x" * 99,)])
def test_other_encodings_are_named(inside: Inside, names: tuple[str, ...]) -> None:
    response = post(inside, gzip.compress(BODY), *names)
    error = refusal(response, 415)
    assert "content-encoding" in error["message"] and response.headers["accept-encoding"] == "gzip, deflate"
    assert "xxxx" not in error["message"]
    if "br" in names[0]:
        assert "content-encoding br" in error["message"]


@pytest.mark.parametrize(
    ("size", "names", "encode"),
    [
        pytest.param(300 * MB, ("gzip",), gzip.compress, id="gzip"),
        pytest.param(300 * MB, ("deflate",), zlib.compress, id="deflate"),
        pytest.param(300 * MB, ("gzip, gzip",), lambda data: gzip.compress(gzip.compress(data)), id="twice"),
        pytest.param(MB + 1, ("gzip",), gzip.compress, id="one byte too many"),
    ],
)
def test_a_bomb_is_cut_at_the_limit(
    inside: Inside, size: int, names: tuple[str, ...], encode: Callable[[bytes], bytes]
) -> None:
    bomb = encode(bytes(size))
    assert len(bomb) < MB
    tracemalloc.start()
    try:
        error = refusal(post(inside, bomb, *names), 413)
        assert tracemalloc.get_traced_memory()[1] < 12 * MB
    finally:
        tracemalloc.stop()
    assert error["code"] == "body_too_large"


def test_the_limit_is_that_of_the_decoded_body(inside: Inside) -> None:
    body = BODY + b" " * (MB - len(BODY))
    assert post(inside, gzip.compress(body), "gzip").status_code == 200
    refusal(post(inside, gzip.compress(body + b" "), "gzip"), 413)
    # empty members decode to nothing, so the bytes that arrive are limited, too
    refusal(post(inside, (gzip.compress(b"") for _ in range(2 * MB // 20 + 1)), "gzip"), 400)
    empty = b"\0\0\0\xff\xff" * 400_001  # blocks of no byte
    refusal(post(inside, (empty[i : i + 60_000] for i in range(0, len(empty), 60_000)), "deflate"), 413)


def test_images_may_exceed_the_limit_of_texts(inside: Inside) -> None:
    """Refused for its picture, not for its size."""
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * MB}}
    body = json.dumps({"messages": [{"role": "user", "content": [part]}]}).encode()
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    response = inside.client.post("/v1/chat/completions", content=gzip.compress(body), headers=headers)
    assert refusal(response, 400)["param"].startswith("messages")


def test_decoding_needs_no_more_than_it_may_return() -> None:
    encodings = Encodings(["gzip"])
    assert encodings.decode(gzip.compress(bytes(1000)), 10) == bytes(10)
    with pytest.raises(DamagedBody, match="ends early"):
        encodings.end()
