"""The routes. Each reads a body as a `GenerationRequest`, submits it to the engine and sends the answer."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException

from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.server import answer_schemas, schemas
from speculon.server.access_log import AccessRecord
from speculon.server.answer import Answer
from speculon.server.app_state import AppState
from speculon.server.completions import continuation_in, read_chat, read_completion, render
from speculon.server.errors import RESPONSES, Failure, misfit
from speculon.server.middleware import RequestMiddleware
from speculon.server.model import ServedModel
from speculon.server.model_routes import add_models
from speculon.server.request import GenerationRequest, has_images, pool_digest
from speculon.server.response_events import ResponseAnswer
from speculon.server.responses import NOT_STORED, ResponseObject, ResponseRequest, read_response
from speculon.server.streaming import EventStream, event_stream, unless_gone

WHOLE_OR_STREAMED = "Whole, or with stream = true as server-sent events"
Read = Callable[[ServedModel], GenerationRequest]
Make = Callable[..., Answer]


def create_app(state: AppState, version: str) -> FastAPI:
    app = FastAPI(
        title="speculon", version=version, lifespan=state.lifespan, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(RequestMiddleware, config=state.config, finish=state.finish)
    if state.config.cors_origins:  # outermost: refusals of the middleware carry its headers, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    add_errors(app)
    add_operations(app, state)
    add_completions(app, state)
    add_responses(app, state)
    add_refusals(app)
    add_pools(app, state)
    add_capture(app, state)
    add_models(app, state)
    return app


def add_completions(app: FastAPI, state: AppState) -> None:
    responses = RESPONSES | event_stream(WHOLE_OR_STREAMED)

    @app.post("/v1/completions", responses=responses, response_model=answer_schemas.CompletionResponse)
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        return await respond(state, request, "cmpl-", body.model, partial(read_completion, body))

    @app.post("/v1/chat/completions", responses=responses, response_model=answer_schemas.ChatResponse)
    async def chat(body: schemas.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        read, images = partial(read_chat, body), has_images(body.messages)
        return await respond(state, request, "chatcmpl-", body.model, read, images=images)

    @app.post("/tokenize", responses=RESPONSES)
    async def tokenize(body: schemas.TokenizeRequest) -> answer_schemas.TokenizeResponse:
        """Token ids of a prompt or of a conversation."""
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", body.prompt, "give either prompt or messages")
        async with state.pool.use(body.model) as pooled:
            read = partial(read_tokens, body, pooled.model)
            tokens = await state.read(read, has_images(body.messages))
            return answer_schemas.TokenizeResponse(
                tokens=tokens, count=len(tokens), max_model_len=pooled.model.max_context
            )

    @app.post("/detokenize", responses=RESPONSES)
    async def detokenize(body: schemas.DetokenizeRequest) -> answer_schemas.DetokenizeResponse:
        """The text that token ids stand for."""
        async with state.pool.use(body.model) as pooled:
            model = pooled.model
            wrong = next((token for token in body.tokens if token >= model.vocab_size), None)
            if wrong is not None:
                raise InvalidParameter("tokens", wrong, f"token ids must be from 0 to {model.vocab_size - 1}")
            decode = partial(model.tokenizer.decode, body.tokens, skip_special_tokens=False)
            return answer_schemas.DetokenizeResponse(prompt=await state.read(decode))


def read_tokens(body: schemas.TokenizeRequest, model: ServedModel) -> list[int]:
    if body.messages is not None:
        encode = partial(model.tokenizer.encode, add_special_tokens=False)
        opens, field = body.add_generation_prompt, body.continue_final_message
        continued = continuation_in(body.messages, field)
        return render(body.messages, [], model, encode=encode, opens=opens, continues=continued).ids
    return model.tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False)


def add_pools(app: FastAPI, state: AppState) -> None:
    @app.delete("/v1/speculation/pools", status_code=204, responses=missing("Nothing is remembered"))
    async def forget(request: Request, pool: str | None = None, model: str | None = None) -> Response:
        """Delete the earlier answers that drafts may come from: those to a user, or all to this API key."""
        state.pool.check_open()
        # a misspelt parameter must not delete everything
        if len(items := request.query_params.multi_items()) > (pool is not None) + (model is not None):
            raise InvalidParameter(
                "query", [name for name, _ in items], "must be pool and model, each at most once"
            )
        digest = None if pool is None else pool_digest(pool)
        async with state.pool.use(model) as pooled:  # loaded for it: a state folder may have some
            if not await pooled.engine.forget_pools(request.state.tenant, digest):
                raise HTTPException(404, "no earlier answers are kept under this name and API key")
        return Response(status_code=204)


def add_capture(app: FastAPI, state: AppState) -> None:
    @app.delete("/v1/speculation/capture", status_code=204, responses=missing("Nothing is captured"))
    async def forget(request: Request) -> Response:
        """Delete the texts that were captured of this API key."""
        if names := list(request.query_params):  # with a user's name, too, everything would be deleted
            raise InvalidParameter(
                "query", names, "must be empty: all that was captured of this API key is deleted"
            )
        try:
            if state.capture is None or not await state.capture.forget(request.state.tenant):
                raise HTTPException(404, "nothing was captured of this API key")
        except OSError as error:
            raise HTTPException(
                500, f"the captured texts could not be deleted: {error.strerror or error}"
            ) from None
        return Response(status_code=204)


def missing(text: str) -> dict[int | str, dict[str, Any]]:
    return RESPONSES | {404: {**RESPONSES[404], "description": text}}


def add_operations(app: FastAPI, state: AppState) -> None:
    @app.get("/live", responses=RESPONSES)
    async def live() -> answer_schemas.Health:
        """Whether the server's process runs, whatever its engine does."""
        return answer_schemas.Health(status="live")

    @app.get("/health", responses=RESPONSES)
    async def health() -> answer_schemas.Health:
        """Whether the engine serves: 503 while the model is loaded, and once the engine hangs or ends."""
        state.pool.check_health()
        return answer_schemas.Health(status="ok")

    @app.get("/ready", responses=RESPONSES)
    async def ready() -> answer_schemas.Health:
        """Whether requests are taken: as `/health`, and 503 while the server ends."""
        state.pool.check_open()
        state.pool.check_health()
        return answer_schemas.Health(status="ready")

    @app.get("/ping", responses=RESPONSES)
    @app.post("/ping", responses=RESPONSES)
    async def ping() -> answer_schemas.Health:
        """As `/health`."""
        return await health()

    @app.get("/version", responses=RESPONSES)
    async def version() -> answer_schemas.Version:
        """The version of this server."""
        return answer_schemas.Version(version=app.version)

    @app.get(
        "/metrics", response_class=Response, responses={**RESPONSES, 200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(state.metrics.page(), media_type=CONTENT_TYPE_LATEST)


def add_responses(app: FastAPI, state: AppState) -> None:
    described = RESPONSES | event_stream(WHOLE_OR_STREAMED)

    @app.post("/v1/responses", responses=described, response_model=ResponseObject)
    async def responses(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation, as output items."""
        make = partial(ResponseAnswer, body)
        read, images = partial(read_response, body), has_images(body.input)
        return await respond(state, request, "resp_", body.model, read, make, images)

    @app.api_route(
        "/v1/responses/{response:path}", methods=["GET", "DELETE", "POST"], include_in_schema=False
    )
    async def stored(response: str) -> None:
        raise HTTPException(404, NOT_STORED)


def add_refusals(app: FastAPI) -> None:
    """Routes of OpenAI that clients try, and that this server does not have."""

    def refuse(path: str, why: str) -> None:
        @app.post(path, include_in_schema=False)
        async def refused() -> None:
            raise HTTPException(404, f"this server only generates text: it has no {why}")

    refuse("/v1/embeddings", "embeddings")
    refuse("/v1/moderations", "moderations")


def add_errors(app: FastAPI) -> None:
    def refuse(request: Request, failure: Failure, logged: str) -> JSONResponse:
        request.state.record.reason = logged
        return failure.response()

    @app.exception_handler(SpeculonError)
    async def refused(request: Request, error: SpeculonError) -> JSONResponse:
        return refuse(request, Failure.of(error), error.for_log)

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        return refuse(request, *misfit(error.errors()))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        text = str(error.detail)
        response = refuse(request, Failure(error.status_code, text), text)
        response.headers.update(error.headers or {})
        if response.headers.get("allow") == "GET":
            response.headers["allow"] = "GET, HEAD"  # the middleware answers it as a GET
        return response


async def respond(
    state: AppState,
    request: Request,
    prefix: str,
    name: str | None,
    read: Read,
    make: Make = Answer,
    images: bool = False,
) -> Response:
    """One HTTP answer, whole or streamed. However it ends, its requests in the engine end with it."""
    record: AccessRecord = request.state.record
    answer_id = prefix + secrets.token_hex(12)
    beginning = state.begin(record, request.state.tenant, answer_id, name, read, make, images)
    answer = await unless_gone(request, beginning)
    if answer.request.stream:
        return EventStream(answer, record, state.keep)
    try:
        response = JSONResponse(await unless_gone(request, whole(answer, record)))
        state.keep(answer)
        return response
    finally:
        answer.close()


async def whole(answer: Answer, record: AccessRecord) -> dict[str, Any]:
    return answer.whole([delta async for batch in answer.deltas(record.receive) for delta in batch])
