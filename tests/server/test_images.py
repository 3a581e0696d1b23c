"""Images over HTTP: what reaches the engine, what is refused before it, and that the server lives on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import openai
import pytest

from speculon.core.config import EngineConfig
from speculon.core.media import remote
from speculon.core.media.files import ImageLimits, read_image
from speculon.core.media.prompts import Images, Processor
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.server import middleware
from speculon.server.pool.catalogue import Catalogue
from tests.images import bomb, data_url, file_of, handing_out, pixels
from tests.server.inside import Inside, ScriptedLoader, serving, wait_until
from tests.server.scripted import Bytes
from tests.server.test_abuse import refusal

MARK, ROW = "\x01", 1  # the placeholder of an image, and its token
A, B = pixels(40, 60, 1), pixels(30, 30, 2)
URL, OTHER = data_url(file_of(A)), data_url(file_of(B, "JPEG"), "image/jpeg")


class ImageBytes(Bytes):
    """A template that has parts."""

    def apply_chat_template(self, messages: list[dict[str, Any]], *known: Any, **more: Any) -> str:
        for message in messages:
            if isinstance(message["content"], list):
                parts = [MARK if part["type"] == "image" else part["text"] for part in message["content"]]
                message["content"] = "".join(parts)
        return super().apply_chat_template(messages, *known, **more)


class Squares:
    """A processor: a token for every 100 pixels of an image, and these as they are."""

    image_token, chat_template = MARK, None

    def __call__(self, images: list[Any], **options: Any) -> dict[str, Any]:
        text = MARK * (images[0].width * images[0].height // 100)
        return {
            "input_ids": np.array([list(text.encode())]),
            "text_replacement_offsets": [[{"replacement": text}]],
            "pixel_values": np.asarray(images[0], dtype=np.float32)[None],
        }


class ImageLoader(ScriptedLoader):
    def __init__(self, sees: bool = True):
        super().__init__()
        self.sees = sees

    def tokenizer(self, config: EngineConfig) -> Tokenizer:
        return Tokenizer(ImageBytes())

    def images(self, config: EngineConfig) -> Images:
        limits = ImageLimits.of(config.serve, files=False)
        return Images(lambda: Processor(Squares(), ROW), limits) if self.sees else Images.none()


@contextmanager
def seeing(sees: bool = True, **serve: Any) -> Iterator[Inside]:
    settings = {"model": "scripted", "serve": serve}
    with serving(Catalogue.of_one(settings), ImageLoader(sees)) as inside:
        yield inside


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with seeing(max_body_mb=1.0, max_image_body_mb=4.0, max_images=4) as inside:
        yield inside


@pytest.fixture
def client(inside: Inside) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=inside.url + "/v1", api_key="none", max_retries=0) as client:
        yield client


def image(url: Any = URL) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}], "temperature": 0, "max_tokens": 8}


def check_sent(inside: Inside, *expected: Any) -> None:
    """The latest request brought these images to the engine, as they are, at their placeholders."""
    images = inside.engine.images[-1]
    limits = ImageLimits.of(inside.state.config)
    assert [one.digest for one in images] == [read_image(image, "x", limits).digest for image in expected]
    for one, source in zip(images, expected, strict=True):
        given = np.asarray(source, dtype=np.float32)[None]
        assert np.array_equal(one.inputs["pixel_values"], given)
        assert len(one.rows) == source.width * source.height // 100
    rows = [row for one in images for row in one.rows]
    assert rows == sorted(rows)


# what reaches the engine


def test_the_official_client_sends_a_png(inside: Inside, client: openai.OpenAI) -> None:
    messages: Any = chat(text("What is "), image(), text(" say:red"))["messages"]
    answer = client.chat.completions.create(model="scripted", messages=messages)
    assert answer.choices[0].message.content == "red"
    assert answer.usage is not None and answer.usage.prompt_tokens == len("[user]What is  say:red") + 24
    check_sent(inside, A)
    stream = client.chat.completions.create(model="scripted", messages=messages, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == "red"
    check_sent(inside, A)


def test_two_images_and_a_text_between(inside: Inside) -> None:
    jpeg = read_image(OTHER, "x", ImageLimits.of(inside.state.config)).image
    body = chat(image(), text("beside"), image(OTHER), text("and"), image(), text("say:x"))
    assert inside.post("chat/completions", **body).status_code == 200
    check_sent(inside, A, jpeg, A)
    first, _, again = inside.engine.images[-1]
    assert first.rows[0] == len("[user]") and again.rows[0] == len("[user]beside" + "and") + 24 + 9


def test_images_in_the_wrong_place_are_found_out(inside: Inside) -> None:
    inside.post("chat/completions", **chat(image(), image(OTHER), text("say:x")))
    with pytest.raises(AssertionError):
        check_sent(inside, A)
    with pytest.raises(AssertionError):
        check_sent(inside, A, A)


def test_samples_share_the_images_of_their_request(inside: Inside) -> None:
    before = len(inside.engine.images)
    body = chat(image(), text("say:red")) | {"n": 3}
    answers = inside.post("chat/completions", **body).json()
    assert [choice["message"]["content"] for choice in answers["choices"]] == ["red"] * 3
    assert len(inside.engine.images) == before + 1, "they crossed the pipe once"


def test_responses_take_images(inside: Inside, client: openai.OpenAI) -> None:
    content: Any = [{"type": "input_text", "text": "What"}, {"type": "input_image", "image_url": URL}]
    content.append({"type": "input_text", "text": "say:red"})
    answer = client.responses.create(model="scripted", input=[{"role": "user", "content": content}])
    assert answer.output_text == "red"
    check_sent(inside, A)
    result = {"type": "function_call_output", "call_id": "1", "output": [content[1]]}
    call = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}
    body = {"input": [{"role": "user", "content": "see"}, call, result]}
    assert inside.post("responses", **body).status_code == 200
    check_sent(inside, A)


def test_tokens_of_images_are_counted(inside: Inside) -> None:
    body = {"messages": chat(image(), text("ab"))["messages"]}
    assert inside.client.post("/tokenize", json=body).json()["tokens"] == [*b"[user]", *[ROW] * 24, *b"ab"]


def test_tools_and_images_go_together(inside: Inside) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    body = chat(image(), text("say:red")) | {"tools": [tool]}
    assert inside.post("chat/completions", **body).status_code == 200
    check_sent(inside, A)


# what is refused


def ten_thousand() -> dict[str, Any]:
    content = [image("data:image/png;base64,AAAA")] * 1000
    return {"messages": [{"role": "user", "content": content}] * 10}


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "truncated": (chat(image(data_url(file_of(pixels(200, 200))[:600]))), "image_url", "cannot be decoded"),
    "a bomb": (chat(image(data_url(bomb()))), "image_url", "12000 x 12000 pixels"),
    "a file": (chat(image("file:///etc/passwd")), "image_url", "must begin with data:"),
    "remote": (chat(image("http://127.0.0.1:1/a.png")), "image_url", "images are not fetched"),
    "too many": (chat(*[image()] * 5), "messages", "a request may have at most 4"),
    "10,000": (ten_thousand(), "messages", "10000 images': a request may have at most 4"),
    "in one message": (chat(*[image("data:image/png;base64,AAAA")] * 2000), "messages.0.content", "1024"),
    "audio": (
        chat({"type": "input_audio", "input_audio": {}}),
        "type",
        "this server reads only text and images",
    ),
    "a stored file": (
        chat({"type": "input_image", "file_id": "f"}),
        "file_id",
        "this server stores no files",
    ),
    "no URL": (chat({"type": "image_url"}), "image_url", "is needed"),
    "a placeholder": (
        chat(image(), text("\x01")),
        "messages",
        "is 2 times in the text; it must be there once for each of 1 images",
    ),
    "beyond the context": (
        chat(image(data_url(file_of(pixels(900, 900))))),
        "",
        "> context 4096 tokens",
    ),
}


def check_refused(inside: Inside, case: str) -> None:
    body, param, message = BAD[case]
    before = len(inside.engine.images)
    error = refusal(inside.post("chat/completions", **body), 400)
    assert message in error["message"] and len(error["message"]) < 400, error
    assert (error["param"] or "").rpartition(".")[2] == param.rpartition(".")[2], error
    assert case in ("in one message", "no URL", "beyond the context") or error["feature"] == "images"
    assert len(inside.engine.images) == before, "nothing reached the engine"


@pytest.mark.parametrize("case", BAD)
def test_bad_images_are_refused_and_the_server_lives_on(inside: Inside, case: str) -> None:
    check_refused(inside, case)
    assert inside.post("chat/completions", **chat(image(), text("say:red"))).status_code == 200


def test_a_missing_check_is_found_out(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculon.core.media.prompts.check_count", lambda *_: None)
    with pytest.raises(AssertionError):
        check_refused(inside, "too many")


def test_refused_urls_are_not_logged(inside: Inside, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "speculon.server"):
        inside.post("chat/completions", **chat(image("https://secret.example/a.png")))
        wait_until(lambda: caplog.messages)
    assert "secret" not in caplog.text and "images are not fetched" in caplog.text


@pytest.mark.parametrize(
    ("content", "param"),
    [
        ([{"type": "input_image"}], "input.0.content.0.image_url"),
        ([{"type": "input_text", "text": "x"}, {"type": "input_audio"}], "input.0.content.1.type"),
        ([{"type": "input_image", "image_url": "x"}], "input.0.content.0.image_url"),
    ],
)
def test_bad_images_of_responses(inside: Inside, content: Any, param: str) -> None:
    body = {"input": [{"role": "user", "content": content}]}
    assert refusal(inside.post("responses", **body), 400)["param"] == param


def test_a_model_of_text_alone() -> None:
    with seeing(sees=False) as inside:
        error = refusal(inside.post("chat/completions", **chat(image(), text("say:x"))), 400)
        assert error["feature"] == "images" and error["param"] == "messages.0.content.0.image_url"
        assert "this model takes no images" in error["message"]
        answer = inside.post("chat/completions", **chat(text("say:"), text("red"))).json()
        assert answer["choices"][0]["message"]["content"] == "red"


# bodies


def large(images: int, words: int, escaped: bool = False) -> bytes:
    """A body of a message with so many bytes of images, and of text."""
    url = "data:image/png;base64," + "A" * images
    body = json.dumps(chat(image(url), text("x" * words)))
    return (body.replace("image/png", "image\\/png") if escaped else body).encode()


def post(inside: Inside, body: bytes) -> httpx.Response:
    return inside.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )


@pytest.mark.parametrize("escaped", [False, True])
def test_images_have_a_limit_of_their_own(inside: Inside, escaped: bool) -> None:
    assert refusal(post(inside, large(3_000_000, 900_000, escaped)), 400)["feature"] == "images"
    limits = "1 MB, or 4 MB with images in it"
    for images, words in ((4_000_000, 10), (10, 1_200_000), (1_000_000, 1_200_000)):
        error = refusal(post(inside, large(images, words, escaped)), 413)
        assert error["code"] == "body_too_large" and limits in error["message"]
    assert inside.post("chat/completions", **chat(image(), text("say:red"))).status_code == 200


def test_text_that_hides_behind_an_image_is_found_out(
    inside: Inside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(middleware, "without_images", lambda body, most: 0)
    assert post(inside, large(1_000_000, 1_200_000)).status_code == 400, "413 is expected"


@pytest.mark.parametrize(
    ("body", "rest"),
    [
        (b'{"a":"data:image/png;base64,AAAA","b":1}', 12),
        (b'{"a":"data:image/png;base64,AA\\/A","b":1}', 12),
        (b'{"a":"data:image\\/png;base64,AAAA","b":1}', 12),
        (b'{"a":"data:image/png;base64,AA\\u0041","b":1}', 44),
        (b'{"a":"data:image/png;base64,AAAA', 32),
        (b'["data:image/a;base64,A","data:;base64,A"]', 3),
        (b'["data:application/octet-stream;base64,AA\\r\\nA"]', 2),
        (b'["data: of a text that is no image"]', 36),
        (b'["data:image/png","x;base64,AAAA"]', 34),
        (b"", 0),
    ],
)
def test_bytes_outside_of_images(body: bytes, rest: int) -> None:
    assert middleware.without_images(body, 16) == rest


def test_only_so_many_images_are_taken_out() -> None:
    body = json.dumps(["data:image/png;base64,AAAA"] * 3).encode()
    assert len(body) - middleware.without_images(body, 2) == 2 * len('"data:image/png;base64,AAAA"')
    assert middleware.without_images(body, 0) == len(body)


def test_hostile_bodies_are_searched_quickly() -> None:
    for body in (
        b'"data:image/' * 300_000,
        b'"data:;base64,' * 300_000,
        b'"data:image/' + b"\\/" * 500_000,
        b'"data:image/' + b"\\" * 4_000_000,
    ):
        began = time.perf_counter()
        middleware.without_images(body, 16)
        assert time.perf_counter() - began < 0.5


# remote


def test_remote_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one holds no text; one of another host is not asked for."""
    held = threading.Event()

    def slow(handler: Any) -> None:
        held.wait(10)
        handler.send_response(200)
        handler.end_headers()
        handler.wfile.write(file_of(A))

    answers: dict[str, Any] = {"/a.png": (200, {}, file_of(A)), "/slow": slow}
    with (
        handing_out(answers) as (port, paths),
        seeing(remote_images=True, remote_image_hosts=["images.test"]) as inside,
    ):

        def connect(found: list[str], number: int, deadline: float) -> Any:
            return remote.socket.create_connection(("127.0.0.1", port), 5)

        monkeypatch.setattr(remote, "connect", connect)
        monkeypatch.setattr(remote, "public_addresses", lambda *_: ["93.184.215.14"])
        url = "http://images.test"
        assert (
            inside.post("chat/completions", **chat(image(url + "/a.png"), text("say:x"))).status_code == 200
        )
        check_sent(inside, A)
        error = refusal(inside.post("chat/completions", **chat(image("http://other.test/a.png"))), 400)
        assert "not among remote_image_hosts" in error["message"] and error["feature"] == "images"
        assert paths == ["/a.png"]
        answer: list[int] = []
        body = chat(image(url + "/slow"), text("say:x"))
        waiting = threading.Thread(
            target=lambda: answer.append(inside.post("chat/completions", **body).status_code)
        )
        waiting.start()
        wait_until(lambda: "/slow" in paths)
        assert inside.post("chat/completions", **chat(text("say:red"))).status_code == 200
        assert not answer, "a text does not wait for it"
        held.set()
        waiting.join(10)
        assert answer == [200]


# capture


def test_no_image_is_captured(tmp_path: Path) -> None:
    with seeing(capture=str(tmp_path / "captured")) as inside:
        body = chat(text("What is "), image(), text(" say:red"))
        assert inside.post("chat/completions", **body).status_code == 200
        assert inside.state.capture is not None
        inside.state.capture.writer.submit(lambda: None).result(10)
        (file,) = (tmp_path / "captured").rglob("*.jsonl")
        line = file.read_text()
        assert "base64" not in line and len(line) < 600
        message = json.loads(line)["messages"][0]
        assert message == {"role": "user", "content": "What is  say:red", "images": 1}
