"""Where structured texts end, what is refused at admission, and the masks themselves."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from speculon.cli.options import pick
from speculon.core.config import EngineConfig, SamplingParams, Structured, Thinking
from speculon.core.errors import InvalidParameter
from speculon.decoding.text import grammar as grammar_module
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.engine.decoder import SpeculativeDecoder
from speculon.engine.engine import Engine
from speculon.runtimes.torch.model.target import Target
from tests.engines import engine_on
from tests.tiny.conftest import tiny_model, tiny_target
from tests.tiny.forms import FORMS, SCHEMAS, check, engine_of, words
from tests.tiny.scripted import Letters, Result, drain
from tests.tiny.test_structured import EOS, OFF, plain, requests_of, spell, write

# where texts end


def one(
    structured: dict[str, Any] | None, speculation: Any = None, target: Target | None = None, **params: Any
) -> Result:
    """The text of one request, the same with forced drafts and without."""
    found: list[Result] = []
    for how in (OFF, speculation or {"method": "ngram"}):
        engine = engine_of(target, None if target else "</s>")
        sampling = SamplingParams(**{"max_tokens": 60, "seed": 3, "structured": structured, **params})
        engine.add_request([1, 30, 31], sampling, how, "r")
        found.append(drain(engine)["r", 0])
    plainly, drafted = found
    assert (plainly.tokens, plainly.finish) == (drafted.tokens, drafted.finish)
    return drafted


def grammars_of(engine: Engine) -> grammar_module.Grammars:
    return engine.admission._grammars


def without_eos() -> Target:
    target = tiny_target("llama")
    made = Target.__new__(Target)
    made.__dict__.update({**target.__dict__, "eos_ids": frozenset()})
    return made


LETTERS = {"regex": "[a-f]{3,40}"}


def test_a_sequence_that_can_go_on_ends_where_the_model_ends_it() -> None:
    lengths = {seed: len(one(LETTERS, seed=seed, logit_bias={EOS: 3.0}).tokens) for seed in range(8)}
    assert min(lengths.values()) >= 3 and max(lengths.values()) < 40
    ended = one(LETTERS, logit_bias={EOS: 3.0})
    assert ended.finish and ended.finish.matched == EOS


@pytest.mark.parametrize("more", [{"ignore_eos": True}, {"min_tokens": 50}], ids=str)
def test_who_does_not_want_to_end_goes_on_as_far_as_the_grammar_does(more: dict[str, Any]) -> None:
    result = one(LETTERS, **more, logit_bias={EOS: 3.0})
    assert 20 <= len(result.tokens) <= 40 and len(spell(result)) == 40
    assert result.finish and (result.finish.reason, result.finish.matched) == ("stop", None)
    check("choice", spell(one(FORMS["choice"], **more)))


def test_a_complete_output_ends_without_another_call() -> None:
    result = one({"regex": "abc"}, OFF)
    assert spell(result) == "abc" and result.stats.target_calls == len(result.tokens)
    exact = one({"regex": "abc"}, max_tokens=3)
    assert exact.finish and exact.finish.reason == "stop"  # also where max_tokens ends it, too
    assert one({"regex": "abc"}, max_tokens=2).finish.reason == "length"  # type: ignore[union-attr]


def test_a_model_without_an_end_token_ends_by_completeness() -> None:
    for name in ("strings", "nested", "choice", "regex"):
        result = one(FORMS[name], target=without_eos())
        assert result.finish and result.finish.reason == "stop", spell(result)
        check(name, spell(result))
    assert len(spell(one(LETTERS, target=without_eos()))) == 40
    endless = one({"regex": "[a-f]+"}, target=without_eos())
    assert endless.finish and endless.finish.reason == "length" and set(spell(endless)) <= set("abcdef")


def test_a_dead_end_is_an_error_and_not_an_output() -> None:
    """The vocabulary has no # in it, which llguidance learns when the text is there."""
    result = one({"regex": "[ab]c#d"})
    assert result.finish and result.finish.reason == "error" and spell(result) in ("ac", "bc")


def test_stop_strings_and_stop_tokens_still_end_a_sequence() -> None:
    whole = spell(one(FORMS["nested"]))
    stopped = one(FORMS["nested"], stop=('"ok"',))
    assert stopped.finish and stopped.finish.matched == '"ok"' and whole.startswith(spell(stopped)[:-4])
    comma = words().encode(",", add_special_tokens=False)[0]
    stopped = one(FORMS["nested"], stop_token_ids=(comma,))
    assert stopped.finish and stopped.finish.matched == comma


