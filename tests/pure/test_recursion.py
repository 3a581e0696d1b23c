"""References of a schema into itself: those that no finite value follows are found, others are not."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.decoding.text.recursion import endless_references

NODE = {"$ref": "#/$defs/node"}


def node(**fields: Any) -> dict[str, Any]:
    return {"$defs": {"node": fields}, **NODE}


def holding(schema: Any, **fields: Any) -> dict[str, Any]:
    """A node with one required property."""
    properties = {"value": {"type": "integer"}, "next": schema}
    return node(type="object", properties=properties, required=["value", "next"], **fields)


ENDLESS: dict[str, Any] = {
    "required": holding(NODE),
    "the whole": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "itself alone": node(**NODE),
    "allOf": holding({"allOf": [NODE]}),
    "one of anyOf": holding({"anyOf": [NODE]}),
    "all of oneOf": holding({"oneOf": [NODE, {"type": "array", "items": NODE, "minItems": 1}]}),
    "an array with an item": holding({"type": "array", "items": NODE, "minItems": 1}),
    "a tuple": holding({"type": "array", "prefixItems": [{"type": "null"}, NODE], "minItems": 2}),
    "deeper": holding({"type": "object", "properties": {"x": NODE}, "required": ["x"]}),
    "two": {
        "definitions": {
            "a": {"type": "object", "properties": {"b": {"$ref": "#/definitions/b"}}, "required": ["b"]},
            "b": {"type": "object", "properties": {"a": {"$ref": "#/definitions/a"}}, "required": ["a"]},
        },
        "$ref": "#/definitions/a",
    },
    "any name": node(type="object", additionalProperties=NODE, required=["k"]),
    "a pattern": node(
        type="object", patternProperties={"^k": NODE}, additionalProperties=False, required=["k"]
    ),
    "a number of properties": node(type="object", additionalProperties=NODE, minProperties=1),
    "a list of types": node(type=["object"], properties={"next": NODE}, required=["next"]),
    "behind a list": {
        "anyOf": [{"type": "object", "properties": {"a": {"$ref": "#/anyOf/0"}}, "required": ["a"]}]
    },
    "an escaped name": {
        "$defs": {
            "a b/c": {
                "type": "object",
                "properties": {"x": {"$ref": "#/$defs/a%20b~1c"}},
                "required": ["x"],
            }
        },
        "$ref": "#/$defs/a%20b~1c",
    },
    "an optional way into it": {"type": "object", "properties": {"a": NODE}, "$defs": holding(NODE)["$defs"]},
    "a branch of it": {"anyOf": [NODE, {"type": "null"}], "$defs": holding(NODE)["$defs"]},
}
FINITE: dict[str, Any] = {
    "optional": node(type="object", properties={"next": NODE}),
    "or null": holding({"anyOf": [NODE, {"type": "null"}]}),
    "an array": holding({"type": "array", "items": NODE}),
    "a tuple that may be short": holding({"type": "array", "prefixItems": [NODE]}),
    "an array with another first": holding(
        {"type": "array", "prefixItems": [{"type": "null"}], "items": NODE, "minItems": 1}
    ),
    "any names": node(type="object", additionalProperties=NODE),
    "a name or another": node(
        type="object", properties={"a": {}}, additionalProperties=NODE, minProperties=1
    ),
    "of any type": node(properties={"next": NODE}, required=["next"]),
    "object or null": node(type=["object", "null"], properties={"next": NODE}, required=["next"]),
    "a constant": holding(NODE, enum=[1]),
    "unused": {"$defs": holding(NODE)["$defs"], "type": "object"},
    "elsewhere": {"$ref": "https://example.org/a.json"},
    "nowhere": {"$ref": "#/$defs/nothing"},
    "a value that looks so": {"const": holding(NODE)},
    "no schema": [1, "a"],
    "odd fields": {"type": 5, "required": 7, "properties": [], "anyOf": {}, "minItems": "x", "$ref": 3},
}


@pytest.mark.parametrize("case", ENDLESS)
def test_endless_references_are_found(case: str) -> None:
    assert endless_references(ENDLESS[case])


@pytest.mark.parametrize("case", FINITE)
def test_references_that_may_end_are_none(case: str) -> None:
    assert endless_references(FINITE[case]) == []


def test_a_long_chain_of_definitions_is_read_quickly() -> None:
    """Each definition once, not all of them for each."""
    names = [f"n{i}" for i in range(5000)]
    chain: Any = {
        name: {"type": "object", "properties": {"x": {"$ref": f"#/$defs/{after}"}}, "required": ["x"]}
        for name, after in zip(names, names[1:], strict=False)
    }
    schema: Any = {"$defs": {**chain, names[-1]: {"type": "null"}}, "$ref": "#/$defs/n0"}
    assert endless_references(schema) == []
    schema["$defs"][names[-1]] = {"$ref": "#/$defs/n0"}
    assert len(endless_references(schema)) == 5000
