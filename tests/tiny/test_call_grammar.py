"""Replies that may call tools: any text, and only valid calls after a tag."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any

import jsonschema
import pytest

from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import SamplingParams
from speculon.decoding.text.grammar import Grammars, Matcher
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.text.tool_calls import CLOSE, OPEN
from speculon.decoding.text.tool_schemas import call_schema, calls_grammar
from tests.tiny.demo_texts import DEMO
from tests.tiny.forms import an_object, words
from tests.tiny.scripted import Key, Request, Result
from tests.tiny.test_structured import spell, write

FUNCTIONS = [
    {"name": "f", "parameters": an_object(x={"type": "integer", "minimum": 0, "maximum": 99})},
    {"name": "go", "parameters": an_object(y={"enum": ["one", "two"]})},
]
CALL = '{"name":"go","arguments":{"y":"two"}}'
START, END = "an", "!"  # in place of the tags: the tiny vocabulary has no angle brackets


@cache
def demo() -> Grammars:
    tokenizer = Tokenizer(load_tokenizer(DEMO))
    return Grammars(tokenizer, tokenizer.vocab_size, [tokenizer.inner.eos_token_id])


def matcher(grammar: str) -> Matcher:
    found = demo().matcher(SamplingParams(structured={"grammar": grammar}))
    assert found is not None
    return found


def follows(grammar: str, text: str) -> bool:
    """Whether the whole text may be written and end there."""
    found, tokenizer = matcher(grammar), demo().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(text, add_special_tokens=False)
    return found.allows([*ids, *demo().ends]) == len(ids) + 1 and found.find_end(tuple(ids)) is None


PARALLEL = [True, False]
SPECIAL = [0, 1, 2]  # of the demo's tokenizer


@pytest.mark.parametrize("parallel", PARALLEL)
def test_free_text_is_any_text(parallel: bool) -> None:
    grammar = calls_grammar(FUNCTIONS, parallel, SPECIAL)
    for text in ("", "Hi < <tool_ca </tool_call>\n\té🙂", "<|im_start|>a<|endoftext|><|endoftext|>b"):
        assert follows(grammar, text)
    start = demo().allowed([(matcher(grammar), ())])[0]
    assert (~start).sum() == 1, "the byte FF, which no text has"


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_tag_is_followed_by_a_call_of_a_known_function(parallel: bool) -> None:
    grammar = calls_grammar(FUNCTIONS, parallel, SPECIAL)
    texts = {
        f"Well: {OPEN}{CALL}{CLOSE}": parallel,  # else the reply ends by itself
        f"<|im_start|>{OPEN}{CALL}{CLOSE} and {OPEN}{CALL}{CLOSE}<|im_start|>z": parallel,
        f"a{OPEN}": False,
        f"a{OPEN}text": False,
        f"a{OPEN}{CALL}": False,
        f"a{OPEN}{CALL.replace('go', 'no')}{CLOSE}": False,
        f"a{OPEN}{CALL.replace('two', 'ten')}{CLOSE}": False,
        f"a{OPEN}{CALL}{CLOSE}{OPEN}{{}}{CLOSE}": False,
    }
    assert {text: follows(grammar, text) for text in texts} == texts


def test_a_reply_of_one_call_ends_after_it() -> None:
    found, tokenizer = matcher(calls_grammar(FUNCTIONS, False, SPECIAL)), demo().tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode(f"a{OPEN}{CALL}{CLOSE}", add_special_tokens=False)
    assert found.consume(ids) and found.complete


@pytest.mark.parametrize("parallel", PARALLEL)
def test_a_reply_of_a_form_is_calls_or_that_form(parallel: bool) -> None:
    form = an_object(a={"type": "integer"})
    grammar = calls_grammar(FUNCTIONS, parallel, SPECIAL, form)
    assert not follows(grammar, "text") and not follows(grammar, f"{OPEN}{{}}{CLOSE}")
    for text in ('{"a":', f"{OPEN}{CALL}{CLOSE}"[:-1]):
        found, tokenizer = matcher(grammar), demo().tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert found.allows(ids) == len(ids)


# engines


def requests() -> list[Request]:
    grammar = calls_grammar(FUNCTIONS, True, sorted(words().special_ids))
    grammar = grammar.replace(OPEN, START).replace(CLOSE, END)
    often = dict.fromkeys(words().encode(START, add_special_tokens=False), 3.0)
    return [
        Request(
            [1, *range(20 + i, 24 + 2 * i)],
            SamplingParams(max_tokens=90, seed=i, logit_bias=often, structured={"grammar": grammar}),
            {"method": "off"},
            f"r{i}",
        )
        for i in range(12)
    ]


@cache
def plain() -> dict[Key, Result]:
    return write(requests())


def calls_of(text: str) -> list[str]:
    """What stands between tags; the last one may be cut."""
    parts = re.split(START, text)
    return [part.partition(END)[0] for part in parts[1:] if END in part]


def test_calls_are_valid_and_the_text_before_them_is_what_it_was_without_tools() -> None:
    schemas: dict[str, Any] = {str(one["name"]): call_schema(one, {}) for one in FUNCTIONS}
    free = write(
        [replace(one, params=one.params.model_copy(update={"structured": None})) for one in requests()]
    )
    found = 0
    for key, result in plain().items():
        for call in calls_of(spell(result)):
            found += 1
            jsonschema.validate(json.loads(call), schemas[json.loads(call)["name"]])
        before = spell(result).partition(START)[0]
        assert spell(free[key]).startswith(before)
    assert found > 5, [spell(one) for one in plain().values()]
