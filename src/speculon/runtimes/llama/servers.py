"""RPC servers of llama.cpp, whose devices hold a part of the layers.

llama.cpp ends the process where a server does not answer, answers somebody else or has another version. So
each is greeted first, as the library would do it.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence as Seq
from typing import Any

from speculon.core.errors import ConfigError
from speculon.runtimes.llama.library import library

SECONDS = 3.0  # for an answer
HELLO = struct.pack("<BQ24x", 14, 24)  # a command, the size of its message, no capabilities
ANSWER = struct.Struct("<Q4B24x")  # its size, a version in three parts
VERSION = (7, 0)  # of the protocol in ggml-rpc.h of the pinned package
GPU, INTEGRATED = 1, 2  # types of devices
POINTER, SIZE, TEXT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p

# address -> the registry of its devices, which llama.cpp keeps for as long as the process lives
known: dict[tuple[str, int], int] = {}


def devices(endpoints: Seq[str]) -> Any:
    """The devices of these servers, then this machine's own GPUs, with NULL at the end: an array to keep
    during the load. Raises `ConfigError` for a server that llama.cpp could not use.
    """
    count = ggml("ggml_backend_reg_dev_count", SIZE, POINTER)
    get = ggml("ggml_backend_reg_dev_get", POINTER, POINTER, SIZE)
    registries = dict.fromkeys(registry_of(endpoint) for endpoint in endpoints)
    found = [get(registry, number) for registry in registries for number in range(count(registry))]
    found += of_this_machine()
    return (POINTER * (len(found) + 1))(*found)


def of_this_machine() -> list[int]:
    """GPUs that are here, not behind a server; integrated ones where there is no other."""
    get, kind = (
        ggml("ggml_backend_dev_get", POINTER, SIZE),
        ggml("ggml_backend_dev_type", ctypes.c_int, POINTER),
    )
    owner = ggml("ggml_backend_dev_backend_reg", POINTER, POINTER)
    name = ggml("ggml_backend_reg_name", TEXT, POINTER)
    every = [get(number) for number in range(ggml("ggml_backend_dev_count", SIZE)())]
    here = [device for device in every if not name(owner(device)).startswith(b"RPC")]
    return [device for device in here if kind(device) == GPU] or [
        device for device in here if kind(device) == INTEGRATED
    ]


def registry_of(endpoint: str) -> int:
    if not library().llama_supports_rpc():
        raise ConfigError(f"rpc = {endpoint!r}: this llama-cpp-python has no RPC (CMAKE_ARGS=-DGGML_RPC=on)")
    address = address_of(endpoint)
    if address not in known:  # one that this process uses answers nobody else, not even itself
        greet(endpoint, address)
        add = rpc_function(b"ggml_backend_rpc_add_server", POINTER, TEXT)
        if not (registry := add("{}:{}".format(*address).encode())):
            raise ConfigError(f"rpc = {endpoint!r}: the server offers no device")
        ggml("ggml_backend_register", None, POINTER)(registry)
        known[address] = registry
    return known[address]


def address_of(endpoint: str) -> tuple[str, int]:
    """llama.cpp knows IPv4 alone, and takes what follows the first colon for the port."""
    host, _, port = endpoint.partition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"rpc = {endpoint!r}: must be HOST:PORT, with a name or an IPv4 address")
    try:
        found = socket.getaddrinfo(host, int(port), socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"rpc = {endpoint!r}: {error}") from error
    return str(found[0][4][0]), int(port)


def greet(endpoint: str, address: tuple[str, int]) -> None:
    """Raises `ConfigError` unless a server of the same protocol answers, and is free."""
    answer = b""
    try:
        with socket.create_connection(address, SECONDS) as server:
            server.sendall(HELLO)
            while len(answer) < ANSWER.size and (more := server.recv(ANSWER.size - len(answer))):
                answer += more
    except TimeoutError as error:
        raise ConfigError(
            f"rpc = {endpoint!r}: the server does not answer; it serves one client at a time, so another "
            "one may use it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"rpc = {endpoint!r}: no RPC server of llama.cpp answers there: {error}; start it there again"
        ) from error
    if len(answer) < ANSWER.size or ANSWER.unpack(answer)[0] != ANSWER.size - 8:
        raise ConfigError(f"rpc = {endpoint!r}: what answers there is not an RPC server of llama.cpp")
    major, minor = ANSWER.unpack(answer)[1:3]
    if major != VERSION[0] or minor > VERSION[1]:
        ours = ".".join(map(str, VERSION))
        raise ConfigError(f"rpc = {endpoint!r}: its protocol is {major}.{minor}, that of this package {ours}")


def ggml(name: str, result: Any, *arguments: Any) -> Any:
    """A function of ggml, for which the bindings have no name. llama.cpp's own library finds it: a second
    copy of ggml would have a registry of its own.
    """
    return ctypes.CFUNCTYPE(result, *arguments)((name, library()._lib))


def rpc_function(name: bytes, result: Any, *arguments: Any) -> Any:
    registry = ggml("ggml_backend_reg_by_name", POINTER, TEXT)(b"RPC")
    found = ggml("ggml_backend_reg_get_proc_address", POINTER, POINTER, TEXT)(registry, name)
    return ctypes.CFUNCTYPE(result, *arguments)(found)
