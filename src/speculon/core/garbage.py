"""Python's search for unreachable objects, in processes of speculon's own."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_for_good() -> Iterator[None]:
    """What is made within it stays to the end of the process: no search for unreachable objects looks at it.

    This is for the modules of torch and transformers, whose import spends a sixth of its time on searching,
    and for a model. Each later search of all objects would take 0.2 s, in the middle of a request.
    """
    searching = gc.isenabled()  # not within another such block
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if searching:
            gc.enable()
