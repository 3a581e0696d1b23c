"""Contents of messages with images in them: text with one character for each image."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from speculon.core.errors import InvalidParameter
from speculon.decoding.text.images import FEATURE, refusal

IMAGE = "\U0010ffff"  # stands for an image; no text has it, since it is no character
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image_url", "input_image", "image")
OTHER_MEDIA = ("input_audio", "audio_url", "audio", "video_url", "input_video", "video", "input_file", "file")


class Source(NamedTuple):
    """An image as it was sent."""

    name: str  # of the field that has it
    image: Any


def read_content(content: Any, name: str) -> tuple[str, list[Source]]:
    """The text of a content, with `IMAGE` for each image, and these. `name` is its field.

    Raises `InvalidParameter` for parts of other media, by their type.
    """
    if isinstance(content, str) or not isinstance(content, list | tuple):
        return content, []
    text, sources = "", list[Source]()
    for i, part in enumerate(content):
        field = f"{name}.{i}"
        if not isinstance(part, Mapping):
            raise InvalidParameter(field, part, "must be a part of a content, with a type")
        kind = part.get("type")
        if kind in TEXT_PARTS:
            text += read_text(part, field)
        elif kind in IMAGE_PARTS:
            sources.append(image_of(part, field))
            text += IMAGE
        elif kind in OTHER_MEDIA:
            raise refusal(f"{field}.type", kind, "only text and images are read")
        else:
            raise InvalidParameter(f"{field}.type", kind, "must be text or image_url")
    return text, sources


def read_text(part: Mapping[str, Any], field: str) -> str:
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidParameter(f"{field}.text", text, "must be a string")
    if IMAGE in text:
        raise InvalidParameter(f"{field}.text", IMAGE, "U+10FFFF is no character")
    return text


def image_of(part: Mapping[str, Any], field: str) -> Source:
    """The URL of an image, also as a table, or what the part has as its `image`."""
    if part.get("file_id") is not None:
        raise refusal(f"{field}.file_id", part["file_id"], "no files are stored: send image_url")
    for key in ("image_url", "image", "url"):
        if (value := part.get(key)) is not None:
            url = value.get("url") if isinstance(value, Mapping) else value
            if url is None:
                raise refusal(f"{field}.{key}.url", None, "is needed")
            return Source(f"{field}.{key}", url)
    raise InvalidParameter(f"{field}.image_url", None, "is needed").about(FEATURE)


def with_image_parts(messages: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them: where any has an image, each content is a list of parts."""
    if not any(IMAGE in (message.get("content") or "") for message in messages):
        return [dict(message) for message in messages]
    return [{**message, "content": parts_of(message.get("content") or "")} for message in messages]


def parts_of(content: str) -> list[dict[str, str]]:
    """Text and images of a content, in their order."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts
