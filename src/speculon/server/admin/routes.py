"""`/admin/api`: everything that the page does, for scripts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse

from speculon.errors import SpeculonError
from speculon.server.admin.schemas import (
    Change,
    Drafter,
    LogLine,
    ModelView,
    Overview,
    RequestView,
    TokenView,
)
from speculon.server.admin.service import Admin
from speculon.server.answer import Answer
from speculon.server.app_state import AppState
from speculon.server.errors import RESPONSES, body_of, param_of, status_of
from speculon.server.streaming import line


def add_admin(app: FastAPI, state: AppState) -> Admin:
    """The routes of an administration, which is in `app.state.admin`, too."""
    admin = Admin(state, app.version)
    app.state.admin = admin
    router = APIRouter(prefix="/admin/api", responses=RESPONSES)  # `AdminGate` guards it
    add_looks(router, admin)
    add_models(router, admin)
    app.router.routes.extend(router.routes)  # an included router hides their paths from the access log
    return admin


def add_looks(router: APIRouter, admin: Admin) -> None:
    @router.get("/overview")
    async def overview() -> Overview:
        """Counters of every model."""
        return admin.overview()

    @router.get("/requests")
    async def requests() -> list[RequestView]:
        """Requests that run, and the latest that have ended."""
        return admin.requests()

    @router.get("/requests/{request_id}")
    async def request(request_id: str) -> RequestView:
        """One request, with texts where these are kept."""
        return admin.request(request_id)

    @router.get("/requests/{request_id}/tokens")
    async def tokens(request_id: str) -> TokenView:
        """The fate of each token, of a request with `speculation.explain`."""
        return admin.tokens(request_id)

    @router.get("/log")
    async def log(lines: int = 200) -> list[LogLine]:
        """The latest lines of the log, the oldest first."""
        return admin.log(lines)


def add_models(router: APIRouter, admin: Admin) -> None:
    @router.get("/models")
    async def models() -> list[ModelView]:
        """Every model with its settings."""
        return await admin.models()

    @router.get("/drafters/{model:path}")
    async def drafters(model: str, checkpoint: str | None = None) -> list[Drafter]:
        """Drafters that a model has, those that fit it, and why others do not; or of one checkpoint."""
        return await admin.drafters_for(model, checkpoint)

    @router.post("/models/{model:path}/load", response_class=StreamingResponse)
    async def load(model: str) -> StreamingResponse:
        """Load a model; the events say how far it is."""
        admin.find(model)
        return stream(loading(admin, model))

    @router.post("/models/{model:path}/unload")
    async def unload(model: str) -> ModelView:
        """End a model after its running requests."""
        return await admin.unload(model)

    @router.get("/models/{model:path}")
    async def one(model: str) -> ModelView:
        """One model with its settings."""
        return await admin.model(model)

    @router.patch("/models/{model:path}")
    async def change(model: str, body: Change) -> ModelView:
        """Change settings of a model."""
        # a change that has begun is not cut off in the middle by its client
        return await asyncio.shield(admin.change(model, body.changes))


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    return StreamingResponse(events, media_type="text/event-stream", headers={"cache-control": "no-cache"})


async def loading(admin: Admin, model: str) -> AsyncIterator[bytes]:
    try:
        async for change in admin.load(model):
            yield line(change)
    except SpeculonError as error:
        status, code = status_of(error)
        yield line(body_of(status, str(error), code, param_of(error)))
    yield Answer.DONE
