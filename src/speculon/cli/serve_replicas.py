"""`speculon serve --replicas N`: the cluster's application on a Ray of this machine alone."""

from __future__ import annotations

import os
import secrets
import signal
from importlib.util import find_spec
from math import ceil
from threading import Event
from time import perf_counter
from typing import Any

from speculon.cli.listening import announce_address, listen, say
from speculon.core.config import EngineConfig, ServeConfig
from speculon.core.errors import ConfigError

NAME = "speculon"  # of the application
OBJECTS = 100 * 2**20  # bytes of Ray's shared memory: events of steps are small


def own_ray() -> dict[str, str]:
    """The environment of a Ray that is this command's alone."""
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # without a cluster of machines its ports are on 127.0.0.1
        "RAY_memory_monitor_refresh_ms": "0",  # else it ends an engine for what other programs take
        "RAY_worker_niceness": "0",  # else engines run only where no other program wants the processor
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray keeps one in the home folder
    }


def http_options(host: str, port: int, config: ServeConfig) -> dict[str, Any]:
    """Of Ray's proxy, which is what clients connect to."""
    return {"host": host, "port": port, "keep_alive_timeout_s": ceil(config.keep_alive)}


def run_replicas(settings: dict[str, Any], models: list[str], replicas: int) -> None:
    """Serves until TERM or Ctrl-C, then finishes running requests, and exits with 0."""
    if len(models) > 1:
        raise ConfigError(f"replicas = {replicas}: serve one model, not {', '.join(models)}")
    if find_spec("ray") is None:
        raise ConfigError(f"replicas = {replicas}: needs Ray, which pip install 'speculon[ray]' brings")
    started = perf_counter()
    config = EngineConfig(**settings)
    listener = listen(config.serve.host, config.serve.port)
    host, port = listener.getsockname()[:2]
    listener.close()  # Ray's proxy opens it once more
    for name, value in own_ray().items():
        os.environ.setdefault(name, value)
    import ray
    from ray import serve

    from speculon.operations.cluster import app

    stopped = Event()
    ray.init(
        address="local",
        num_cpus=max(os.cpu_count() or 1, replicas),  # logical: more replicas than cores may be asked for
        include_dashboard=False,
        object_store_memory=OBJECTS,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    try:
        serve.start(http_options=http_options(host, port, config.serve))
        gpus = 1.0 if config.device != "cpu" and ray.cluster_resources().get("GPU", 0) >= replicas else 0.0
        say(f"loading {config.model}: {replicas} replicas")
        serve.run(app({**settings, "replicas": replicas, "gpus": gpus}), name=NAME)
        announce_address(host, port, config.serve)
        say(f"serving {config.model}: {replicas} replicas; ready in {perf_counter() - started:.1f} s")
        stopped.wait()
        serve.delete(NAME)
    finally:
        serve.shutdown()
        ray.shutdown()
    say("stopped")
