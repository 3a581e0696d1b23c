"""Forms and stop strings begin after a thinking, also in the middle of a draft."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from tokenizers import AddedToken

from speculon.checkpoints.reading import load_tokenizer
from speculon.core.config import SamplingParams, Thinking
from speculon.decoding.text.grammar import Grammars
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.text.tool_schemas import calls_grammar
from tests.tiny.demo_texts import DEMO
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.forms import FORMS, an_object, check, words
from tests.tiny.scripted import Key, Request, Result, script
from tests.tiny.test_structured import spell, write

TAGS = ("<think>", "</think>")
ALL_TAGS = (*TAGS, "<tool_call>", "</tool_call>")
AGE = an_object(age={"type": "integer"})
TEXT = {"regex": "(?s:.)*"}
METHODS: list[dict[str, Any]] = [
    {"method": "ngram"},
    {"method": "draft_model", "num_speculative_tokens": 3},
    {"method": "scripted", "num_speculative_tokens": 8},
    {"method": "auto", "num_speculative_tokens": 1},
]


@cache
def grammars(special: bool) -> Grammars:
    """Of the demo's tokenizer; `special` are the tags special tokens of it, else text."""
    inner = load_tokenizer(DEMO)
    if special:
        inner.add_tokens([AddedToken(tag, special=True) for tag in ALL_TAGS], special_tokens=True)
    tokenizer = Tokenizer(inner)
    return Grammars(tokenizer, tokenizer.vocab_size, [inner.eos_token_id])


def follows(form: dict[str, Any], opened: bool, special: bool, text: str) -> bool:
    """Whether the whole text may be written, and end there."""
    home = grammars(special)
    found = home.matcher(SamplingParams(structured=form, thinking=Thinking(opened=opened)))
    assert found is not None and home.tokenizer is not None
    ids = home.tokenizer.encode(text, add_special_tokens=False)
    end = found.find_end((*ids, *home.ends))
    assert end is not None
    return found.allows(ids) == len(ids) and end[0] >= len(ids) - 1 and end[1].reason == "stop"


FORMED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a schema": ({"json_schema": AGE}, '{"age":7}', '{"name":7}'),
    "an object": ({"json_object": True}, '{"a":[]}', "[]"),
    "a regex": ({"regex": "[ab]+c"}, "abac", "ca"),
    "a choice": ({"choice": ["yes", "no"]}, "no", "noon"),
    "a grammar": ({"grammar": 'start: "x" y\ny: /[0-9]+/'}, "x12", "y1"),
}


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("case", FORMED)
def test_a_form_begins_after_the_thinking(case: str, special: bool) -> None:
    form, right, wrong = FORMED[case]
    thoughts = ["", "plan < {", f"{right} <|im_start|> </thin"]
    for thought in thoughts:
        for blanks in ("", "\n\n"):
            closed = f"{thought}</think>{blanks}"
            assert follows(form, True, special, closed + right)
            assert not follows(form, True, special, closed + wrong)
            assert follows(form, False, special, f"<think>{closed}{right}")
            assert not follows(form, False, special, f"<think>{closed}{wrong}")
    assert not follows(form, True, special, right)
    assert follows(form, False, special, right) and not follows(form, False, special, wrong)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
def test_a_thinking_is_no_free_text(special: bool) -> None:
    """Free text may begin with a tag, too: then it is a thinking."""
    assert follows(TEXT, False, special, "<think>a</think>b") and follows(TEXT, False, special, "a")
    assert not follows(TEXT, False, special, "<think>a")


FUNCTIONS = [{"name": "f", "parameters": AGE}]
CALL = '{"name":"f","arguments":{"age":7}}'
TAGGED = f"<tool_call>{CALL}</tool_call>"


