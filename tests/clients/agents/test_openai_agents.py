"""openai-agents: a loop with tools over chats and over responses, streamed and whole, and an image."""

from __future__ import annotations

import asyncio
import base64
import struct
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import openai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from pydantic import Field

from ..conftest import ROOT, by_server, served

set_tracing_disabled(True)  # traces go to another host
MODELS = {"chats": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel}
# it takes an answer that is cut for a fault, so answers end at a line or a sentence
SHORT: Any = {"temperature": 0, "max_tokens": 80, "extra_body": {"stop": ["\n", "."]}}
Digits = Annotated[int, Field(ge=0, le=99)]
added: list[tuple[int, int]] = []


@function_tool
def add(a: Digits, b: Digits) -> str:
    """Adds two numbers."""
    added.append((a, b))
    return str(a + b)


@asynccontextmanager
async def agent(url: str, route: str, model: str, **settings: Any) -> AsyncIterator[Agent]:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=120) as client:
        yield Agent(
            name="adder",
            instructions="You add numbers with the tool.",
            model=MODELS[route](model, client),
            model_settings=ModelSettings(**SHORT, **settings),
            tools=[add],
        )


@pytest.mark.parametrize("route", MODELS)
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_an_agent_calls_its_tool_and_answers(smollm2_url: str, route: str, streamed: bool) -> None:
    """The call is forced; the answer after its result is the model's own."""

    async def run() -> Any:
        async with agent(smollm2_url, route, "smollm2", tool_choice="add") as adder:
            if not streamed:
                return await Runner.run(adder, "Add 7 and 12.", max_turns=4)
            result = Runner.run_streamed(adder, "Add 7 and 12.", max_turns=4)
            async for _ in result.stream_events():
                pass
            return result

    added.clear()
    result = asyncio.run(run())
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and len(added) >= 1
    assert kinds[-1] == "message_output_item" and result.final_output
    # and the whole conversation is taken as the next input
    assert len(result.to_input_list()) == len(kinds) + 1


def png() -> str:
    """A data URL of 8 x 8 red pixels, whose type is not an image's, in base64 without padding."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    rows = zlib.compress((b"\0" + b"\xc8\x1e\x28" * 8) * 8)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return "data:application/octet-stream;base64," + base64.b64encode(file).decode().rstrip("=")


@pytest.fixture(scope="module")
def seeing_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a small model with an image processor."""
    folder = tmp_path_factory.mktemp("models") / "seeing"
    code = f"import sys; from pathlib import Path; sys.path.insert(0, {str(ROOT)!r}); "
    code += "from tests.tiny.processors import write_seeing; "
    by_server(code + f"write_seeing(Path({str(folder)!r}), 'llava')")
    with served(str(folder), tmp_path_factory.mktemp("server"), "--no-warmup") as url:
        yield url


@pytest.mark.parametrize("route", MODELS)
def test_an_agent_sends_an_image(seeing_url: str, smollm2_url: str, route: str) -> None:
    parts: Any = [
        {"type": "input_text", "text": "What is this?"},
        {"type": "input_image", "image_url": png(), "detail": "auto"},
    ]

    async def run(url: str, model: str) -> Any:
        async with agent(url, route, model) as adder:
            return await Runner.run(adder.clone(tools=[]), [{"role": "user", "content": parts}])

    assert asyncio.run(run(seeing_url, "seeing")).new_items[-1].type == "message_output_item"
    with pytest.raises(openai.BadRequestError, match="this model takes no images"):
        asyncio.run(run(smollm2_url, "smollm2"))
