"""Images from elsewhere: only when enabled, only from public addresses, within limits of time and size."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter
from speculon.core.media import remote
from speculon.core.media.files import ImageLimits, read_image
from speculon.core.media.remote import NotFetched, Remote, fetch, is_public
from tests.images import file_of, handing_out, pixels

PUBLIC, OTHER = "93.184.215.14", "1.1.1.1"
IMAGE = file_of(pixels())
HOSTS = {
    "images.test": [PUBLIC],
    "cdn.images.test": [OTHER],
    "both.test": [PUBLIC, "10.0.0.1"],
    "inside.test": ["10.0.0.1"],
    "v6.test": ["2606:4700:4700::1111"],
}


def drip(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.02)


def drip_headers(handler: Any) -> None:
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.02)


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 65536)


def to(location: str, status: int = 302) -> tuple[int, dict[str, str], bytes]:
    return status, {"location": location}, b""


ANSWERS: dict[str, Any] = {
    "/a.png": (200, {}, IMAGE),
    "/a.png?size=1": (200, {}, IMAGE),
    "/moved": to("/a.png", 301),
    "/elsewhere": to("http://cdn.images.test/a.png", 307),
    "/inside": to("http://inside.test/a.png"),
    "/loopback": to("http://127.0.0.1/a.png"),
    "/metadata": to("http://169.254.169.254/latest/meta-data/"),
    "/file": to("file:///etc/passwd"),
    "/around": to("/around"),
    "/drip": drip,
    "/drip-headers": drip_headers,
    "/endless": endless,
    "/large": (200, {}, b"x" * 5000),
    "/claims": (200, {"content-length": "99999999999"}, b"x"),
    "/short": (200, {"content-length": "3000"}, IMAGE),
    "/packed": (200, {"content-encoding": "gzip"}, IMAGE),
    "/nowhere": (302, {}, b""),
}


class Network:
    """What was asked of the resolver and of the server, and whereto connections went."""

    def __init__(self, port: int, paths: list[str]):
        self.port, self.paths = port, paths
        self.resolved: list[str] = []
        self.connected: list[str] = []

    def getaddrinfo(self, host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        self.resolved.append(host)
        if host not in HOSTS and host[0].isalpha():
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, port)) for address in HOSTS.get(host, [host])]

    def create_connection(self, address: tuple[str, int], timeout: float) -> socket.socket:
        self.connected.append(address[0])
        link = socket.socket()
        link.settimeout(timeout)
        link.connect(("127.0.0.1", self.port))
        return link


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Iterator[Network]:
    with handing_out(ANSWERS) as (port, paths):
        network = Network(port, paths)
        monkeypatch.setattr(remote.socket, "getaddrinfo", network.getaddrinfo)
        monkeypatch.setattr(remote.socket, "create_connection", network.create_connection)
        yield network


LIMITS = Remote((), 5.0, 4000)


def reason(url: str, limits: Remote = LIMITS) -> str:
    with pytest.raises(NotFetched) as caught:
        fetch(url, limits)
    return str(caught.value)


# what is fetched


@pytest.mark.parametrize(
    ("path", "hosts"),
    [
        ("/a.png", [PUBLIC]),
        ("/a.png?size=1", [PUBLIC]),
        ("/moved", [PUBLIC, PUBLIC]),
        ("/elsewhere", [PUBLIC, OTHER]),
    ],
)
def test_images_are_fetched_from_the_address_that_was_checked(
    network: Network, path: str, hosts: list[str]
) -> None:
    assert fetch("http://images.test" + path, LIMITS) == IMAGE
    assert network.connected == hosts and len(network.resolved) == len(hosts), "each host was resolved once"


def test_nothing_is_fetched_unless_it_is_enabled(network: Network) -> None:
    limits = ImageLimits.of(ServeConfig())
    with pytest.raises(InvalidParameter, match="images are not fetched"):
        read_image("http://images.test/a.png", "x", limits)
    assert network.paths == network.resolved == network.connected == []
    limits = ImageLimits.of(ServeConfig(remote_images=True))
    assert read_image("http://images.test/a.png", "x", limits).image.size == (24, 16)
    assert network.paths == ["/a.png"]
    with pytest.raises(InvalidParameter, match="http://images.test/no': its host answered with status 404"):
        read_image("http://images.test/no", "x", limits)


# addresses

PRIVATE = (
    "127.0.0.1 127.8.8.8 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 0.1.2.3 "
    "224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255 192.0.2.1 198.18.0.1 ::1 :: fe80::1 "
    "fe80::1%eth0 fc00::1 fec0::1 fd12::1 ff02::1 ff0e::1 ::ffff:127.0.0.1 ::ffff:10.0.0.1 2002:7f00:1::1 "
    "2001:0:7f00:1::1 64:ff9b::7f00:1 2001:db8::1 localhost"
).split()


def test_addresses_are_public_or_not() -> None:
    public = [PUBLIC, OTHER, "2606:4700:4700::1111", "::ffff:1.1.1.1", "64:ff9b::101:101"]
    assert [address for address in (*PRIVATE, *public) if is_public(address)] == public


def check_inside(network: Network, path: str) -> None:
    assert reason("http://images.test" + path) == "its host has an address that is not public"
    assert network.connected == [PUBLIC] and network.paths == [path], "the second host is never reached"


@pytest.mark.parametrize("path", ["/inside", "/loopback", "/metadata"])
def test_a_redirect_to_a_private_address_is_not_followed(network: Network, path: str) -> None:
    check_inside(network, path)


def test_addresses_that_are_not_checked_are_found_out(
    network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "is_public", lambda address: True)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_inside(network, "/inside")
    assert network.connected == [PUBLIC, "10.0.0.1"]


@pytest.mark.parametrize(
    "url",
    ["http://inside.test/", "http://both.test/", "http://127.0.0.1:9/", "http://[::1]/", "https://10.0.0.1/"],
)
def test_a_private_address_is_not_asked(network: Network, url: str) -> None:
    assert reason(url) == "its host has an address that is not public"
    assert network.connected == network.paths == []


def test_the_resolver_is_asked_once(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second answer, which may be another one, would have no effect."""
    answers = [[(0, 0, 0, "", (PUBLIC, 80))], [(0, 0, 0, "", ("127.0.0.1", 80))]]
    monkeypatch.setattr(remote.socket, "getaddrinfo", lambda *_, **__: answers.pop(0))
    assert fetch("http://images.test/a.png", LIMITS) == IMAGE
    assert network.connected == [PUBLIC] and len(answers) == 1


