"""Images as they come: what is decoded, what is refused before that, and by which name."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter
from speculon.core.media import files
from speculon.core.media.files import JPEG_SCAN, ImageLimits, check_count, read_image
from tests.images import BLUE, RED, animated, bomb, data_url, file_of, only_a_header, pixels

LIMITS = ImageLimits.of(ServeConfig())
CLIENT = ImageLimits.of(ServeConfig(), files=False)


def many_scans() -> bytes:
    """A progressive JPEG whose last scan is there again and again."""
    data = file_of(pixels(), "JPEG", progressive=True)
    scan = data[data.rindex(JPEG_SCAN) : -2]
    return data[:-2] + (101 - data.count(JPEG_SCAN)) * scan + data[-2:]


def refusal(source: Any, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidParameter) as caught:
        read_image(source, "messages.0.content.1.image_url", limits)
    assert caught.value.name == "messages.0.content.1.image_url" and caught.value.feature == "images"
    assert len(str(caught.value)) < 300, "a refusal shows the beginning of a URL alone"
    return caught.value.limit


@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_an_image_is_the_same_from_wherever_it_comes(form: str, tmp_path: Path) -> None:
    data = file_of(pixels(), form)
    path = tmp_path / "image"
    path.write_bytes(data)
    found = [read_image(source, "x", LIMITS) for source in (data, bytearray(data), path)]
    found += [read_image(data_url(data, media), "x", LIMITS) for media in ("image/png", "image/x; a=b")]
    with Image.open(path) as opened:
        found.append(read_image(opened, "x", LIMITS))
    assert len({one.digest for one in found}) == 1
    assert all((one.image.mode, one.image.size) == ("RGB", (24, 16)) for one in found)


def test_the_digest_is_of_pixels_and_size() -> None:
    image = pixels(24, 16)
    same = read_image(file_of(image, "BMP"), "x", LIMITS).digest
    assert read_image(file_of(image, "PNG"), "x", LIMITS).digest == same
    turned = Image.frombytes("RGB", (16, 24), image.tobytes())
    assert read_image(file_of(turned), "x", LIMITS).digest != same
    assert read_image(file_of(pixels(seed=1)), "x", LIMITS).digest != same


def test_blanks_within_base64_are_no_fault() -> None:
    url = data_url(file_of(pixels()))
    assert read_image(url[:60] + "\r\n" + url[60:] + "\n", "x", LIMITS).image.size == (24, 16)


@pytest.mark.parametrize("size", [23, 24, 25])  # of which two need padding
def test_base64_is_read_in_all_its_forms(size: int) -> None:
    data = file_of(pixels(size, 16))
    plain = base64.b64encode(data).decode()
    forms = {
        "no padding": plain.rstrip("="),
        "url-safe": base64.urlsafe_b64encode(data).decode(),
        "lines": base64.encodebytes(data).decode(),
        "indented": "\r\n\t " + " ".join(plain[i : i + 76] for i in range(0, len(plain), 76)) + "\n",
        "escaped": plain.replace("+", "%2B").replace("/", "%2f").replace("=", "%3D"),
        "as it is": plain,
    }
    heads = ["", "data:;base64,", "data:application/octet-stream;base64,", "DATA:image/jpg;Base64,"]
    heads += ["data:image/png;name=a.png;base64,", "data:text/plain;charset=utf-8;base64,"]
    expected = read_image(data, "x", LIMITS).digest
    for head in heads:
        for name, text in forms.items():
            assert read_image(head + text, "x", CLIENT).digest == expected, (head, name)


def test_the_limit_of_a_file_is_that_of_its_bytes() -> None:
    """Not of base64 in lines, which is longer."""
    data = file_of(pixels(200, 200), "BMP")
    exact = ImageLimits.of(ServeConfig(max_image_mb=len(data) / 1e6))
    less = ImageLimits.of(ServeConfig(max_image_mb=(len(data) - 1) / 1e6))
    for text in (base64.encodebytes(data).decode(), data_url(data), base64.b64encode(data).decode()):
        assert read_image(text, "x", exact).image.size == (200, 200)
        assert "larger than max_image_mb" in refusal(text, less)


# upright RGB


def corner(image: Image.Image, x: int = 0, y: int = 0) -> Any:
    return read_image(file_of(image), "x", LIMITS).image.getpixel((x, y))


def test_the_orientation_of_a_camera_is_applied() -> None:
    image = Image.new("RGB", (24, 16), RED)
    image.paste(BLUE, (0, 0, 4, 4))
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    found = read_image(file_of(image, "PNG", exif=exif), "x", LIMITS).image
    assert found.size == (16, 24) and found.getpixel((15, 0)) == BLUE and found.getpixel((0, 23)) == RED


def test_transparent_pixels_are_over_white() -> None:
    assert corner(Image.new("RGBA", (4, 4), (*RED, 0))) == (255, 255, 255)
    assert corner(Image.new("RGBA", (4, 4), (*RED, 255))) == RED
    assert corner(Image.new("LA", (4, 4), (10, 0))) == (255, 255, 255)


def test_grey_values_of_16_bits_are_scaled() -> None:
    assert corner(Image.new("I;16", (4, 4), 0x8040)) == (128, 128, 128)
    assert corner(Image.new("1", (4, 4), 1)) == (255, 255, 255)
    assert corner(Image.new("RGB", (4, 4), RED).convert("P", palette=Image.Palette.ADAPTIVE)) == RED


# refused


BAD: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "cannot be read as an image"),
    "text": (b"hello", "cannot be read as an image"),
    "svg": (b'<svg xmlns="http://www.w3.org/2000/svg" width="9" height="9"/>', "cannot be read as an image"),
    "pdf": (b"%PDF-1.7\n", "cannot be read as an image"),
    "tiff": (file_of(pixels(), "TIFF"), "cannot be read as an image"),
    "half a header": (file_of(pixels())[:20], "cannot be read as an image"),
    "a truncated png": (file_of(pixels(200, 200))[:600], "cannot be decoded"),
    "a truncated jpeg": (file_of(pixels(200, 200), "JPEG")[:2000], "cannot be decoded"),
    "a truncated webp": (file_of(pixels(200, 200), "WEBP")[:300], ""),
    "a truncated bmp": (file_of(pixels(200, 200), "BMP")[:300], "cannot be decoded"),
    "a jpeg of many scans": (many_scans(), "a JPEG may have at most 100 scans, and this one has 101"),
    "an animated gif": (animated("GIF"), "is an animated image: send a single frame"),
    "an animated png": (animated("PNG"), "is an animated image: send a single frame"),
    "an animated webp": (animated("WEBP"), "is an animated image: send a single frame"),
    "100 megapixels": (only_a_header(), "10000 x 10000 pixels, more than max_image_megapixels = 40"),
    "beyond what Pillow opens": (only_a_header(60_000, 60_000), "at most 40 megapixels"),
    "a bomb": (bomb(), "12000 x 12000 pixels, more than max_image_megapixels = 40"),
}


def check_refused(case: str) -> None:
    data, limit = BAD[case]
    assert limit in refusal(data)
    assert limit in refusal(data_url(data), CLIENT)


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused(case: str) -> None:
    check_refused(case)


@pytest.mark.parametrize("case", ["100 megapixels", "a bomb"])
def test_large_images_are_refused_by_their_header(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image.Image, "load", lambda image: pytest.fail("it was decoded"))
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda image: pytest.fail("it was decoded"))
    check_refused(case)


def test_a_missing_check_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "check_pixels", lambda *_: None)
    monkeypatch.setattr(files, "picture", lambda image, name, shown: files.Picture(image, ""))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_refused("a bomb")


def test_a_file_may_not_be_too_large(tmp_path: Path) -> None:
    small = ImageLimits.of(ServeConfig(max_image_mb=0.001))
    data = file_of(pixels(200, 200))
    path = tmp_path / "image.png"
    path.write_bytes(data)
    for source in (data, path, data_url(data)):
        assert refusal(source, small) == "must not be larger than max_image_mb = 0.001 MB"


def test_what_is_too_large_is_not_even_decoded_from_base64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.base64, "b64decode", lambda *_, **__: pytest.fail("it was decoded"))
    assert "max_image_mb" in refusal("data:image/png;base64," + "A" * 30_000_000)


@pytest.mark.parametrize(
    ("url", "limit"),
    [
        ("file:///etc/passwd", "must begin with data:"),
        ("photo.png", "must begin with data:"),
        ("", "cannot be read as an image"),
        ("aGVsbG8", "cannot be read as an image"),
        ("A", "must begin with data:"),
        ("https://example.org/a.png", "images are not fetched"),
        ("HTTP://127.0.0.1/a.png", "images are not fetched"),
        ("data:image/png;base64", "a data URL must have `;base64,`"),
        ("data:image/png,AAAA", "a data URL must have `;base64,`"),
        ("data:text/plain;base64,aGVsbG8=", "cannot be read as an image"),
        ("data:image/png;base64,AAA", "cannot be read as an image"),
        ("data:image/png;base64,AAAAA", "must be base64"),
        ("data:image/png;base64,AA=AA", "must be base64"),
        ("data:image/png;base64,%FF%FF", "must be base64"),
        ("data:image/png;base64,A*=!", "must be base64"),
        ("data:image/png;base64,\u00e4\u00e4\u00e4\u00e4", "must be base64"),
        ("data:image/png;base64,", "cannot be read as an image"),
    ],
)
def test_bad_urls_are_refused(url: str, limit: str) -> None:
    assert refusal(url).startswith(limit)


@pytest.mark.parametrize("source", [None, b"x", Path("/etc/passwd")], ids=repr)
def test_clients_name_no_files(source: Any) -> None:
    assert refusal(source, CLIENT) == "must be a URL"


def test_a_preview_behind_a_jpeg_is_no_animation() -> None:
    data = file_of(pixels(), "MPO", save_all=True, append_images=[pixels(8, 8)])
    assert read_image(data, "x", LIMITS).image.size == (24, 16)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "no.png").startswith("cannot be read: No such file")
    assert refusal(tmp_path).startswith("cannot be read: Is a directory")


def test_images_are_counted() -> None:
    check_count(16, "messages", LIMITS)
    with pytest.raises(InvalidParameter, match="messages = '10000 images': a request may have at most 16"):
        check_count(10_000, "messages", LIMITS)


def test_faults_of_a_reader_are_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr("PIL.ImageOps.exif_transpose", broken)
    assert refusal(file_of(pixels())) == "its pixels cannot be decoded: first line"
