"""Images as they come, within limits: from a data URL, a remote one, bytes, a file or Pillow; as RGB pixels.

Nothing is decoded before the size in its header is within the limit. Pillow is imported with the first image.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import warnings
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote_to_bytes

from speculon.core.errors import InvalidParameter
from speculon.core.media.remote import NotFetched, Remote, fetch

if TYPE_CHECKING:
    from PIL.Image import Image

    from speculon.core.config import ServeConfig

FEATURE = "images"  # in the capability table
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow's names
KNOWN = "PNG, JPEG, WebP, GIF or BMP"
BLANKS = b" \t\r\n\v\f"
URL_SAFE = bytes.maketrans(b"-_", b"+/")  # the other alphabet of base64
JPEG, JPEG_SCAN = b"\xff\xd8", b"\xff\xda"
MAX_SCANS = 100  # each takes as long as the whole image, and may have 42 bytes; files of cameras have 1 to 10
SHOWN = 60  # characters of a URL that a refusal shows
MB = 1_000_000
OPENING = Lock()  # filters of warnings are those of all threads


class ImageLimits(NamedTuple):
    """What an image may be, and whence it may come."""

    images: int  # of a request
    bytes: int  # of a file
    pixels: int
    remote: Remote | None = None  # None: nothing is fetched
    files: bool = True  # whether paths, bytes and images of Pillow are taken, which no client sends

    @classmethod
    def of(cls, config: ServeConfig, *, files: bool = True) -> ImageLimits:
        largest = int(config.max_image_mb * MB)
        remote = None
        if config.remote_images:
            remote = Remote(config.remote_image_hosts, config.remote_image_timeout, largest)
        pixels = int(config.max_image_megapixels * MB)
        return cls(config.max_images, largest, pixels, remote, files)


class Picture(NamedTuple):
    """A decoded image."""

    image: Image  # RGB, upright
    digest: str  # of its size and pixels


def read_image(source: Any, name: str, limits: ImageLimits) -> Picture:
    """Decodes one image. `name` is the field that a refusal names.

    Raises `InvalidParameter` for what is no image, or beyond a limit.
    """
    pillow = load_pillow(name)
    if isinstance(source, str):
        return decode(read_url(source, name, limits), name, limits, shown_url(source))
    if limits.files and isinstance(source, Path):
        return decode(read_file(source, name, limits), name, limits, str(source))
    if limits.files and isinstance(source, bytes | bytearray | memoryview):
        return decode(bytes(source), name, limits, f"{len(source)} bytes")
    if limits.files and isinstance(source, pillow.Image):
        check_pixels(source, name, limits, f"{source.width} x {source.height} pixels")
        return picture(source, name, "an image of Pillow")
    taken = "a URL, a path, bytes or an image of Pillow" if limits.files else "a URL"
    raise refusal(name, type(source).__name__, f"must be {taken}")


def check_count(count: int, name: str, limits: ImageLimits) -> None:
    if count > limits.images:
        raise refusal(name, f"{count} images", f"a request may have at most {limits.images}")


def read_url(url: str, name: str, limits: ImageLimits) -> bytes:
    scheme = url[:8].lower()
    if scheme.startswith("data:"):
        return read_data_url(url, name, limits)
    if not scheme.startswith(("http://", "https://")):
        what = "must begin with data:, https: or http:, or be the base64 of an image"
        return from_base64(url, url, name, limits, what)
    if limits.remote is None:
        why = "images are not fetched: send a data URL, or set remote_images"
        raise refusal(name, shown_url(url), why)
    try:
        data = fetch(url, limits.remote)
    except NotFetched as error:
        raise refusal(name, shown_url(url), str(error)) from error
    return data


def read_data_url(url: str, name: str, limits: ImageLimits) -> bytes:
    """The bytes of `data:...;base64,...`, whatever type it says: the bytes tell that."""
    head, comma, text = url.partition(",")
    if not comma or "base64" not in (option.strip() for option in head.lower().split(";")):
        raise refusal(name, shown_url(url), "a data URL must have `;base64,` before its data")
    return from_base64(text, url, name, limits, "must be base64")


def from_base64(text: str, url: str, name: str, limits: ImageLimits, fault: str) -> bytes:
    """The bytes of base64 in either alphabet, with or without padding; white space and escapes of URLs are
    allowed. `url` is what was sent, `fault` how a refusal begins.
    """
    try:
        data = text.encode("ascii")
        data = (unquote_to_bytes(data) if b"%" in data else data).translate(URL_SAFE, BLANKS).rstrip(b"=")
        check_bytes(len(data) * 3 // 4, name, limits, shown_url(url))
        return base64.b64decode(data + b"=" * (-len(data) % 4), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise refusal(name, shown_url(url), f"{fault}: {error}") from None


def read_file(path: Path, name: str, limits: ImageLimits) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limits.bytes + 1)
    except OSError as error:
        raise refusal(name, str(path), f"cannot be read: {error.strerror or error}") from None
    return data


def decode(data: bytes, name: str, limits: ImageLimits, shown: str) -> Picture:
    """The image in a file's bytes. Its header is checked first."""
    from PIL import Image

    check_bytes(len(data), name, limits, shown)
    if data[:2] == JPEG and (scans := data.count(JPEG_SCAN)) > MAX_SCANS:
        raise refusal(name, shown, f"a JPEG may have at most {MAX_SCANS} scans, and this one has {scans}")
    try:
        with OPENING, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Pillow's own limit of pixels
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError:
        limit = f"may have at most {limits.pixels / MB:g} megapixels, and has more than Pillow opens"
        raise refusal(name, shown, limit) from None
    except Exception:  # Pillow's readers raise errors of any class
        raise refusal(name, shown, f"cannot be read as an image: it must be {KNOWN}") from None
    check_pixels(image, name, limits, shown)
    # MPO: the JPEG of a camera with a preview behind it
    if image.format != "MPO" and getattr(image, "is_animated", False):
        raise refusal(name, shown, "is an animated image: send a single frame")
    return picture(image, name, shown)


def picture(image: Image, name: str, shown: str) -> Picture:
    """Upright RGB pixels, transparent ones over white."""
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits, of which `convert` would cut off the upper ones
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
        image = image.convert("RGB")
    except Exception as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refusal(name, shown, f"its pixels cannot be decoded: {why}") from None
    size = f"{image.width} {image.height} ".encode()
    return Picture(image, hashlib.sha256(size + image.tobytes()).hexdigest())


def check_bytes(size: int, name: str, limits: ImageLimits, shown: str) -> None:
    if size > limits.bytes:
        raise refusal(name, shown, f"must not be larger than max_image_mb = {limits.bytes / MB:g} MB")


def check_pixels(image: Image, name: str, limits: ImageLimits, shown: str) -> None:
    width, height = image.size
    if width * height > limits.pixels:
        most = f"max_image_megapixels = {limits.pixels / MB:g}"
        raise refusal(name, shown, f"has {width} x {height} pixels, more than {most}")
    if not width or not height:
        raise refusal(name, shown, f"has {width} x {height} pixels: both sides must be at least 1")


def refusal(name: str, value: Any, limit: str) -> InvalidParameter:
    return InvalidParameter(name, value, limit).about(FEATURE)


def shown_url(url: str) -> str:
    return url if len(url) <= SHOWN else url[:SHOWN] + "..."


def load_pillow(name: str) -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise refusal(
            name, "an image", "images need Pillow, which is not installed: pip install 'speculon[images]'"
        ) from None
    return Image