# other limits


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://images.test/around", "leads to more than 3 redirects"),
        ("http://images.test/file", "has another scheme: only https and http are fetched"),
        ("http://images.test/no", "its host answered with status 404"),
        ("http://images.test/nowhere", "its host answered with status 302"),
        ("http://images.test/large", "is larger than max_image_mb = 0.004 MB"),
        ("http://images.test/claims", "is larger than max_image_mb = 0.004 MB"),
        ("http://images.test/endless", "is larger than max_image_mb = 0.004 MB"),
        ("http://images.test/packed", "its host sends it compressed, which is not supported"),
        ("http://images.test/short", "could not be fetched: IncompleteRead"),
        ("http://nobody.invalid/", "its host name cannot be resolved"),
        ("http://user:secret@images.test/a.png", "must not have a user name or password"),
        ("http://images.test/\u00e4", "is not a URL: it has characters beyond ASCII"),
    ],
)
def test_what_is_refused(network: Network, url: str, expected: str) -> None:
    assert reason(url) == expected
    assert len(network.paths) <= 4


def test_what_is_no_url_is_not_asked(network: Network) -> None:
    for url in ("http://images.test:99999/", "http://[::1/"):
        assert reason(url) == "is not a URL"
    for url in (":0/", "/a b", "/\r\nX: y"):
        assert reason(f"http://images.test{url}") == "is not a URL with a host"
    assert reason("http:///a.png") == "is not a URL with a host"
    assert network.resolved == []


@pytest.mark.parametrize("path", ["/drip", "/drip-headers"])
def test_a_slow_host_is_cut_off(network: Network, path: str) -> None:
    began = time.monotonic()
    assert reason("http://images.test" + path, Remote((), 0.3, 4000)) == "did not arrive within 0.3 s"
    assert time.monotonic() - began < 2


def test_tls_is_asked_of_the_same_address(network: Network) -> None:
    """The local server speaks none: the handshake fails, and nothing is asked in the clear."""
    assert reason("https://images.test/a.png").startswith("could not be fetched: SSL")
    assert network.connected == [PUBLIC] and network.paths == []


@pytest.mark.parametrize(
    ("hosts", "url", "fetched"),
    [
        (("images.test",), "http://images.test/a.png", True),
        (("Images.test",), "http://IMAGES.test/a.png", True),
        (("images.test",), "http://cdn.images.test/a.png", False),
        ((".images.test",), "http://cdn.images.test/a.png", True),
        ((".images.test",), "http://images.test/a.png", True),
        (("images.test",), "http://images.test/elsewhere", False),
        ((".test",), "http://images.test.evil.org/a.png", False),
        (("ages.test",), "http://images.test/a.png", False),
    ],
)
def test_only_hosts_of_the_list_are_asked(
    network: Network, hosts: tuple[str, ...], url: str, fetched: bool
) -> None:
    limits = Remote(hosts, 5.0, 4000)
    if fetched:
        assert fetch(url, limits) == IMAGE
    else:
        assert reason(url, limits) == "its host is not among remote_image_hosts"
