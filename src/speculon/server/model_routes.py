"""The routes of models: what there is, what it can do, and loading and ending by scripts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from speculon.core.errors import SpeculonError
from speculon.core.types import capabilities_json
from speculon.server.answer import Answer
from speculon.server.answer_schemas import CapabilityRow, CapabilityTable, ModelCard, ModelList
from speculon.server.app_state import AppState
from speculon.server.errors import RESPONSES, Failure
from speculon.server.model import OF_REQUESTS
from speculon.server.streaming import event_stream, line

if TYPE_CHECKING:
    from speculon.server.pool.pool import ModelPool
    from speculon.server.pool.pooled import PooledModel


def add_models(app: FastAPI, state: AppState) -> None:
    pool = state.pool

    @app.get("/v1/models", responses=RESPONSES)
    async def models() -> ModelList:
        """What this server serves, and the drafters beside it, which `drafter` marks."""
        if pool.single:
            pool.check_health()
        cards = [
            named for model in pool.models.values() for named in (card(state, model), *adapters(state, model))
        ]
        drafters = [drafter_card(state, name, method) for name, method in pool.drafters.items()]
        return ModelList(object="list", data=cards + drafters)

    @app.get("/v1/speculation/capabilities", responses=RESPONSES)
    async def capabilities(model: str | None = None) -> CapabilityTable:
        """What a model and its engine can do, what a request may ask, and why the others are denied."""
        async with pool.use(model) as pooled:
            rows = capabilities_json(pooled.facts.capabilities)
            return CapabilityTable(
                object="speculation.capabilities",
                model=pooled.name,
                capabilities={feature: CapabilityRow.model_validate(row) for feature, row in rows.items()},
            )

    @app.get("/v1/models/{model:path}", responses=RESPONSES)
    async def model(model: str) -> ModelCard:
        if pool.single:
            pool.check_health()
        return card(state, pool.find(model), pool.adapter_of(model))

    stages = event_stream("The stages as server-sent events, then the state or an error")

    @app.post("/v1/models/{model:path}/load", response_class=StreamingResponse, responses=RESPONSES | stages)
    async def load(model: str) -> StreamingResponse:
        """Load a model and wait for it; the events say how far it is."""
        pool.check_open()
        return progress(pool, pool.find(model))

    @app.post("/v1/models/{model:path}/unload", responses=RESPONSES)
    async def unload(model: str) -> ModelCard:
        """End a model after its running requests. The next request for it loads it again."""
        pool.check_open()
        pooled = pool.find(model)
        await pool.unload(pooled)
        return card(state, pooled)


def adapters(state: AppState, model: PooledModel) -> list[ModelCard]:
    """Cards of a model's adapters, each with the model as its parent."""
    return [card(state, model, adapter) for adapter in model.config.adapters]


def card(state: AppState, model: PooledModel, adapter: str = "") -> ModelCard:
    served, config = model.served, model.config
    return ModelCard(
        id=f"{model.name}:{adapter}" if adapter else model.name,
        parent=model.name if adapter else None,
        object="model",
        created=state.started,
        owned_by="speculon",
        max_model_len=None if served is None else served.max_context,
        state=model.shown_state,
        default=model is state.pool.default and not adapter,
        pinned=model.pinned,
        drafters=model.drafters,
        method=config.speculation.method if served is None else served.method,
        speculation=config.speculation.model_dump(include=set(OF_REQUESTS)),
        error=None if model.error is None else str(model.error),
    )


def drafter_card(state: AppState, name: str, method: str) -> ModelCard:
    return ModelCard(
        id=name,
        object="model",
        created=state.started,
        owned_by="speculon",
        max_model_len=None,
        state="drafter",
        drafter=method,
    )


def progress(pool: ModelPool, model: PooledModel) -> StreamingResponse:
    """The stages of a load as events."""

    async def lines() -> AsyncIterator[bytes]:
        try:
            async for change in pool.progress(model):
                yield line(change)
        except SpeculonError as error:
            yield line(Failure.of(error).body())
        yield Answer.DONE

    return StreamingResponse(lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
