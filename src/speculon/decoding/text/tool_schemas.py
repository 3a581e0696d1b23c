"""Grammars of tool calls, from the schemas of the functions' parameters.

What no grammar says of a schema is left out of it. Only where a client relies on the whole schema is it
refused.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from functools import lru_cache
from types import MappingProxyType
from typing import Any

from speculon.core.config import MAX_GRAMMAR
from speculon.core.errors import InvalidParameter
from speculon.core.logs import name_for_log
from speculon.decoding.text.recursion import endless_references
from speculon.decoding.text.tool_calls import CLOSE, OPEN

log = logging.getLogger("speculon.server")

TOOLS = "tools"  # the field that the forms of calls come from
MAX_CALLS = 8  # in one forced reply
KEPT = 256  # schemas whose grammars were tried
# of bytes, since a token may be a part of a character; FF begins tokens that are no text in llguidance
ANY_TEXT, WITHOUT_SPECIAL = "(?s:.)*", r"(?s-u:[\x00-\xFE])*"
NO_SCHEMA = "schema"  # in place of a keyword, for what is none
MAX_DEPTH = 50  # schemas inside one another: llguidance reads 128 levels of JSON, and a schema has up to two
TOO_DEEP = "nesting"  # in place of a keyword, too
ANY_OBJECT = {"type": "object"}
EXACT: Any = {"whitespace_flexible": False}
STYLE: Any = {**EXACT, "coerce_one_of": True}  # a grammar cannot say that only one of several fits
# keywords with schemas below them: in an object by name, in a list, or one alone
PATTERNS = "patternProperties"  # its names are expressions
BY_NAME = ("properties", PATTERNS, "$defs", "definitions")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
ALONE = ("items", "additionalProperties", "additionalItems")


def calls_schema(functions: Seq[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of an array of calls of these functions: one to `MAX_CALLS`, or exactly one."""
    item, definitions = any_call(functions)
    return {
        "type": "array",
        "items": item,
        "minItems": 1,
        "maxItems": MAX_CALLS if parallel else 1,
        "x-guidance": STYLE,
        **definitions,
    }


def calls_grammar(
    functions: Seq[Mapping[str, Any]],
    parallel: bool,
    special_ids: Seq[int] = (),
    form: Any = None,
    tag_ids: Mapping[str, int] = MappingProxyType({}),
) -> str:
    """Lark grammar of a reply in the generic form: free text, and calls of these functions between tags.

    A call ends a reply that is not `parallel`. With `form`, a JSON schema, the reply is calls or such JSON.
    `special_ids` are the special tokens that free text may have, `tag_ids` those that are tags.
    """
    item, definitions = any_call(functions)
    # to llguidance a special token is no text, so it is named by its id
    opening, closing = (f" | <[{tag_ids[tag]}]>" if tag in tag_ids else "" for tag in (OPEN, CLOSE))
    call = f'body ("{CLOSE}"{closing})\nbody: {json_rule({**item, **definitions}, STYLE)}\n'
    if form is not None:
        calls = "call+" if parallel else "call"
        return f'start: {calls} | form\nform: {json_rule(form, EXACT)}\ncall: ("{OPEN}"{opening}) {call}'
    free = f"TEXT <[{','.join(map(str, special_ids))}]>" if special_ids else "TEXT"
    start = f"(call | {free})* TEXT" if parallel else f"({free})* (call | TEXT)"
    begin = f"(head{opening.replace('<', 'TEXT <')})"
    text = WITHOUT_SPECIAL if tag_ids else ANY_TEXT
    return (
        '%llguidance {"allow_invalid_utf8": true}\n'
        f'start: {start}\nTEXT: /{text}/\nhead[lazy]: TEXT "{OPEN}"\ncall: {begin} {call}'
    )


def json_rule(schema: Any, style: Any) -> str:
    """Compact JSON of this schema, in a Lark grammar."""
    return "%json " + json.dumps({"x-guidance": style, **schema})


