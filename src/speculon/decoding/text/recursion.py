"""References of a JSON schema into itself that no finite value follows.

A grammar of such a schema compiles, and its text never ends: a node that requires another node.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

BY_NAME = ("properties", "patternProperties")
LISTED = ("anyOf", "oneOf", "allOf", "prefixItems")
ALONE = ("items", "additionalProperties")


def endless_references(schema: Any) -> list[str]:
    """The references that the schema uses, directly or through others, and whose values never end.

    Raises RecursionError for a schema of too many levels.
    """
    users = references(schema)
    finite: set[str] = set()
    undecided = deque(users)
    while undecided:
        reference = undecided.popleft()
        if reference not in finite and ends(resolve(schema, reference), finite):
            finite.add(reference)
            undecided += users[reference]
    return [reference for reference in users if reference not in finite]


def references(root: Any) -> dict[str, list[str]]:
    """Each reference that the schema uses, and the references whose targets use it in turn."""
    users: defaultdict[str, list[str]] = defaultdict(list)
    found: deque[str | None] = deque([None])  # None: the schema itself
    while found:
        user = found.popleft()
        for reference in used(root if user is None else resolve(root, user)):
            if reference not in users:
                users[reference] = []
                found.append(reference)
            if user is not None:
                users[reference].append(user)
    return dict(users)


def used(schema: Any) -> Iterator[str]:
    """The references in a schema, without those of its definitions."""
    below = [schema]
    while below:
        part = below.pop()
        if isinstance(part, Mapping):
            if isinstance(part.get("$ref"), str):
                yield part["$ref"]
            below += [value for key in ALONE if (value := part.get(key)) is not None]
            below += [value for key in LISTED for value in listed(part, key)]
            below += [value for key in BY_NAME for value in named(part, key).values()]


def ends(schema: Any, finite: set[str]) -> bool:
    """Whether some value of a schema is finite, where only these references are known to be."""
    if not isinstance(schema, Mapping):
        return True
    if isinstance(schema.get("$ref"), str) and schema["$ref"] not in finite:
        return False
    if not all(ends(part, finite) for part in listed(schema, "allOf")):
        return False
    for key in ("anyOf", "oneOf"):
        branches = listed(schema, key)
        if branches and not any(ends(part, finite) for part in branches):
            return False
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or "enum" in schema or "const" in schema:
        return True
    return any(
        object_ends(schema, finite)
        if one == "object"
        else array_ends(schema, finite)
        if one == "array"
        else True
        for one in types
    )


def object_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    """Whether its required properties end, and enough of the others for the least number."""
    properties, patterns = named(schema, "properties"), list(named(schema, "patternProperties").values())
    additional = schema.get("additionalProperties", True)
    others = patterns if additional is False else [*patterns, additional]
    required = [name for name in listed(schema, "required") if isinstance(name, str)]
    for name in required:
        # of a name without a schema of its own any pattern may be the right one
        if not any(ends(part, finite) for part in ([properties[name]] if name in properties else others)):
            return False
    least = schema.get("minProperties", 0)
    if not isinstance(least, int | float) or least <= len(required):
        return True
    optional = [part for name, part in properties.items() if name not in required]
    return any(ends(part, finite) for part in (*optional, *others))


def array_ends(schema: Mapping[str, Any], finite: set[str]) -> bool:
    """Whether the items end that it has at least."""
    least = schema.get("minItems", 0)
    if not isinstance(least, int | float) or least <= 0:
        return True
    first = listed(schema, "prefixItems")
    rest = [schema.get("items", True)] if least > len(first) else []
    return all(ends(part, finite) for part in (*first[: int(least)], *rest))


def resolve(root: Any, reference: str) -> Any:
    """The part of a schema that a pointer into it names; True, which anything fits, where there is none."""
    if reference != "#" and not reference.startswith("#/"):
        return True
    for key in unquote(reference).split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping) and key in root:
            root = root[key]
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return True
    return root


def listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []


def named(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = schema.get(key)
    return value if isinstance(value, Mapping) else {}