def test_the_grammar_wins_where_other_rules_leave_nothing() -> None:
    banned = {token: -float("inf") for token in range(90)}
    for params in ({"logit_bias": banned}, {"bad_words": tuple("abcdefghijklmnopqrstuvwxyz")}):
        for temperature in (0.0, 1.0):
            check("choice", spell(one(FORMS["choice"], temperature=temperature, **params)))


def test_padded_ids_are_never_written() -> None:
    """They are the likeliest of all here."""
    bias = dict.fromkeys(range(words().vocab_size, 96), 50.0)
    assert set(one(None, logit_bias=bias).tokens) <= set(bias)
    for name in ("strings", "regex", "grammar"):
        check(name, spell(one(FORMS[name], logit_bias=bias)))


def test_log_probabilities_stay_raw() -> None:
    with_form = one(FORMS["strings"], logprobs=0)
    assert min(lp.rank for lp in with_form.logprobs) > 0 and max(lp.rank for lp in with_form.logprobs) > 1
    assert with_form.logprobs[0].logprob < 0  # {" is the only token that is allowed


# admission

# that only the grammar shows: references by another name, and requirements beside their properties
NAMED = {"$anchor": "n", "type": "object", "properties": {"a": {"$ref": "#n"}}, "required": ["a"]}
ENDLESS: list[dict[str, Any]] = [
    {"$ref": "#n", "$defs": {"n": NAMED}},
    {"$id": "http://x/y", **NAMED, "properties": {"a": {"$ref": "http://x/y"}}},
    {"allOf": [{"type": "object", "properties": {"a": {"$ref": "#"}}}, {"required": ["a"]}]},
    {"type": "object", "patternProperties": {"^a$": {"$ref": "#"}}, "required": ["a"]},
]


@pytest.mark.parametrize(
    ("structured", "name", "limit"),
    [
        ({"regex": "a("}, "structured.regex", "unclosed group"),
        ({"grammar": "start: foo"}, "structured.grammar", "unknown name"),
        ({"json_schema": {"type": "strin"}}, "structured.json_schema", "Invalid type: strin"),
        (
            {"json_schema": {"type": "array", "uniqueItems": True}},
            "structured.json_schema",
            "Unimplemented keys",
        ),
        ({"json_schema": {"$ref": "https://example.com/a.json"}}, "structured.json_schema", "example.com"),
        (
            {"json_schema": {"type": "string", "minLength": 3, "maxLength": 1}},
            "structured.json_schema",
            "minLength",
        ),
        ({"choice": [""]}, "structured.choice", "no text fits it but the empty one"),
        ({"regex": "#"}, "structured.regex", "no text fits it"),
        ({"regex": "ab#c"}, "structured.regex", "no text fits it"),
        ({"json_schema": {"$ref": "#"}}, "structured.json_schema", "no value of # can ever end"),
        (
            {"json_schema": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}},
            "structured.json_schema",
            "no value of # can ever end",
        ),
        *(({"json_schema": schema}, "structured.json_schema", "never ends") for schema in ENDLESS),
        ({"grammar": "start: ("}, "structured.grammar", "Expected token"),
    ],
)
def test_what_cannot_be_written_is_refused_at_admission(
    structured: dict[str, Any], name: str, limit: str
) -> None:
    engine = engine_of()
    with pytest.raises(InvalidParameter, match=limit) as caught:
        engine.add_request([1, 2], SamplingParams(structured=structured))
    assert caught.value.name == name and not engine.has_work
    assert "\n" not in str(caught.value) and "NoExtension" not in str(caught.value)
    assert caught.value.value == next(iter(structured.values())) or name == "structured.choice"


def test_a_long_constant_is_no_endless_reference() -> None:
    form = {"json_schema": {"const": "abc " * 2000}}
    engine_of().add_request([1, 2], SamplingParams(structured=form, max_tokens=4))


def test_a_schema_that_is_too_deep_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(300):
        deep = {"type": "object", "properties": {"a": deep}}
    with pytest.raises(InvalidParameter, match=r"structured\.json_schema"):
        engine_of().add_request([1, 2], SamplingParams(structured={"json_schema": deep}))


def test_without_a_fast_tokenizer_forms_are_refused() -> None:
    for tokenizer, complaint in ((None, "needs a tokenizer"), (Tokenizer(Letters()), "a fast one")):
        engine = engine_on(tiny_target("llama"), tokenizer, EngineConfig(block_size=4))
        with pytest.raises(InvalidParameter, match=complaint):
            engine.add_request([1, 2], SamplingParams(structured={"json_object": True}))


