"""Schemas of tools as grammars: what a grammar cannot say is left out, and only exact ones are refused."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.core.errors import InvalidParameter
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.text.tool_schemas import calls_schema, compiles, expressible, fitted
from speculon.server.completions import read_chat
from speculon.server.model import ServedModel
from speculon.server.schemas import ChatRequest
from tests.server.inside import Inside, served
from tests.server.scripted import Bytes

# schema of one parameter -> the keyword that no grammar has, and the rest
ODD: dict[str, tuple[Any, str, Any]] = {
    "uri-reference": ({"type": "string", "format": "uri-reference"}, "format", {"type": "string"}),
    "url": (
        {"type": "string", "format": "url", "maxLength": 9},
        "format",
        {"type": "string", "maxLength": 9},
    ),
    "lookahead": ({"type": "string", "pattern": "^(?=.*a).+$"}, "pattern", {"type": "string"}),
    "backreference": ({"pattern": r"(a)\1"}, "pattern", {}),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems", {"type": "array"}),
    "propertyNames": (
        {"type": "object", "propertyNames": {"pattern": "a"}},
        "propertyNames",
        {"type": "object"},
    ),
    "not": ({"not": {"type": "string"}}, "not", {}),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 1}}, "if, then", {}),
    "external $ref": ({"$ref": "https://example.org/x.json"}, "$ref", {}),
    "dangling $ref": ({"$ref": "#/$defs/nothing"}, "$ref", {}),
    "required": ({"type": "object", "required": None}, "required", {"type": "object"}),
    "a type": ({"type": "colour"}, "type", {}),
    "no schema": (None, "schema", {}),
    "pattern of keys": (
        {"patternProperties": {"(?!x)": {}, "a": {}}},
        "patternProperties",
        {"patternProperties": {"a": {}}},
    ),
    "deep": (
        {"anyOf": [{"items": {"format": "byte"}}, {"type": "null"}]},
        "format",
        {"anyOf": [{"items": {}}, {"type": "null"}]},
    ),
}


def parameters(p: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"p": p, "q": {"type": "integer"}}, "required": ["q"], **more}


@pytest.mark.parametrize("case", ODD)
def test_what_no_grammar_says_is_left_out_or_refused_by_tool_and_keyword(case: str) -> None:
    schema, keyword, rest = ODD[case]
    function = {"name": "f", "parameters": parameters(schema)}
    assert fitted(function, exact=False) == {"name": "f", "parameters": parameters(rest)}
    with pytest.raises(InvalidParameter) as caught:
        fitted(function, exact=True)
    assert str(caught.value) == f"tools = 'f': the parameters of f: a grammar cannot guarantee {keyword}"


KEPT = [
    parameters({"$ref": "#/$defs/a"}, **{"$defs": {"a": {"type": "string"}}}),
    parameters({"$ref": "#"}),
    parameters({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
    parameters({"type": ["string", "null"], "default": None, "title": "P", "format": "date"}),
    {},
]


@pytest.mark.parametrize("schema", KEPT, ids=str)
@pytest.mark.parametrize("exact", [False, True])
def test_what_a_grammar_says_is_kept(schema: dict[str, Any], exact: bool) -> None:
    found = fitted({"name": "f", "parameters": schema}, exact)["parameters"]
    assert found == (schema or {"type": "object"})


def test_alternatives_that_overlap_may_both_fit() -> None:
    either = parameters({"oneOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]})
    assert fitted({"name": "f", "parameters": either}, exact=False)["parameters"] == either
    with pytest.raises(InvalidParameter, match="cannot guarantee oneOf"):
        fitted({"name": "f", "parameters": either}, exact=True)


def test_a_schema_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    expressible.cache_clear()
    schema = parameters({"format": "byte", "secret": 1, "not": {}})
    with caplog.at_level(logging.WARNING, "speculon.server"):
        for name in ("secret", "other"):
            fitted({"name": name, "parameters": schema}, exact=False)
    (line,) = caplog.messages
    assert line.endswith("characters does not enforce format, not") and "secret" not in line


def tool(name: str, schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema, **more}}


TWELVE = [tool(f"f{i}", parameters(ODD[case][0])) for i, case in enumerate(list(ODD)[:12])]


@pytest.fixture(scope="module")
def inside() -> Iterator[Inside]:
    with served() as inside:
        yield inside


def nested(keyword: str, depth: int) -> Any:
    """A schema inside so many others."""
    schema: Any = {"type": "string"}
    for _ in range(depth):
        inside = {"a": schema} if keyword == "properties" else [schema] if keyword == "anyOf" else schema
        schema = {keyword: inside}
    return schema


MODEL = ServedModel("m", Tokenizer(Bytes()), 2**16, 257, "off", ServeConfig())
ASK = [{"role": "user", "content": "say:hi"}]
NESTED = [("properties", 450), ("properties", 59), ("anyOf", 300), ("items", 600), ("items", 117)]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(("keyword", "depth"), NESTED)
def test_a_tool_nested_beyond_all_grammars_is_a_tool(keyword: str, depth: int, choice: str) -> None:
    """The levels that a grammar has room for are kept."""
    function = {"name": "f", "parameters": parameters(nested(keyword, depth))}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice, "messages": ASK}
    assert read_chat(ChatRequest.model_validate(body), MODEL).form is not None
    found = fitted(function, exact=False)
    assert found["parameters"]["properties"]["p"] and found["parameters"]["required"] == ["q"]
    assert compiles(calls_schema([found, {"name": "g"}], parallel=True))
    with pytest.raises(InvalidParameter, match="a grammar cannot guarantee nesting"):
        fitted(function, exact=True)


NAMED = {"type": "function", "function": {"name": "exact"}}


@pytest.mark.parametrize(
    ("tools", "choice"),
    [
        ([*TWELVE, tool("exact", parameters({"uniqueItems": True}), strict=True)], "auto"),
        ([*TWELVE, tool("exact", parameters({"uniqueItems": True}), strict=True)], "required"),
        ([*TWELVE, tool("exact", parameters({"uniqueItems": True}))], NAMED),
    ],
    ids=["strict", "strict, required", "named"],
)  # fmt: skip
def test_only_the_exact_tool_is_refused(inside: Inside, tools: list[Any], choice: Any) -> None:
    body = {"tools": tools, "tool_choice": choice, "messages": [{"role": "user", "content": "say:hi"}]}
    refusal = inside.post("chat/completions", **body)
    error = refusal.json()["error"]
    assert (refusal.status_code, error["param"]) == (400, "tools")
    assert (
        error["message"] == "tools = 'exact': the parameters of exact: a grammar cannot guarantee uniqueItems"
    )


def test_schemas_beyond_all_grammars_are_refused_before_they_are_tried(inside: Inside) -> None:
    large = parameters({"enum": ["x" * 100 * i for i in range(40)]})
    tools = [tool("a", large), tool("b", parameters({"not": {}})), *TWELVE]
    refusal = inside.post("chat/completions", tools=tools, messages=[{"role": "user", "content": "say:hi"}])
    error = refusal.json()["error"]
    assert (refusal.status_code, error["param"]) == (400, "tools")
    assert "the parameters may have at most 65536 characters as JSON" in error["message"]


def test_the_twin_of_what_is_left_out() -> None:
    """Each of the odd schemas fails as it is."""
    assert not any(compiles({"properties": {"p": schema}}) for schema, _, _ in ODD.values())


def test_the_schema_of_calls_keeps_every_tools_own_definitions() -> None:
    point = {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/p"}},
        "$defs": {"p": {"type": "integer"}},
    }
    named = {
        "type": "object",
        "properties": {"at": {"$ref": "#/definitions/p"}},
        "definitions": {"p": {"type": "string"}},
    }
    functions = [{"name": "a", "parameters": point}, {"name": "b", "parameters": named}, {"name": "c"}]
    schema = calls_schema(functions, parallel=True)
    assert (
        schema["$defs"] == {"a.p": {"type": "integer"}, "b.p": {"type": "string"}} and schema["maxItems"] > 1
    )
    forms = [form["properties"]["arguments"] for form in schema["items"]["anyOf"]]
    assert [form.get("properties") for form in forms] == [
        {"at": {"$ref": "#/$defs/a.p"}},
        {"at": {"$ref": "#/$defs/b.p"}},
        None,
    ]
    assert calls_schema(functions[:1], parallel=False)["maxItems"] == 1
    assert "$defs" not in calls_schema(
        [{"name": "odd", "parameters": {"$defs": [1], "definitions": None}}], parallel=True
    )


def test_the_schema_of_calls_keeps_a_tools_reference_to_itself() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}, "right": {"$ref": "#/properties/left"}}}
    schema = calls_schema([{"name": "a", "parameters": tree}], parallel=True)
    arguments = schema["items"]["properties"]["arguments"]
    assert schema["$defs"] == {"a": arguments}
    parts = {"left": {"$ref": "#/$defs/a"}, "right": {"$ref": "#/$defs/a/properties/left"}}
    assert arguments["properties"] == parts


ENDLESS = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}
ENDING = {"type": "object", "properties": {"next": {"$ref": "#"}}}


@pytest.mark.parametrize("exact", [True, False])
def test_parameters_that_never_end_are_no_grammar(exact: bool) -> None:
    function = {"name": "f", "parameters": ENDLESS}
    if exact:
        with pytest.raises(InvalidParameter, match="the parameters of f"):
            fitted(function, exact)
    else:
        assert fitted(function, exact)["parameters"] == {"type": "object"}
    assert fitted({"name": "f", "parameters": ENDING}, exact)["parameters"] == ENDING
