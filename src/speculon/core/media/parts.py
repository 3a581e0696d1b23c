"""Contents of messages with images in them: text with one character for each image."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Literal, NamedTuple, get_args

from speculon.core.errors import InvalidParameter
from speculon.core.media.files import FEATURE, refusal

IMAGE = "\U0010ffff"  # of an image in a text; no other text has it, since it is no character
TextPartType = Literal["text", "input_text", "output_text"]
ImagePart = Literal["image_url", "input_image", "image"]
OtherPart = Literal[
    "input_audio", "audio_url", "audio", "video_url", "input_video", "video", "input_file", "file"
]
AnswerPart = Literal["refusal", "thinking", "reasoning", "redacted_thinking"]  # of the assistant's messages
PartType = TextPartType | ImagePart | OtherPart | AnswerPart
TEXT_PARTS, IMAGE_PARTS, OTHER_PARTS, ANSWER_PARTS = map(
    get_args, (TextPartType, ImagePart, OtherPart, AnswerPart)
)


class ImageSource(NamedTuple):
    """An image as it was sent."""

    name: str  # of the field that has it
    image: Any


def read_messages(messages: Seq[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """Messages whose contents are texts, with `IMAGE` for each image, and the images in their order. Thinking
    in the parts of an answer becomes the `reasoning_content` of its message, and a `refusal` the content of
    one that has no other.

    Raises `InvalidParameter` by the name of the field, `messages.0.content.1.image_url` say.
    """
    read, sources = list[dict[str, Any]](), list[ImageSource]()
    if isinstance(messages, str | Mapping) or not isinstance(messages, Seq):
        raise InvalidParameter(
            "messages", messages, "must be a list of {'role': ..., 'content': ...}, not empty"
        )
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InvalidParameter(
                f"messages.{i}", message, "must be an object with a role, which is a string"
            )
        name, answer = f"messages.{i}.content", message.get("role") == "assistant"
        parts = message.get("content")
        if answer and not parts and isinstance(message.get("refusal"), str):
            parts = message["refusal"]
        content, found = read_content(parts, name, answer)
        thinking = {"reasoning_content": text} if (text := thinking_in(parts)) else {}
        known = "content" in message or parts
        read.append({**thinking, **message, "content": content} if known else dict(message))
        sources += found
    if sources and IMAGE * len(sources) != "".join(marks(message) for message in read):
        raise InvalidParameter("messages", IMAGE, "must not have U+10FFFF, which is not a character")
    return read, sources


def marks(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    return IMAGE * content.count(IMAGE) if isinstance(content, str) else ""


def read_content(content: Any, name: str, answer: bool = False) -> tuple[Any, list[ImageSource]]:
    """The text of a content, with `IMAGE` for each image, and these. `name` is its field, and `answer` says
    whether it may have the parts of an answer.

    Raises `InvalidParameter` for parts of other media, by their type.
    """
    if not isinstance(content, list | tuple):
        return content, []
    text, sources = "", list[ImageSource]()
    for i, part in enumerate(content):
        field = f"{name}.{i}"
        part_type = part.get("type") if isinstance(part, Mapping) else None
        if part_type in TEXT_PARTS:
            text += text_in(part.get("text"), f"{field}.text")
        elif part_type in IMAGE_PARTS:
            sources.append(image_of(part, field))
            text += IMAGE
        elif part_type in OTHER_PARTS:
            raise refusal(f"{field}.type", part_type, "this server reads only text and images")
        elif part_type in ANSWER_PARTS:
            if not answer:
                raise InvalidParameter(
                    f"{field}.type", part_type, "only messages of the assistant may have it"
                )
            text += text_in(part.get("refusal"), f"{field}.refusal") if part_type == "refusal" else ""
        else:
            raise InvalidParameter(f"{field}.type", part_type, "must be text or image_url")
    return text, sources


def text_in(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise InvalidParameter(name, value, "must be a string")
    return value


def thinking_in(content: Any) -> str:
    """The thinking among the parts of a content, as Anthropic, Mistral and LangChain write it. A redacted one
    is encrypted, so there is nothing to read.
    """
    texts = []
    for part in content if isinstance(content, list | tuple) else ():
        if isinstance(part, Mapping) and part.get("type") in ("thinking", "reasoning"):
            value = next((part[key] for key in ("thinking", "reasoning", "text") if part.get(key)), "")
            inner = value if isinstance(value, list | tuple) else [{"text": value}]
            texts += [str(one.get("text") or "") for one in inner if isinstance(one, Mapping)]
    return "".join(texts)


def image_of(part: Mapping[str, Any], field: str) -> ImageSource:
    """The URL of an image, also as a table, or what the part has as its `image`."""
    if part.get("file_id") is not None:
        raise refusal(f"{field}.file_id", part["file_id"], "this server stores no files: send image_url")
    for key in ("image_url", "image", "url"):
        if (value := part.get(key)) is not None:
            url = value.get("url") if isinstance(value, Mapping) else value
            if url is None:
                raise refusal(f"{field}.{key}.url", None, "is needed")
            return ImageSource(f"{field}.{key}", url)
    raise InvalidParameter(f"{field}.image_url", None, "is needed").about(FEATURE)


def with_parts(messages: Seq[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as templates take them where there are images: each content is a list of parts."""
    return [{**message, "content": parts_of(message.get("content") or "")} for message in messages]


def parts_of(content: str) -> list[dict[str, str]]:
    """Text and images of a content, in their order."""
    parts: list[dict[str, str]] = []
    for i, text in enumerate(content.split(IMAGE)):
        parts += [{"type": "image"}] * (i > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return parts