@pytest.mark.parametrize("special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("opened", [False, True])
def test_a_call_is_guided_after_the_thinking_alone(opened: bool, special: bool) -> None:
    tokenizer = grammars(special).tokenizer
    assert tokenizer is not None
    tags = {tag: tokenizer.token_id(tag) or 0 for tag in ALL_TAGS} if special else {}
    free = [token for token in (0, 1, 2) if token not in tags.values()]
    form = {"grammar": calls_grammar(FUNCTIONS, True, free, tag_ids=tags)}
    before = "" if opened else "<think>"
    texts = {
        f"{before}or <tool_call> x</think>\n\nno": True,
        f"{before}or <tool_call> x</think>so {TAGGED}": True,
        f"{before}</think>so {TAGGED} <|im_start|>and {TAGGED}": True,
        f"{before}or {TAGGED}</think><tool_call> x": False,
        f"{before}or {TAGGED}</think>a <tool_call> x": False,
        f"{before}or {TAGGED}</think>a <|im_start|><tool_call> x": False,
    }
    assert {text: follows(form, opened, special, text) for text in texts} == texts


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("form", [None, AGE], ids=["text", "form"])
def test_tags_of_calls_may_be_special_tokens(parallel: bool, form: Any) -> None:
    home = grammars(True)
    assert home.tokenizer is not None
    tags = {tag: home.tokenizer.token_id(tag) or 0 for tag in ALL_TAGS}
    found = home.matcher(
        SamplingParams(structured={"grammar": calls_grammar(FUNCTIONS, parallel, [0, 1, 2], form, tags)})
    )
    assert found is not None
    start = "" if form else "a <|im_start|>b"
    for call, right in ((CALL, True), ("x", False), (CALL.replace("f", "g"), False)):
        ids = home.tokenizer.encode(f"{start}<tool_call>{call}</tool_call>", add_special_tokens=False)
        assert (found.allows(ids) == len(ids)) is right


def test_a_form_that_nothing_fits_is_refused_with_a_thinking_before_it() -> None:
    with pytest.raises(Exception, match="unsatisfiable|Unsatisfiable"):
        follows({"json_schema": {"enum": []}}, True, False, "a")


# engines: the tiny vocabulary has no angle brackets

OPEN, CLOSE = "an", "!"
STOPS = ("e", "(")


def requests() -> list[Request]:
    often = {words().encode(text, add_special_tokens=False)[0]: 4.0 for text in (CLOSE, STOPS[0])}
    forms = [*FORMS.items(), *[("free", None)] * 6]
    return [
        Request(
            [1, *range(20 + i, 24 + 2 * i)],
            SamplingParams(
                max_tokens=90,
                seed=i,
                logit_bias=often,
                structured=form,
                ignore_eos=form is None,
                stop=() if form else STOPS,
                thinking=Thinking(start=OPEN, end=CLOSE, opened=opened),
            ),
            {"method": "off"},
            f"{name} {i} {opened}",
        )
        for i, (name, form) in enumerate(forms)
        for opened in (True, False)
    ]


@cache
def plain() -> dict[Key, Result]:
    return write(requests())


def test_an_answer_has_its_form_and_ends_at_its_stop_string() -> None:
    formed = stopped = 0
    for request in requests():
        result, form = plain()[request.id, 0], request.params.structured
        thinking = request.params.thinking
        assert thinking is not None
        text = spell(result)
        before, closed, answer = text.partition(CLOSE) if thinking.opened else ("", "!", text)
        if not closed or not thinking.opened or result.finish.reason != "stop":
            continue
        if form is not None:
            formed += 1
            check(request.id.split()[0], answer.lstrip("\n"))
        elif any(stop in before for stop in STOPS):
            stopped += 1
            assert sum(answer.count(stop) for stop in STOPS) == 1 and answer[-1] in STOPS
    assert formed > 2 and stopped > 0, [spell(one) for one in plain().values()]


@pytest.mark.parametrize("shift", [0, len(METHODS) // 2])
def test_drafts_change_no_token(shift: int) -> None:
    noisy_draft()
    script({key: result.tokens for key, result in plain().items()})
    results: dict[Key, Result] = write(
        [
            Request(one.prompt, one.params, METHODS[(i + shift) % len(METHODS)], one.id)
            for i, one in enumerate(requests())
        ],
        speculation=DRAFT,
    )
    for key, result in results.items():
        assert (result.tokens, result.finish) == (plain()[key].tokens, plain()[key].finish), key
    assert sum(result.stats.accepted for result in results.values()) > 20
