"""Answers of `/v1/responses`: a chat's deltas become output items, as typed events or as one object.

A whole response is what the last event of its stream has.
"""

from __future__ import annotations

import secrets
from copy import deepcopy
from typing import Any

from speculon.server.answer import Answer
from speculon.server.choice import ChoiceDelta
from speculon.server.responses import ResponseRequest
from speculon.server.tools import input_of, offered_tools

ItemFields = dict[str, Any]
EventFields = dict[str, Any]

# finish reason of a choice -> status of the response
STATUS = {"stop": "completed", "tool_calls": "completed", "length": "incomplete"}
FAULTS = {
    "abort": "the response was ended before it was complete",
    "error": "no token of the vocabulary can follow in this form of the text",
}
# type of an item -> beginning of its id, its own fields, and the part that grows
TEXTS: dict[str, tuple[str, ItemFields, ItemFields]] = {
    "message": (
        "msg",
        {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": [], "logprobs": []},
    ),
    "reasoning": ("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}),
}
TYPES = {"completed": "response.completed", "incomplete": "response.incomplete", "failed": "response.failed"}


class ResponseAnswer(Answer):
    """One answer to a body of `/v1/responses`."""

    DONE = b""

    def __init__(self, body: ResponseRequest, *parts: Any):
        super().__init__(*parts)
        self._body = body
        self._output: list[ItemFields] = []
        self._open: ItemFields | None = None  # the last of the output, while it grows
        self._tools = {tool.function.name: tool for tool in offered_tools(body.tools or ())}
        self._arguments = ""  # of the call that grows
        self._number = 0  # of the next event
        self._tokens: list[dict[str, Any]] = []  # explained
        self._sent = 0  # how many of them an event has carried
        self._logprobs: list[dict[str, Any]] = []  # of the text, not sent yet

    def first_chunks(self) -> list[EventFields]:
        response = self._response("in_progress")
        return [
            self._event("response.created", response=response),
            self._event("response.in_progress", response=response),
        ]

    def chunks(self, new: ChoiceDelta) -> list[EventFields]:
        self._tokens += new.tokens or ()
        if new.logprobs is not None:
            self._logprobs += new.logprobs["content"]
        events: list[EventFields] = []
        for delta in new.deltas:
            if text := delta.get("reasoning_content"):
                events += self._add_text("reasoning", text)
            if text := delta.get("content"):
                events += self._add_text("message", text)
            for call in delta.get("tool_calls", ()):
                events += self._add_call(call)
        return events

    def last_chunks(self) -> list[EventFields]:
        """Closes the output; without any it is an empty message."""
        status = STATUS.get(self._finish, "failed")
        events = [] if self._output else self._begin_text("message")
        events += self._close("completed" if status == "completed" else "incomplete")
        return [*events, self._event(TYPES[status], response=self._response(status))]

    def failure(self, body: dict[str, Any]) -> EventFields:
        return self._event(TYPES["failed"], response=self._response("failed", body["error"]["message"]))

    def whole(self, deltas: list[ChoiceDelta]) -> dict[str, Any]:
        for delta in deltas:
            self.chunks(delta)
        response: dict[str, Any] = self.last_chunks()[-1]["response"]
        return response

    @property
    def _finish(self) -> str:
        return self.choices[0].finish_reason or "abort"

    def _add_text(self, kind: str, text: str) -> list[EventFields]:
        """More of a message, or of the reasoning before it."""
        events: list[EventFields] = []
        if self._open is None or self._open["type"] != kind:
            events += [*self._close("completed"), *self._begin_text(kind)]
        part, more = self._growing["content"][0], dict[str, Any](delta=text)
        part["text"] += text
        if "logprobs" in part:
            more["logprobs"], self._logprobs = self._logprobs, []
            part["logprobs"] += more["logprobs"]
        name = f"response.{part['type']}.delta"
        return [*events, self._event(name, **self._place(0), **more, **self._explained())]

    def _add_call(self, call: dict[str, Any]) -> list[EventFields]:
        events: list[EventFields] = []
        function = call["function"]
        if "id" in call:
            name = function["name"]
            tool = self._tools.get(name)
            fields = tool.item() if tool else {"type": "function_call", "name": name, "arguments": ""}
            kind = "ctc" if fields["type"] == "custom_tool_call" else "fc"
            item = {"id": new_id(kind), "call_id": call["id"], **fields, "status": "in_progress"}
            events += [*self._close("completed"), self._begin(item)]
            self._arguments = ""
        if arguments := function["arguments"]:
            self._arguments += arguments
            if "arguments" in self._growing:
                self._growing["arguments"] += arguments
                more = {"delta": arguments, **self._explained()}
                events.append(self._event("response.function_call_arguments.delta", **self._place(), **more))
        return events

    def _begin_text(self, kind: str) -> list[EventFields]:
        prefix, fields, part = deepcopy(TEXTS[kind])
        item = {"id": new_id(prefix), "type": kind, **fields, "status": "in_progress", "content": []}
        added = self._begin(item)
        item["content"] = [part]
        return [added, self._event("response.content_part.added", **self._place(0), part=deepcopy(part))]

    def _begin(self, item: ItemFields) -> EventFields:
        self._output.append(item)
        self._open = item
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=dict(item))

    def _close(self, status: str) -> list[EventFields]:
        """Ends the item that grows, if there is one."""
        item, place = self._open, self._place
        if item is None:
            return []
        if "content" in item:
            (part,) = item["content"]
            if "logprobs" in part:
                part["logprobs"] += self._logprobs
            fields = {name: part[name] for name in ("text", "logprobs") if name in part}
            events = [
                self._event(f"response.{part['type']}.done", **place(0), **fields),
                self._event("response.content_part.done", **place(0), part=part),
            ]
        elif "arguments" in item:
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._event("response.function_call_arguments.done", **place(), **fields)]
        else:  # the text of a custom tool, which is known only when its arguments are complete
            text = item["input"] = input_of(self._arguments)
            more = {"delta": text, **self._explained()}
            events = [
                self._event("response.custom_tool_call_input.delta", **place(), **more),
                self._event("response.custom_tool_call_input.done", **place(), input=text),
            ]
        item["status"], self._open = status, None
        if item["type"] != "reasoning":  # its tokens have none, so they are those of the text that follows
            self._logprobs = []
        index = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=item)]

    @property
    def _growing(self) -> ItemFields:
        assert self._open is not None, "an item has begun"
        return self._open

    def _place(self, content_index: int | None = None) -> dict[str, Any]:
        """Where in the output an event belongs."""
        place = {"item_id": self._growing["id"], "output_index": len(self._output) - 1}
        return place if content_index is None else {**place, "content_index": content_index}

    def _explained(self) -> dict[str, Any]:
        """The tokens that no event has carried yet, where they are asked for."""
        if not self.request.explain:
            return {}
        new, self._sent = self._tokens[self._sent :], len(self._tokens)
        return {"speculation": {"tokens": new}}

    def _event(self, name: str, /, **fields: Any) -> EventFields:
        number, self._number = self._number, self._number + 1
        return {"type": name, "sequence_number": number, **fields}

    def _response(self, status: str, fault: str | None = None) -> dict[str, Any]:
        """The response object so far."""
        if status == "failed":
            fault = fault or FAULTS.get(self._finish, FAULTS["abort"])
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "background": False,
            "error": {"code": "server_error", "message": fault} if fault else None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self.model,
            "output": [*self._output],
            "usage": None if status == "in_progress" else self._usage(),
            "previous_response_id": None,
            "store": False,  # whatever the body says: no response is stored
            **self._settings(),
            **({} if status == "in_progress" else self._statistics()),
        }

    def _settings(self) -> dict[str, Any]:
        """What the request asked for, with the defaults of this server."""
        body, params = self._body, self.request.params
        form = {"type": "text"}
        if body.text and body.text.format:
            form = body.text.format.model_dump(by_alias=True, exclude_none=True)
        choice = body.tool_choice or "auto"
        return {
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "reasoning": {"effort": None, "summary": None},
            "temperature": params.temperature,
            "text": {"format": form if form["type"] == "json_schema" else {"type": form["type"]}},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [tool.model_dump() for tool in body.tools or ()],
            "top_logprobs": body.top_logprobs or 0,
            "top_p": params.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0, **usage["completion_tokens_details"]},
            "total_tokens": usage["total_tokens"],
        }

    def _statistics(self) -> dict[str, Any]:
        """Statistics and the fate of all tokens, where they are asked for."""
        stats = self.speculation() if self.request.include_stats else {}
        tokens = {"tokens": self._tokens} if self.request.explain else {}
        return {"speculation": {**stats, **tokens}} if stats or tokens else {}


def new_id(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