def any_call(functions: Seq[Mapping[str, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Schema of a call of one of these functions, and its definitions (`$defs`), if it has any."""
    definitions: dict[str, Any] = {}
    forms = [call_schema(function, definitions) for function in functions]
    return (forms[0] if len(forms) == 1 else {"anyOf": forms}), {"$defs": definitions} if definitions else {}


def call_schema(function: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One call; the definitions in its parameters move into `definitions`, under the function's name."""
    name = function["name"]
    parameters = dict(function.get("parameters") or {"type": "object"})
    for key in ("$defs", "definitions"):
        own = parameters.pop(key, None)
        for part, schema in own.items() if isinstance(own, Mapping) else ():
            definitions[f"{name}.{part}"] = moved(schema, name)
    arguments = moved(parameters, name)
    if any(f'"#/$defs/{name}{end}' in json.dumps(arguments | definitions) for end in '"/'):
        definitions[name] = arguments  # it refers to itself
    properties = {"name": {"const": name}, "arguments": arguments}
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def moved(schema: Any, name: str) -> Any:
    """`schema` with its references to its own definitions under the function's name."""
    if isinstance(schema, list):
        return [moved(part, name) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        key: moved_reference(part, name) if key == "$ref" else moved(part, name)
        for key, part in schema.items()
    }


def moved_reference(reference: Any, name: str) -> Any:
    for start in ("#/$defs/", "#/definitions/"):
        if isinstance(reference, str) and reference.startswith(start):
            return f"#/$defs/{name}.{reference.removeprefix(start)}"
    whole = isinstance(reference, str) and (reference == "#" or reference.startswith("#/"))
    return f"#/$defs/{name}{reference[1:]}" if whole else reference


# what a grammar can say


def check_size(functions: Seq[Mapping[str, Any]]) -> None:
    """Raises for schemas that no grammar has room for, before they are tried."""
    size = sum(len(json.dumps(function.get("parameters"))) for function in functions)
    if size > MAX_GRAMMAR:
        limit = f"the parameters may have at most {MAX_GRAMMAR} characters as JSON, and have {size}"
        raise InvalidParameter(TOOLS, [function["name"] for function in functions], limit)


def fitted(function: Mapping[str, Any], exact: bool) -> dict[str, Any]:
    """The function with parameters that a grammar can say.

    Raises `InvalidParameter` where they are not `exact` then, though they must be.
    """
    parameters = function.get("parameters") or ANY_OBJECT
    schema, left_out = expressible(json.dumps(parameters), exact)
    if exact and left_out:
        name, keywords = function["name"], ", ".join(left_out)
        limit = f"the parameters of {name}: a grammar cannot guarantee {keywords}"
        raise InvalidParameter(TOOLS, name, limit)
    return {**function, "parameters": json.loads(schema)}


@lru_cache(KEPT)
def expressible(schema: str, exact: bool) -> tuple[str, tuple[str, ...]]:
    """(the schema without what a grammar cannot say, the keywords left out), once for each schema."""
    root = json.loads(schema)
    if callable_with(root, EXACT if exact else STYLE):
        return schema, ()
    left_out: dict[str, None] = {}
    rest = relaxed(root, root, left_out)
    if not callable_with(rest, STYLE):
        rest, left_out = ANY_OBJECT, {NO_SCHEMA: None}
    if not exact:
        names = ", ".join(name_for_log(keyword.removeprefix("$")) for keyword in left_out)
        log.warning(
            "the grammar of a tool with a schema of %d characters does not enforce %s", len(schema), names
        )
    # alternatives are not left out: more than one of them may fit
    return json.dumps(rest), tuple(left_out) or ("oneOf",)


def callable_with(parameters: Any, style: Any) -> bool:
    """Whether calls with these parameters have a grammar, among those of another function."""
    try:
        item, definitions = any_call([{"name": "f", "parameters": parameters}, {"name": "g"}])
    except RecursionError:
        return False
    return compiles({"type": "array", "items": item, **definitions}, style)


def compiles(schema: Any, style: Any = EXACT) -> bool:
    from llguidance import LLMatcher

    try:
        if endless_references(schema):
            return False
        grammar = LLMatcher.grammar_from_json_schema(schema, defaults=style)
    except (ValueError, OverflowError, RecursionError):
        return False
    faulty, _ = LLMatcher.validate_grammar_with_warnings(grammar)
    return not faulty


@lru_cache(4 * KEPT)
def alone(keyword: str, value: str) -> bool:
    return compiles({keyword: json.loads(value)})


def relaxed(schema: Any, root: Any, left_out: dict[str, None], depth: int = 1) -> Any:
    """`schema` without the keywords that do not compile alone, and without what is nested too deeply; their
    names are added to `left_out`.
    """
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        left_out[TOO_DEEP if depth > MAX_DEPTH else NO_SCHEMA] = None
        return {}

    def below(part: Any) -> Any:
        return relaxed(part, root, left_out, depth + 1)

    rest: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in BY_NAME and isinstance(value, Mapping):
            names = [name for name in value if keyword != PATTERNS or alone(keyword, json.dumps({name: {}}))]
            rest[keyword] = {name: below(value[name]) for name in names}
            if len(names) < len(value):
                left_out[keyword] = None
        elif keyword in (*LISTED, *ALONE) and isinstance(value, list) and value:
            rest[keyword] = [below(part) for part in value]
        elif keyword in ALONE and isinstance(value, Mapping):
            rest[keyword] = below(value)
        elif points_into(root, value) if keyword == "$ref" else alone(keyword, json.dumps(value)):
            rest[keyword] = value
        else:
            left_out[keyword] = None
    return rest


def points_into(root: Any, reference: Any) -> bool:
    """Whether a reference is a pointer to a part of its own schema."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return False
    for part in reference.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        if not isinstance(root, Mapping) or part not in root:
            return False
        root = root[part]
    return True
