"""Replicas on Ray Serve, called through the handle of their deployment."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from speculon.core.errors import EngineError
from speculon.engine.messages import Add
from speculon.operations.cluster.messages import FromReplica, ReplicaLost, ReplicaStatistics
from speculon.operations.cluster.routing import Routing

ANSWER_SECONDS = 5.0  # for a call that every replica answers at once


class ServeReplicas:
    """`Replicas` of one deployment."""

    def __init__(self, handle: DeploymentHandle[Any], routing: Routing):
        self._handle, self.routing = handle, routing
        self._generate = handle.options(method_name="generate", stream=True)

    async def generate(self, add: Add) -> AsyncGenerator[FromReplica, None]:
        with lost_replicas():
            stream = self._generate.remote(add)
            try:
                async for message in stream:
                    yield message
            except (GeneratorExit, asyncio.CancelledError):  # the reader leaves
                stream.cancel()
                raise

    async def statistics(self) -> list[ReplicaStatistics]:
        found = await self._broadcast("statistics")
        return [one for one in found if isinstance(one, ReplicaStatistics)]

    async def abort(self, request_ids: list[str]) -> None:
        await self._broadcast("abort", request_ids)

    async def forget_pools(self, tenant: str, pool: str | None, only: str | None = None) -> int:
        found = await self._broadcast("forget_pools", tenant, pool, only)
        return max((count for count in found if isinstance(count, int)), default=0)

    async def _broadcast(self, method: str, *args: Any) -> list[Any]:
        """What each replica returns, or the exception of one that is gone."""
        with lost_replicas():
            reply = self._handle.broadcast(method, *args)
            return await reply.results_async(timeout_s=ANSWER_SECONDS, return_exceptions=True)


@contextmanager
def lost_replicas() -> Iterator[None]:
    """Ray's errors about processes become `ReplicaLost`."""
    try:
        yield
    except RayTaskError as error:
        raise EngineError(f"a fault inside a replica: {error.cause!r}") from None
    except (RayError, RayServeException) as error:
        raise ReplicaLost(f"a replica is gone: {type(error).__name__}") from None
