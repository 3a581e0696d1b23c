"""Replicas on Ray Serve: `serve run speculon.operations.cluster:app model=smollm2 replicas=2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray.serve import Application


def app(args: Mapping[str, Any]) -> Application:
    """The application of these settings: those of the cluster and of its engines.

    Raises `ConfigError`.
    """
    from speculon.operations.cluster.build import build

    return build(args)
