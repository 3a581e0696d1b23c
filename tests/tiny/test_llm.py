"""The synchronous interface, over a whole checkpoint on disk."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from speculon import LLM, SamplingParams
from speculon.core.errors import (
    ConfigError,
    EmptyPrompt,
    InvalidParameter,
    InvalidRequest,
    TooLong,
)
from speculon.core.types import SpanOutcome
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.scripted import assert_idle

GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
PROMPT = "def add(first, second):\n    return first"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llm") / "model")


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), max_num_seqs=8, speculation={"policy": "fixed"})


def test_a_string_a_list_and_token_ids_say_the_same(llm: LLM):
    ids = llm.tokenizer.encode(PROMPT)
    texts = [llm.generate(prompt, GREEDY)[0].text for prompt in (PROMPT, [PROMPT], ids, [ids])]
    assert len(set(texts)) == 1 and texts[0]


def test_by_default_the_outputs_are_the_plain_ones(folder: Path, llm: LLM):
    """Nobody names a policy, a method or K; twice, for the second time there are earlier answers."""
    default = LLM(str(folder))
    assert default.config.speculation.policy == "goodput" and default.engine.policy.costs.known
    prompts = [PROMPT, "a", PROMPT + PROMPT]
    for params in (GREEDY, GREEDY.model_copy(update={"temperature": 0.9, "seed": 3})):
        plain = [out.token_ids for out in llm.generate(prompts, params, speculation={"method": "off"})]
        for _ in range(2):
            assert [out.token_ids for out in default.generate(prompts, params)] == plain


def test_results_come_in_the_order_of_the_prompts_each_with_its_own_settings(llm: LLM):
    prompts = [PROMPT, "a", "class Stack:"]
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (30, 5, 12)]
    wishes = [{"method": "off"}, None, {"method": "ngram", "num_speculative_tokens": 2}]
    together = llm.generate(prompts, params, speculation=wishes)
    assert [len(out.token_ids) for out in together] == [30, 5, 12]
    for prompt, p, out in zip(prompts, params, together, strict=True):
        assert llm.generate(prompt, p)[0].text == out.text
    assert together[0].speculation.drafted == 0 and set(together[0].reasons) == {"off_request"}


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "speculation"),
    [("a", 1, None), ("ab" * 20, 1, {"method": "ngram"}), ("a", 9, {"method": "off"}), ("a", 0, None)],
)
def test_without_a_round_the_counts_are_there(
    llm: LLM, prompt: str, max_tokens: int, speculation: dict[str, Any] | None
) -> None:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    done = llm.generate(prompt, params, speculation=speculation)[0].speculation
    assert (done.rounds, done.drafted, done.accepted, done.acceptance_rate) == (0, 0, 0, 0.0)
    assert (done.target_calls, done.emitted) == (max(1, max_tokens), max_tokens)


def test_the_result_says_what_speculation_did(llm: LLM):
    out = llm.generate("ab" * 20, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))[0]
    stats = out.speculation
    assert stats.rounds > 0
    assert stats.drafted == stats.accepted + stats.rejected
    assert stats.emitted == 60 == len(out.token_ids)
    assert stats.tokens_per_target_call == pytest.approx(60 / stats.target_calls)
    assert set(stats.to_dict()) >= {
        "draft_calls",
        "verified_positions",
        "per_position",
        "by_source",
        "span_outcomes",
        "saved_ms",
    }


@pytest.mark.parametrize("method", ["off", "ngram"])
def test_a_stop_token_is_a_token_of_its_target_call(llm: LLM, method: str) -> None:
    whole = llm.generate(PROMPT, GREEDY)[0].token_ids
    params = GREEDY.model_copy(update={"stop_token_ids": (whole[-1],)})
    out = llm.generate(PROMPT, params, speculation={"method": method})[0]
    stats = out.outputs[0].stats
    assert out.outputs[0].stop == whole[-1] and whole[-1] not in out.token_ids
    assert (stats.emitted, stats.stop_tokens) == (len(out.token_ids), 1)
    if method == "off":
        assert stats.tokens_per_target_call == 1.0


def test_a_prompt_of_one_token_has_no_log_probability(llm: LLM):
    for ids, expected in (([5], 1), ([5, 6], 2)):
        (out,) = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=1))
        assert out.prompt_logprobs is not None and len(out.prompt_logprobs) == expected
        assert out.prompt_logprobs[0] is None


def test_a_stream_is_the_whole_text_and_closing_it_frees_the_pages(llm: LLM):
    whole = llm.generate(PROMPT, GREEDY)[0].text
    assert "".join(llm.stream(PROMPT, GREEDY)) == whole
    stream = llm.stream(PROMPT, GREEDY)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.has_work
    llm.engine.check_integrity()


@pytest.mark.timeout(120)
def test_streams_read_in_turns_and_a_generate_between_lose_nothing(llm: LLM):
    first, second = "class Stack:", PROMPT
    wholes = [llm.generate(prompt, GREEDY)[0].text for prompt in (first, second)]
    streams = [llm.stream(prompt, GREEDY) for prompt in (first, second)]
    texts = [next(streams[0]), next(streams[1])]
    between = llm.generate("a", SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))[0]
    assert len(between.token_ids) == 2 and llm.engine.has_work  # it waits for its own texts alone
    for i in (1, 0):
        texts[i] += "".join(streams[i])
    assert texts == wholes and not llm.engine.has_work


def test_a_session_finds_its_earlier_turns_in_pages(llm: LLM):
    session = llm.session(SamplingParams(temperature=0, max_tokens=20, ignore_eos=True), system="Be brief.")
    session.send("Write a function that adds two numbers.")
    before = llm.engine.counters.totals.cached_tokens
    second = session.send("Now with a docstring.")
    found = llm.engine.counters.totals.cached_tokens - before
    assert found > 0.5 * len(second.prompt_token_ids) - llm.config.block_size
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    fresh = llm.generate([second.prompt_token_ids], session.params)[0]
    assert fresh.text == second.text


def test_a_refused_turn_leaves_the_conversation_as_it_was(llm: LLM):
    session = llm.session(SamplingParams(temperature=0, max_tokens=4))
    session.send("hello")
    before = list(session.messages)
    with pytest.raises(TooLong):
        session.send("x" * 5000)
    assert session.messages == before


def test_a_session_after_a_stop_string_sends_the_text_and_not_its_remains(llm: LLM):
    plain = llm.chat([{"role": "user", "content": "hello"}], GREEDY).text
    session = llm.session(SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, stop=plain[3:5]))
    first = session.send("hello")
    assert first.text == plain[: plain.find(plain[3:5])]
    second = session.send("again")
    assert second.prompt_token_ids == llm.tokenizer.apply_chat(session.messages[:-1])


@pytest.mark.parametrize(
    ("prompts", "params", "speculation", "error", "message"),
    [
        pytest.param([PROMPT, ""], GREEDY, None, EmptyPrompt, "no tokens", id="one of two"),
        pytest.param(
            [PROMPT], [GREEDY, GREEDY], None, InvalidRequest, "2 values for 1 prompts", id="params per prompt"
        ),
        pytest.param("a\ud800b", GREEDY, None, InvalidParameter, "surrogate", id="no text"),
        pytest.param([[True, "2"]], GREEDY, None, InvalidParameter, "token ids", id="no ids"),
        pytest.param([None], GREEDY, None, InvalidParameter, "prompt = None", id="no prompt"),
        pytest.param(b"abc", GREEDY, None, InvalidParameter, "prompts = b'abc'", id="bytes"),
        pytest.param(
            PROMPT,
            {"temperature": 0},
            None,
            InvalidParameter,
            "must be SamplingParams",
            id="params as a dict",
        ),
        pytest.param(
            PROMPT,
            GREEDY,
            "ngram",
            InvalidParameter,
            "speculation = 'ngram': must be",
            id="a method for the settings",
        ),
    ],
)
def test_what_is_no_call_is_refused_by_name_and_nothing_is_left_running(
    llm: LLM, prompts: object, params: object, speculation: object, error: type[Exception], message: str
):
    with pytest.raises(error, match=message):
        llm.generate(prompts, params, speculation=speculation)  # type: ignore[arg-type]
    assert_idle(llm)


@pytest.mark.parametrize(
    ("device", "message"),
    [
        pytest.param("abacus", "device = 'abacus': must be auto, cpu", id="unknown"),
        pytest.param("cuda:99", "device = 'cuda:99': this machine has [0-9] cuda devices", id="absent"),
    ],
)
def test_a_device_that_is_not_there_stops_the_start(folder: Path, device: str, message: str):
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), device=device)


# stop strings that are shown, and what became of each draft


@pytest.mark.parametrize("method", ["off", "suffix"])
def test_a_stop_string_is_in_the_text_where_it_is_asked_for(llm: LLM, method: str):
    whole, way = llm.generate(PROMPT, GREEDY)[0].text, {"method": method}
    stop = whole[10:13]
    hidden = GREEDY.model_copy(update={"stop": (stop,)})
    shown = hidden.model_copy(update={"include_stop_str_in_output": True})
    without, with_it = (llm.generate(PROMPT, params, speculation=way)[0] for params in (hidden, shown))
    assert with_it.text == without.text + stop == whole[: whole.index(stop) + len(stop)]
    assert with_it.token_ids == without.token_ids
    assert "".join(llm.stream(PROMPT, shown, speculation=way)) == with_it.text
    assert llm.session(shown, raw=True).send(PROMPT).text == with_it.text


@pytest.mark.parametrize("method", ["off", "ngram", "suffix"])
def test_every_token_has_a_fate(llm: LLM, method: str):
    params = GREEDY.model_copy(update={"max_tokens": 100})
    for _ in range(2):  # the second time there are earlier answers
        one = llm.generate(PROMPT, params, speculation={"method": method})[0].outputs[0]
    fates, outcomes = Counter(one.fates), one.stats.outcomes
    assert len(one.fates) == len(one.sources) == len(one.token_ids)
    assert [source is not None for source in one.sources] == [fate == "accepted" for fate in one.fates]
    assert fates["accepted"] == one.stats.accepted and (method == "off" or fates["accepted"])
    assert fates["bonus"] == outcomes[SpanOutcome.FULL]
    assert fates["correction"] == outcomes[SpanOutcome.TAIL] + outcomes[SpanOutcome.EARLY]
    assert fates["plain"] == one.stats.target_calls - one.stats.rounds


HELLO = [{"role": "user", "content": "hello"}]
CLASS = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "class"}]


def test_the_tokenizer_is_the_one_of_transformers(llm: LLM):
    tokenizer = llm.get_tokenizer()
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == llm.chat(HELLO, GREEDY).prompt_token_ids


def test_a_list_of_conversations_gives_a_list_of_answers(llm: LLM):
    one, other = llm.chat(HELLO, GREEDY), llm.chat(CLASS, GREEDY)
    both = llm.chat([HELLO, CLASS], GREEDY)
    assert [out.text for out in both] == [one.text, other.text]
    assert [out.text for out in llm.chat([HELLO], GREEDY)] == [one.text]
    short = GREEDY.model_copy(update={"max_tokens": 2})
    assert [len(out.token_ids) for out in llm.chat([HELLO, CLASS], [short, GREEDY])] == [2, 24]


@pytest.mark.parametrize("messages", [[], [[]], [HELLO, []], [HELLO, HELLO[0]], [HELLO[0], HELLO], "hello"])
def test_conversations_that_are_none_are_refused(llm: LLM, messages: Any):
    with pytest.raises(InvalidParameter, match="messages"):
        llm.chat(messages, GREEDY)
