"""Texts of a given form: schemas, a tokenizer small enough for the tiny models, and what a right text is."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import jsonschema
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import ByteLevel as Joined
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

from speculon.core.config import EngineConfig
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.engine import Engine
from speculon.runtimes.torch.model.target import Target
from tests.engines import engine_on
from tests.tiny.conftest import tiny_target

CHARACTERS = [chr(code) for code in range(32, 127) if chr(code) not in "#$%&@^`|~;<>"]
MERGES = [('"', ":"), ('"', ","), ("{", '"'), ("a", "n")]  # what JSON is full of, and what strings may hold
Schema = dict[str, Any]


@cache
def words(eos: str | None = "</s>") -> Tokenizer:
    """A byte-level tokenizer of fewer ids than the tiny models have logits; 0, 1 and 2 are special."""
    pieces = [
        "<pad>",
        "<s>",
        "</s>",
        *(c.replace(" ", "\u0120") for c in CHARACTERS),
        *(a + b for a, b in MERGES),
    ]
    backend = Backend(BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False, use_regex=False), Joined()
    backend.add_special_tokens(["<pad>", "<s>", "</s>"])
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=eos))


def an_object(**properties: Schema) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS: dict[str, Schema] = {
    "strings": an_object(
        name={"type": "string", "maxLength": 6}, age={"type": "integer", "minimum": 0, "maximum": 150}
    ),
    "array": {"type": "array", "items": {"enum": ["red", "blue", 7, None]}, "maxItems": 4},
    "nested": an_object(
        at=an_object(x={"type": "integer", "minimum": -9, "maximum": 9}, ok={"type": "boolean"}),
        tags={"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 3},
    ),
    "either": {
        "anyOf": [
            {"type": "string", "maxLength": 5},
            an_object(n={"type": "integer", "minimum": 1, "maximum": 12}),
        ]
    },
    "numbers": {
        "type": "array",
        "items": {"type": "number", "minimum": 0, "maximum": 1},
        "minItems": 2,
        "maxItems": 2,
    },
}
ENDLESS = ("numbers",)  # digits without a bound: a text may be cut off by max_tokens
FORMS: dict[str, dict[str, Any]] = {
    **{name: {"json_schema": schema} for name, schema in SCHEMAS.items()},
    "regex": {"regex": "(an|[a-f]){2,9}(-[0-9]{2}){1,3}"},
    "choice": {"choice": ["an apple", "a pear", "a pear tree", 'no "thing"']},
    "grammar": {"grammar": 'start: word ("," word){1,3}\nword: /[a-z]{1,5}/'},
}


def check(name: str, text: str) -> None:
    """Raises unless the text is one of the form's."""
    form = FORMS[name]
    if "json_schema" in form:
        jsonschema.validate(json.loads(text), form["json_schema"])
        outside = re.sub(r'"(\\.|[^"\\])*"', "", text)
        assert not any(c.isspace() for c in outside)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        assert re.fullmatch(form.get("regex", "[a-z]{1,5}(,[a-z]{1,5}){1,3}"), text)


def engine_of(target: Target | None = None, eos: str | None = "</s>", **settings: Any) -> Engine:
    """Under policy `fixed` unless `speculation` names another."""
    speculation = {"policy": "fixed", **settings.pop("speculation", {})}
    config = EngineConfig(**{"block_size": 4, **settings}, speculation=speculation)
    return engine_on(target or tiny_target("llama"), words(eos), config)
