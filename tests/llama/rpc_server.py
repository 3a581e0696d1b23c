"""An RPC server of llama.cpp on this machine's CPU: python -m tests.llama.rpc_server PORT"""

from __future__ import annotations

import ctypes
import sys

from speculon.runtimes.llama.servers import POINTER, SIZE, TEXT, ggml, rpc_function

CPU = 0  # the type of a device


def main(port: str) -> None:
    start = rpc_function(
        b"ggml_backend_rpc_start_server", None, TEXT, TEXT, SIZE, SIZE, ctypes.POINTER(POINTER)
    )
    device = ggml("ggml_backend_dev_by_type", POINTER, ctypes.c_int)(CPU)
    start(f"127.0.0.1:{port}".encode(), None, 1, 1, (POINTER * 1)(device))


if __name__ == "__main__":
    main(sys.argv[1])