def test_a_grammar_is_compiled_once() -> None:
    engine = engine_of()
    for seed in range(5):
        engine.add_request(
            [1, 2], SamplingParams(max_tokens=2, seed=seed, structured={"json_schema": SCHEMAS["nested"]})
        )
    assert len(grammars_of(engine).compiled) == 1
    for i in range(grammar_module.MAX_COMPILED + 9):
        engine.add_request([1, 2], SamplingParams(max_tokens=2, structured={"choice": [f"a{i}"]}))
    assert len(grammars_of(engine).compiled) == grammar_module.MAX_COMPILED
    drain(engine)


def test_who_asks_for_no_form_meets_no_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither alone nor beside others that do; the logits of its rows are the same bits."""
    alone = [one for one in requests_of("sampled") if one.id.startswith("free")]
    calls: list[int] = []
    original = grammar_module.Grammars.allowed
    monkeypatch.setattr(
        grammar_module.Grammars, "allowed", lambda self, drafted: calls.append(1) or original(self, drafted)
    )
    engine = engine_of()
    for request in alone:
        engine.add_request(request.prompt, request.params, {"method": "ngram"}, request.id)
    drain(engine)
    assert not calls and grammars_of(engine)._inner is None
    write(requests_of("sampled"))
    assert calls


def test_every_step_asks_llguidance_once_for_all_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    original = grammar_module.Grammars.allowed
    monkeypatch.setattr(
        grammar_module.Grammars,
        "allowed",
        lambda self, drafted: sizes.append(len(drafted)) or original(self, drafted),
    )
    engine = engine_of()
    for request in requests_of("greedy"):
        engine.add_request(request.prompt, request.params, {"method": "ngram"}, request.id)
    before = len(sizes)
    drain(engine)
    assert len(sizes) - before <= engine.counters.steps and max(sizes[before:]) > 5


def test_an_object_may_have_a_thousand_optional_keys() -> None:
    schema = {
        "type": "object",
        "properties": {f"k{i}": {"type": "boolean"} for i in range(1000)},
        "additionalProperties": False,
    }
    result = one({"json_schema": schema}, max_tokens=12)
    assert result.finish and result.finish.reason in ("stop", "length"), spell(result)


def test_json_objects_and_any_json() -> None:
    for form, kind in (({"json_object": True}, dict), ({"json_schema": True}, object)):
        for seed in range(6):
            result = one(form, seed=seed, max_tokens=100)
            if result.finish and result.finish.reason == "stop":
                assert isinstance(json.loads(spell(result)), kind)
            assert form != {"json_object": True} or spell(result).startswith("{")


def test_masks_are_those_of_a_walk_token_by_token() -> None:
    engine = engine_of()
    params = SamplingParams(structured=FORMS["nested"])
    matcher = grammars_of(engine).matcher(params)
    assert matcher is not None
    draft = tuple(plain("sampled")["nested 2", 0].tokens)
    masks = grammar_module.forbid([(matcher, draft), (matcher.fork(), ())], torch.device("cpu"))
    assert masks.shape == (len(draft) + 2, 96)
    walker = matcher.fork()
    for row, token in enumerate(draft):
        (mask,) = grammar_module.forbid([(walker, ())], torch.device("cpu"))
        assert torch.equal(mask, masks[row]) and not mask[token]
        walker.consume([token])
    assert torch.equal(masks[-1], masks[0])


def test_a_form_can_be_a_flag() -> None:
    given = pick(SamplingParams, {"structured": '{"choice": ["a", "b"]}'})
    assert SamplingParams(**given).structured == Structured(choice=("a", "b"))
    thinking = pick(SamplingParams, {"thinking": '{"opened": true}'})
    assert SamplingParams(**thinking).thinking == Thinking(opened=True)
    for name in ("structured", "thinking"):
        with pytest.raises(InvalidParameter, match="must be JSON"):
            pick(SamplingParams, {name: "json"})


def test_rounds_by_hand_add_up_to_the_output() -> None:
    """The matcher of a round has eaten what was written before it, and `verify` takes drafts of any kind."""
    decoder = SpeculativeDecoder(
        tiny_model("llama"), method="ngram", policy="fixed", tokenizer=words().inner, block_size=4
    )
    params = SamplingParams(max_tokens=60, seed=3, structured=FORMS["nested"])
    prompt = [1, 30, 31]
    text, finish, rounds = list(prompt), None, 0
    while finish is None:
        verdict = decoder.verify(text, [40, 41, 42], params, prompt_len=3) if rounds % 2 else None
        step = decoder.step(text, params, prompt_len=3)
        assert verdict is None or verdict.tokens[0] == step.emitted_tokens[0]
        text += step.emitted_tokens
        finish, rounds = step.verdict.finish, rounds + 1
    assert text[3:] == one(FORMS["nested"]).tokens and rounds < len(text) - 3
    with pytest.raises(InvalidParameter, match="does not follow this grammar"):
        decoder.step([*prompt, 40, 41], params, prompt_len=3)
