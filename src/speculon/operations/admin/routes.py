"""`/admin/api`: everything that the page does, for scripts."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, FastAPI
from fastapi.responses import StreamingResponse
from starlette.middleware import Middleware

from speculon.operations.admin.auth import AdminGate
from speculon.operations.admin.schemas import (
    DrafterFit,
    LogLine,
    ModelView,
    Overview,
    RequestView,
    SettingsChange,
    TokenView,
)
from speculon.operations.admin.service import Admin
from speculon.server.app_state import AppState
from speculon.server.errors import RESPONSES
from speculon.server.model_routes import progress


def add_admin(app: FastAPI, state: AppState) -> Admin:
    """The routes of an administration, and what guards them."""
    admin = Admin(state, app.version)
    # within the middleware of requests, so that refusals are logged, too
    app.user_middleware.append(Middleware(AdminGate, config=state.config))
    router = APIRouter(prefix="/admin/api", responses=RESPONSES)  # `AdminGate` guards it
    add_routes(router, admin, state)
    app.router.routes.extend(router.routes)  # an included router hides their paths from the access log
    return admin


def add_routes(router: APIRouter, admin: Admin, state: AppState) -> None:
    @router.get("/overview")
    async def overview() -> Overview:
        """Counters of every model."""
        return admin.overview()

    @router.get("/requests")
    async def requests() -> list[RequestView]:
        """Requests that run, and the latest that have ended."""
        return admin.requests.views()

    @router.get("/requests/{request_id}")
    async def request(request_id: str) -> RequestView:
        """One request, with texts where these are kept."""
        return admin.requests.view(request_id)

    @router.get("/requests/{request_id}/tokens")
    async def tokens(request_id: str) -> TokenView:
        """The fate of each token, of a request with `speculation.explain`."""
        return admin.requests.tokens(request_id)

    @router.get("/log")
    async def log(lines: int = 200) -> list[LogLine]:
        """The latest lines of the log, the oldest first."""
        return admin.ring.latest(lines)

    @router.get("/models")
    async def models() -> list[ModelView]:
        """Every model with its settings."""
        return await admin.models()

    @router.get("/drafters/{model:path}")
    async def drafters(model: str, checkpoint: str | None = None) -> list[DrafterFit]:
        """Drafters that a model has, those that fit it, and why others do not; or of one checkpoint."""
        return await admin.drafters_for(model, checkpoint)

    @router.post("/models/{model:path}/load", response_class=StreamingResponse)
    async def load(model: str) -> StreamingResponse:
        """Load a model; the events say how far it is."""
        return progress(state.pool, state.pool.find(model))

    @router.post("/models/{model:path}/unload")
    async def unload(model: str) -> ModelView:
        """End a model after its running requests."""
        return await admin.unload(model)

    @router.get("/models/{model:path}")
    async def one(model: str) -> ModelView:
        """One model with its settings."""
        return await admin.model(model)

    @router.patch("/models/{model:path}")
    async def change(model: str, body: SettingsChange) -> ModelView:
        """Change settings of a model."""
        # a change that has begun is not cut off in the middle by its client
        return await asyncio.shield(admin.change(model, body.changes))
