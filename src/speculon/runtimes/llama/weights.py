"""Loads a file with llama.cpp: its weights, or its vocabulary alone. No torch."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path
from typing import Any

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, UnsupportedModel
from speculon.runtimes.llama import servers
from speculon.runtimes.llama.library import errors, last_error, library

ALL = -1


def load_weights(path: Path, config: EngineConfig, *, repack: bool = True, vocab_only: bool = False) -> Any:
    """The model's pointer. Raises `ModelError` with the library's own reason."""
    lib = library()
    params = lib.llama_model_default_params()
    params.vocab_only, params.use_extra_bufts = vocab_only, repack
    params.n_gpu_layers = ALL if config.gpu_layers is None else config.gpu_layers
    if vocab_only:  # no device: to ask one for its memory takes hundreds of its megabytes
        listed = (ctypes.c_void_p * 1)()
        params.devices = ctypes.addressof(listed)
    elif config.rpc or servers.known:  # a later model would take the servers of an earlier one
        listed = servers.devices(config.rpc)
        params.devices = ctypes.addressof(listed)
    params.load_mode = lib.LLAMA_LOAD_MODE_AUTO if config.mmap else lib.LLAMA_LOAD_MODE_NONE
    if split := config.tensor_split:
        if len(split) > (devices := lib.llama_max_devices()):
            raise ConfigError(f"tensor_split = {split}: llama.cpp knows {devices} devices")
        if not (min(split) >= 0 and 0 < sum(split) < math.inf):
            raise ConfigError(f"tensor_split = {split}: must be finite, 0 or more each, and not all 0")
        shares = (ctypes.c_float * devices)(*split)
        params.tensor_split = shares
    errors.clear()
    model = lib.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise UnsupportedModel(f"{path}: llama.cpp cannot load it: {last_error()}")
    return model
