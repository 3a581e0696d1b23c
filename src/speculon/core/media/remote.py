"""Fetches a file from a public address, within limits of time and size, and along at most three redirects.

A client names the URL, so it could name one inside the server's own network. Each host is resolved once. Each
of its addresses must be public, and the connection goes to one of these, so that another answer of the
resolver changes nothing. Proxies of the environment are not used.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from time import monotonic
from typing import NamedTuple
from urllib.parse import SplitResult, urljoin, urlsplit

REDIRECTS = 3
REDIRECTED = (301, 302, 303, 307, 308)
PIECE = 2**16
HEADERS = {
    "User-Agent": "speculon",
    "Accept": "image/*",
    "Accept-Encoding": "identity",
    "Connection": "close",
}
# IPv6 addresses that stand for IPv4 ones: behind a translator, whose DNS makes them of public ones, too; and
# in tunnels
NAT64 = IPv6Network("64:ff9b::/96")
TUNNELS = tuple(map(IPv6Network, ("2002::/16", "2001::/32", "64:ff9b:1::/48")))


class NotFetched(Exception):
    """Why there is no answer, for the client."""


class Remote(NamedTuple):
    """What may be fetched."""

    hosts: tuple[str, ...] = ()  # names, or with a dot before it a domain and all below it; empty: any
    seconds: float = 10.0  # for all redirects together
    bytes: int = 20_000_000


def fetch(url: str, limits: Remote) -> bytes:
    """The body of the answer. Raises `NotFetched` where there is none."""
    deadline, base = monotonic() + limits.seconds, ""
    for _ in range(REDIRECTS + 1):
        parts = read_url(base, url, limits)
        base = parts.geturl()
        try:
            answer = ask(parts, limits, deadline)
        except (OSError, http.client.HTTPException) as error:
            if monotonic() >= deadline:
                raise NotFetched(f"did not arrive within {limits.seconds:g} s") from None
            raise NotFetched(f"could not be fetched: {type(error).__name__}") from None
        if isinstance(answer, bytes):
            return answer
        url = answer
    raise NotFetched(f"leads to more than {REDIRECTS} redirects")


def read_url(base: str, url: str, limits: Remote) -> SplitResult:
    """Where a URL leads, seen from the one before it."""
    try:
        parts = urlsplit(urljoin(base, url))
        port, host = parts.port, parts.hostname
    except ValueError:
        raise NotFetched("is not a URL") from None
    if parts.scheme not in ("http", "https"):
        raise NotFetched("has another scheme: only https and http are fetched")
    if not host or port == 0 or any(char <= " " or char == "\x7f" for char in url):
        raise NotFetched("is not a URL with a host")
    if parts.username is not None or parts.password is not None:
        raise NotFetched("must not have a user name or password")
    if limits.hosts and not any(fits(host.lower(), allowed.lower()) for allowed in limits.hosts):
        raise NotFetched("its host is not among remote_image_hosts")
    return parts


def fits(host: str, allowed: str) -> bool:
    return host == allowed.removeprefix(".") or (allowed.startswith(".") and host.endswith(allowed))


def ask(parts: SplitResult, limits: Remote, deadline: float) -> bytes | str:
    """One request: the body, or where a redirect leads."""
    secure, host = parts.scheme == "https", str(parts.hostname)
    port = parts.port or (443 if secure else 80)
    connect_by = http.client.HTTPSConnection if secure else http.client.HTTPConnection
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(connect_by(host, port)) as connection:
        link = connect(public_addresses(host, port), port, deadline)
        connection.sock = tls(link, host) if secure else link
        with cut_at(deadline, connection.sock):
            if isinstance(connection.sock, ssl.SSLSocket):
                connection.sock.do_handshake()
            try:
                connection.request("GET", target, headers=HEADERS)
            except UnicodeError:
                raise NotFetched("is not a URL: it has characters beyond ASCII") from None
            with closing(connection.getresponse()) as response:
                return read_answer(response, limits, deadline)


@contextmanager
def cut_at(deadline: float, link: socket.socket) -> Iterator[None]:
    """Ends a connection at the deadline: a server that sends a byte now and then would hold the thread."""

    def abandon() -> None:
        with suppress(OSError):
            socket.socket.shutdown(link, socket.SHUT_RDWR)  # of TLS, too, without its own farewell

    watch = threading.Timer(max(0.0, deadline - monotonic()), abandon)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


def read_answer(response: http.client.HTTPResponse, limits: Remote, deadline: float) -> bytes | str:
    if response.status in REDIRECTED and (location := response.getheader("location")):
        return location
    if response.status != 200:
        raise NotFetched(f"its host answered with status {response.status}")
    if (response.getheader("content-encoding") or "identity").lower() != "identity":
        raise NotFetched("its host sends it compressed, which is not supported")
    body = bytearray()
    if (response.length or 0) <= limits.bytes:
        while len(body) <= limits.bytes and (piece := response.read1(PIECE)):
            body += piece
        if monotonic() >= deadline:
            raise TimeoutError
    if (response.length or 0) + len(body) > limits.bytes:
        raise NotFetched(f"is larger than max_image_mb = {limits.bytes / 1e6:g} MB")
    if response.length:
        raise http.client.IncompleteRead(b"", response.length)
    return bytes(body)


def public_addresses(host: str, port: int) -> list[str]:
    """The addresses of a host, all of them public."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise NotFetched("its host name cannot be resolved") from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not addresses or not all(map(is_public, addresses)):
        raise NotFetched("its host has an address that is not public")
    return addresses


def is_public(text: str) -> bool:
    try:
        address: IPv4Address | IPv6Address = ip_address(text.partition("%")[0])
    except ValueError:
        return False
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None or address in NAT64:
            address = IPv4Address(int(address) % 2**32)
        elif any(address in network for network in TUNNELS):
            return False
    local = getattr(address, "is_site_local", False)  # of IPv6, which counts as global
    return address.is_global and not (address.is_multicast or address.is_reserved or local)


def connect(addresses: list[str], port: int, deadline: float) -> socket.socket:
    """A connection to the first that takes one."""
    failed: OSError = TimeoutError()
    for address in addresses:
        if (left := deadline - monotonic()) <= 0:
            break
        try:
            return socket.create_connection((address, port), timeout=left)
        except OSError as error:
            failed = error
    raise failed


def tls(link: socket.socket, host: str) -> ssl.SSLSocket:
    context = ssl.create_default_context()
    return context.wrap_socket(link, server_hostname=host, do_handshake_on_connect=False)
