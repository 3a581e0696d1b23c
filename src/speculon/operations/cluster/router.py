"""The routing as Ray Serve calls it: in the ingress, where the handle of the replicas chooses one."""

from __future__ import annotations

from functools import cache
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from speculon.engine.messages import Add
from speculon.operations.cluster.messages import pool_of
from speculon.operations.cluster.routing import Routing


@cache
def routing_of(block_size: int) -> Routing:
    """The one of this process: the handle makes its router itself."""
    return Routing(block_size)


class PrefixRouter(RequestRouter):
    """Asks `Routing`; calls without an `Add` go to any replica."""

    def initialize_state(self, **settings: Any) -> None:
        self.routing = routing_of(settings["block_size"])
        self._limit: int = settings["limit"]  # open requests of a full batch

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        self.routing.keep({replica.replica_id.unique_id for replica in replicas})
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None or not pending_request.args:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True  # where this choice cannot be kept
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        lengths = self.replica_queue_len_cache
        load = {name: lengths.get(replica.replica_id) or 0 for name, replica in replicas.items()}
        add: Add = pending_request.args[0]
        chosen = self.routing.choose(add.prompt, pool_of(add), load, self._limit, add.adapter)
        return [] if chosen is None else [[replicas[chosen]]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        if pending_request.args:
            add: Add = pending_request.args[0]
            self.routing.sent(replica_id.unique_id, add.prompt, pool_of(add), add.adapter)
