"""Seeded requests for JSON of the shipped model: every text ends by itself, parses, validates, and is the
text without drafts.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema

from speculon import LLM, SamplingParams
from speculon.engine.outputs import RequestOutput
from tests.tiny.forms import Schema, an_object

PROMPTS = [
    "import json\n\nrecord = ",
    "x = ",
    "# the settings\n",
    "def test():\n    assert load() == ",
    '{"a": 1}\n',
]
WORD = {"type": "string", "maxLength": 12}
DEMO_SCHEMAS: list[Schema] = [
    an_object(
        name=WORD,
        age={"type": "integer", "minimum": 0, "maximum": 120},
        tags={"type": "array", "items": WORD, "maxItems": 3},
    ),
    {
        "type": "array",
        "items": an_object(id={"type": "integer", "minimum": 1, "maximum": 999}, ok={"type": "boolean"}),
        "maxItems": 4,
    },
    an_object(
        type={"enum": ["file", "folder", "link"]},
        size={"type": "number", "minimum": 0, "maximum": 1, "multipleOf": 0.01},
        owner=an_object(
            user={"type": "string", "minLength": 2, "maxLength": 8},
            group={"type": ["string", "null"], "maxLength": 8},
        ),
    ),
    {
        "anyOf": [
            WORD,
            {
                "type": "array",
                "items": {"type": "integer", "minimum": -9, "maximum": 9},
                "minItems": 2,
                "maxItems": 6,
            },
        ]
    },
    an_object(title=WORD, body={"type": "string", "maxLength": 40}, done={"const": True}),
]


def requests(count: int) -> tuple[list[str], list[SamplingParams]]:
    chance = random.Random(0)
    prompts = [chance.choice(PROMPTS) for _ in range(count)]
    forms = [{"json_schema": DEMO_SCHEMAS[i % len(DEMO_SCHEMAS)]} for i in range(count)]
    return prompts, [SamplingParams(max_tokens=200, seed=i, structured=form) for i, form in enumerate(forms)]


def write(llm: LLM, count: int, speculation: dict[str, Any]) -> list[RequestOutput]:
    prompts, params = requests(count)
    return llm.generate(prompts, params, speculation=speculation)


def wrong(outputs: list[RequestOutput]) -> list[str]:
    """The texts that did not end by themselves, do not parse, or are not of their schema."""
    found = []
    for i, output in enumerate(outputs):
        try:
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), DEMO_SCHEMAS[i % len(DEMO_SCHEMAS)])
        except (AssertionError, ValueError, jsonschema.ValidationError):
            found.append(output.text)
    return found
