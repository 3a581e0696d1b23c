"""llama.cpp's C library, by the bindings of the package llama-cpp-python."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
from collections import deque
from functools import cache
from importlib.util import find_spec
from typing import Any

from speculon.core.errors import ConfigError

MISSING = (
    "runtime = 'llama' needs the package llama-cpp-python: pip install 'speculon[llama]' builds it with a "
    "C++ compiler, and docs/llama.md lists prebuilt wheels for CPU, Metal and CUDA"
)
ERROR, WARNING = 4, 3  # levels of its log

log = logging.getLogger("speculon.llama")
errors: deque[str] = deque(maxlen=8)  # the latest that it has logged


def installed() -> bool:
    """Whether the package is there; it is not imported."""
    return find_spec("llama_cpp") is not None


@cache
def library() -> Any:
    """The bindings, ready to use. Raises `ConfigError` where they are missing or cannot be loaded."""
    if not installed():
        raise ConfigError(MISSING)
    # an abort would call a debugger for the trace, and requests would wait for their error until it ends
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")
    try:
        from llama_cpp import llama_cpp
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"llama-cpp-python is installed, but its library cannot be loaded: {error}"
        ) from error
    llama_cpp.llama_log_set(_callback(llama_cpp), ctypes.c_void_p(0))
    # what it logs while Python ends must not call Python: any function of C that does nothing takes the place
    nothing = ctypes.cast(ctypes.pythonapi.Py_IsInitialized, llama_cpp.llama_log_callback)
    atexit.register(llama_cpp.llama_log_set, nothing, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


@cache  # the library calls it for as long as the process lives
def _callback(bindings: Any) -> Any:
    return bindings.llama_log_callback(_log)


def _log(level: int, text: bytes, _: object) -> None:
    line = text.decode(errors="replace").strip(" .\n")
    if not line:
        return
    if level == ERROR:
        errors.append(line)
    log.log(logging.INFO if level in (ERROR, WARNING) else logging.DEBUG, "%s", line)


def last_error() -> str:
    """Why the library has refused something, in its own words."""
    own = [line for line in errors if "error loading" in line or "failed" not in line]
    return (own or [*errors] or ["it gives no reason"])[0]
