"""Tools of responses as the functions that a model is offered, and calls of these as the client knows them.

A custom tool takes a text. It is offered as a function with one string, and its calls go back as a text.
Functions of a namespace get its name before theirs where theirs is not unique.
"""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Any, NamedTuple

from speculon.core.logs import name_for_log
from speculon.server.schemas import INPUT, CustomTool, Function, FunctionTool, HostedTool, NamespaceTool

LONGEST_NAME = 64  # as OpenAI

log = logging.getLogger("speculon.server")


class OfferedTool(NamedTuple):
    """A tool of a client, and the function that the model is offered in its place."""

    name: str  # the client's
    namespace: str | None
    custom: bool
    function: Function

    def item(self) -> dict[str, Any]:
        """The item of a call: what the client expects of it, beside ids and status."""
        kind = {"type": "custom_tool_call", "input": ""} if self.custom else {"type": "function_call"}
        namespace = {} if self.namespace is None else {"namespace": self.namespace}
        return {"name": self.name, **kind, **({} if self.custom else {"arguments": ""}), **namespace}


def offered_tools(tools: Seq[FunctionTool | CustomTool | NamespaceTool | HostedTool]) -> list[OfferedTool]:
    """Those that a client runs itself, in their order."""
    found: list[tuple[str | None, FunctionTool | CustomTool]] = []
    for tool in tools:
        if isinstance(tool, NamespaceTool):
            own = (one for one in tool.tools if isinstance(one, FunctionTool | CustomTool))
            found += [(tool.name, one) for one in own]
        elif isinstance(tool, FunctionTool | CustomTool):
            found.append((None, tool))
    uses = Counter(tool.name for _, tool in found)
    offered = []
    for namespace, tool in found:
        function = function_of(tool)
        if namespace is not None and uses[tool.name] > 1:
            name = re.sub(r"[^\w-]", "_", f"{namespace}__{tool.name}", flags=re.ASCII)
            function = function.model_copy(update={"name": name[-LONGEST_NAME:]})
        offered.append(OfferedTool(tool.name, namespace, isinstance(tool, CustomTool), function))
    return offered


def hosted_tools(tools: Seq[Any]) -> list[HostedTool]:
    """Those that a server would have to run, also in namespaces."""
    inner = [one for tool in tools if isinstance(tool, NamespaceTool) for one in tool.tools]
    return [tool for tool in (*tools, *inner) if isinstance(tool, HostedTool)]


def function_of(tool: FunctionTool | CustomTool) -> Function:
    if isinstance(tool, FunctionTool):
        return Function(**tool.model_dump(include={*Function.model_fields}))
    description = tool.description or ""
    if definition := (tool.format or {}).get("definition"):
        description += f"\nThe input follows this grammar:\n{definition}"
    parameters = {
        "type": "object",
        "properties": {INPUT: {"type": "string"}},
        "required": [INPUT],
        "additionalProperties": False,
    }
    return Function(name=tool.name, description=description or None, parameters=parameters)


def offered_name(offered: Seq[OfferedTool], name: str, namespace: str | None) -> str:
    """The name of a function as the model was offered it; a tool that is no longer there keeps its own."""
    names = (one.function.name for one in offered if (one.name, one.namespace) == (name, namespace))
    return next(names, name)


def input_of(arguments: str) -> str:
    """The text in the arguments of a custom tool; arguments of another form are the text."""
    try:
        read = json.loads(arguments, strict=False)
    except (ValueError, RecursionError):
        return arguments
    values = list(read.values()) if isinstance(read, dict) else []
    return values[0] if len(values) == 1 and isinstance(values[0], str) else arguments


def log_left_out(what: str, kinds: Iterable[str]) -> None:
    """One line for all that a request has and this server cannot run or read."""
    if names := ", ".join(dict.fromkeys(map(name_for_log, kinds))):
        log.info("%s that this server does not run were left out of the prompt: %s", what, names)
