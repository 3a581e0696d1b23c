"""The routes. Each reads a body as a `Job`, submits it to the engine and writes what comes back."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from speculon.errors import EngineError, InvalidParameter, SpeculonError
from speculon.server import schemas
from speculon.server.answer import Answer
from speculon.server.completions import read_chat, read_completion, render
from speculon.server.middleware import CLIENT_GONE, ClientGone, Door
from speculon.server.errors import RESPONSES, body_of, failure, first_of, param_of, status_of
from speculon.server.app_state import Server
from speculon.server.request import Job, pool_of
from speculon.server.access_log import Record

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Whole, or with stream = true as server-sent events",
        "content": {"text/event-stream": {}},
    }
}
T = TypeVar("T")
LAST_WORDS = 1.0  # guess: seconds that a request out of time waits for the engine's account of it

log = logging.getLogger("speculon.server")


def create_app(server: Server, version: str) -> FastAPI:
    app = FastAPI(
        title="speculon", version=version, lifespan=server.lifespan, redoc_url=None, redirect_slashes=False
    )
    app.add_middleware(Door, config=server.config, finish=server.finish)
    if server.config.cors_origins:  # outermost: an answer of the door's own must carry its headers, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(server.config.cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
        )
    add_errors(app)
    add_operations(app, server)
    add_models(app, server)
    add_texts(app, server)
    add_pools(app, server)
    add_capture(app, server)
    return app


def add_texts(app: FastAPI, server: Server) -> None:
    responses = RESPONSES | STREAMED

    @app.post("/v1/completions", responses=responses, response_model=schemas.CompletionResponse)
    async def completions(body: schemas.CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        return await answer(server, request, "cmpl", lambda: read_completion(body, server.house))

    @app.post("/v1/chat/completions", responses=responses, response_model=schemas.ChatResponse)
    async def chat(body: schemas.ChatRequest, request: Request) -> Response:
        """Answer a conversation."""
        return await answer(server, request, "chatcmpl", lambda: read_chat(body, server.house))

    @app.post("/tokenize", responses=RESPONSES)
    async def tokenize(body: schemas.TokenizeRequest) -> schemas.TokenizeResponse:
        """Token ids of a prompt or of a conversation."""
        house = server.house
        house.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise InvalidParameter("prompt", body.prompt, "give this or messages, and not both")

        def read() -> list[int]:
            if body.messages is not None:
                return house.tokenizer.encode(render(body.messages, [], house), add_special_tokens=False)
            return house.tokenizer.encode(
                body.prompt or "", add_special_tokens=body.add_special_tokens is not False
            )

        tokens = await server.read(read)
        return schemas.TokenizeResponse(tokens=tokens, count=len(tokens), max_model_len=house.max_context)

    @app.post("/detokenize", responses=RESPONSES)
    async def detokenize(body: schemas.DetokenizeRequest) -> schemas.DetokenizeResponse:
        """The text that token ids stand for."""
        house = server.house
        house.check_model(body.model)
        wrong = next((token for token in body.tokens if token >= server.facts.vocab_size), None)
        if wrong is not None:
            raise InvalidParameter("tokens", wrong, f"token ids go from 0 to {server.facts.vocab_size - 1}")
        return schemas.DetokenizeResponse(
            prompt=await server.read(lambda: house.tokenizer.decode(body.tokens, skip_special_tokens=False))
        )


def add_pools(app: FastAPI, server: Server) -> None:
    responses: dict[int | str, dict[str, Any]] = {
        **RESPONSES,
        404: {**RESPONSES[404], "description": "Nothing is remembered"},
    }

    @app.delete("/v1/speculation/pools", status_code=204, responses=responses)
    async def forget(request: Request, pool: str | None = None) -> Response:
        """Delete the earlier answers that drafts may come from: those to a user, or all to this API key."""
        server.check_ready()
        # a slip of the pen must not delete all
        if len(said := request.query_params.multi_items()) > (pool is not None):
            raise InvalidParameter("query", [name for name, _ in said], "takes pool, once, or nothing")
        if not await server.engine.forget_pools(
            request.state.tenant, None if pool is None else pool_of(pool)
        ):
            raise HTTPException(404, "nothing is remembered under this name and API key")
        return Response(status_code=204)


def add_capture(app: FastAPI, server: Server) -> None:
    responses: dict[int | str, dict[str, Any]] = {
        **RESPONSES,
        404: {**RESPONSES[404], "description": "Nothing is captured"},
    }

    @app.delete("/v1/speculation/capture", status_code=204, responses=responses)
    async def forget(request: Request) -> Response:
        """Delete the texts that were captured of this API key."""
        if request.query_params:  # who names a user must not think that his texts alone are deleted
            raise InvalidParameter(
                "query", list(request.query_params), "takes nothing: all of this API key is deleted"
            )
        try:
            if server.capture is None or not await server.capture.forget(request.state.tenant):
                raise HTTPException(404, "nothing is captured of this API key")
        except OSError as error:
            raise HTTPException(500, f"it could not be deleted: {error.strerror or error}") from None
        return Response(status_code=204)


def add_models(app: FastAPI, server: Server) -> None:
    def card() -> schemas.ModelCard:
        house = server.house
        return schemas.ModelCard(
            id=house.name,
            object="model",
            created=server.began,
            owned_by="speculon",
            max_model_len=house.max_context,
        )

    @app.get("/v1/models", responses=RESPONSES)
    async def models() -> schemas.ModelList:
        """What this server serves."""
        return schemas.ModelList(object="list", data=[card()])

    @app.get("/v1/models/{model:path}", responses=RESPONSES)
    async def model(model: str) -> schemas.ModelCard:
        server.house.check_model(model)
        return card()


def add_operations(app: FastAPI, server: Server) -> None:
    @app.get("/health", responses=RESPONSES)
    async def health() -> schemas.Health:
        """Whether the process lives; 503 once the engine has ended."""
        server.check_engine()
        return schemas.Health(status="ok")

    @app.get("/ready", responses=RESPONSES)
    async def ready() -> schemas.Health:
        """Whether requests are taken: 503 while the model is loaded, and while the server ends."""
        server.check_ready()
        return schemas.Health(status="ready")

    @app.get(
        "/metrics", response_class=Response, responses={**RESPONSES, 200: {"content": {"text/plain": {}}}}
    )
    async def metrics() -> Response:
        """Counters for Prometheus."""
        return Response(*server.metrics.page())


def add_errors(app: FastAPI) -> None:
    def refuse(
        request: Request, status: int, message: str, code: str | None = None, param: str | None = None
    ) -> JSONResponse:
        request.state.record.reason = message
        return failure(status, message, code, param)

    @app.exception_handler(SpeculonError)
    async def refused(request: Request, error: SpeculonError) -> JSONResponse:
        status, code = status_of(error)
        return refuse(request, status, str(error), code, param_of(error))

    @app.exception_handler(RequestValidationError)
    async def unreadable(request: Request, error: RequestValidationError) -> JSONResponse:
        message, name = first_of(error.errors())
        return refuse(request, 400, message, param=name)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        response = refuse(request, error.status_code, str(error.detail))
        response.headers.update(error.headers or {})
        return response


async def answer(server: Server, request: Request, prefix: str, read: Callable[[], Job]) -> Response:
    """One HTTP answer, whole or streamed; whatever ends it, the engine is told."""
    record: Record = request.state.record
    answer_id = f"{prefix}-{secrets.token_hex(12)}"
    session = await unless_gone(request, begin(server, answer_id, request.state.tenant, read))
    record.answer = session.answer
    if session.job.stream:
        return EventStream(session, record)
    try:
        response = JSONResponse(await unless_gone(request, gather(session, record)))
        session.done()
        return response
    finally:
        session.close()


class Session:
    """A job in the engine, and its answer so far."""

    def __init__(self, answer: Answer, mailbox: Any, seconds: float | None, done: Callable[[Answer], None]):
        self.answer, self.job, self._mailbox, self._done = answer, answer.job, mailbox, done
        self._until = asyncio.get_running_loop().time() + seconds if seconds else None

    async def pieces(self, record: Record) -> AsyncIterator[list[Any]]:
        """What the texts gain, in batches; at the time limit the last pieces say `abort`."""
        ending = False
        while True:
            try:
                # never around a yield: it would strike whoever reads
                async with asyncio.timeout_at(self._until):
                    events = await self._mailbox.take()
            except TimeoutError:
                if ending:
                    self.close()
                    yield self.answer.abort()
                    return
                ending, self._until = True, asyncio.get_running_loop().time() + LAST_WORDS
                self._mailbox.abort()  # its last news carry the account
                continue
            if not events:
                return
            record.hear(events)
            yield [piece for event in events if (piece := self.answer.push(event)) is not None]

    def done(self) -> None:
        """All of it is on its way to the client."""
        self._done(self.answer)

    def close(self) -> None:
        self._mailbox.close()


async def begin(server: Server, answer_id: str, tenant: str, read: Callable[[], Job]) -> Session:
    server.check_ready()
    job = await server.read(read)
    mailbox = await server.submit(job, answer_id, tenant)
    answer = Answer.to(job, answer_id, server.house.name, server.house.tokenizer)
    return Session(answer, mailbox, server.config.request_timeout, lambda answer: server.keep(answer, tenant))


async def gather(session: Session, record: Record) -> dict[str, Any]:
    pieces = [piece async for batch in session.pieces(record) for piece in batch]
    return session.answer.whole(pieces)


class EventStream(StreamingResponse):
    """Server-sent events of one session, which ends with the connection, however that ends."""

    def __init__(self, session: Session, record: Record):
        super().__init__(self._lines(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._session, self._record = session, record

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._session.close()
            if not self._record.done:
                self._record.status = CLIENT_GONE

    async def _lines(self) -> AsyncIterator[bytes]:
        session, answer = self._session, self._session.answer
        try:
            for chunk in answer.first():
                yield line(chunk)
            async for batch in session.pieces(self._record):
                yield b"".join(line(answer.chunk(piece)) for piece in batch)
            for chunk in answer.last():
                yield line(chunk)
            session.done()
        except SpeculonError as error:
            yield self._last_words(error)
        except Exception as error:
            log.exception("%s: a fault inside the server", self._record.request_id)
            yield self._last_words(EngineError(f"a fault inside the server: {type(error).__name__}"))
        self._record.done = True
        yield b"data: [DONE]\n\n"

    def _last_words(self, error: SpeculonError) -> bytes:
        status, code = status_of(error)
        self._record.status, self._record.reason = status, str(error)
        return line(body_of(status, str(error), code, param_of(error)))


def line(chunk: dict[str, Any]) -> bytes:
    return (
        b"data: "
        + json.dumps(chunk, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
        + b"\n\n"
    )


async def unless_gone(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
