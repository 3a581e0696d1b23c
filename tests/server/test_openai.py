"""The official client against the real server over the demo model: what its users rely on."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.recording import SequenceRound, read
from tests.server.conftest import EVENTS
from tests.server.outside import LOCAL_HTTP, Outside
from tests.server.test_answers import check_alike

CODE = "def add(a, b):\n"
ASK: list[Any] = [{"role": "user", "content": "Write a function that adds two numbers."}]
EDIT = "def area(width, height):\n    result = width * height\n    return result\n"


def complete(client: openai.OpenAI, prompt: Any = CODE, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": "demo", "max_tokens": 24, **more}
    return client.completions.create(prompt=prompt, **fields)


def chat(client: openai.OpenAI, **more: Any) -> Any:
    fields: dict[str, Any] = {"model": "demo", "messages": ASK, "max_tokens": 24, **more}
    return client.chat.completions.create(**fields)


def spec(**fields: Any) -> dict[str, Any]:
    return {"extra_body": {"speculation": {"stats": True, **fields}}}


# answers


def test_completions(client: openai.OpenAI) -> None:
    answer = complete(client, temperature=0)
    (choice,) = answer.choices
    assert (answer.object, answer.model, choice.index, choice.finish_reason) == (
        "text_completion",
        "demo",
        0,
        "length",
    )
    assert choice.text and answer.id.startswith("cmpl-") and answer.created > 1_700_000_000
    usage = answer.usage
    assert usage.completion_tokens == 24 and usage.total_tokens == usage.prompt_tokens + 24


def test_chat(client: openai.OpenAI) -> None:
    answer = chat(client, temperature=0)
    (choice,) = answer.choices
    assert (answer.object, choice.message.role, choice.finish_reason) == (
        "chat.completion",
        "assistant",
        "length",
    )
    assert choice.message.content and choice.message.refusal is None and choice.message.tool_calls is None
    parts = [{"role": "user", "content": [{"type": "text", "text": ASK[0]["content"]}]}]
    assert chat(client, temperature=0, messages=parts).choices[0].message.content == choice.message.content
    assert (
        chat(client, temperature=0, max_tokens=openai.omit, max_completion_tokens=5).usage.completion_tokens
        == 5
    )


def test_speculation_is_set_and_reported(client: openai.OpenAI) -> None:
    prompt, ask = EDIT * 3, {"temperature": 0, "max_tokens": 40}
    on = complete(client, prompt, **ask, **spec(method="ngram")).speculation
    assert on["method"] == "ngram" and on["accepted"] > 0 and on["tokens_per_target_call"] > 1.5
    off = complete(client, prompt, **ask, **spec(method="off")).speculation
    assert off["method"] == "off" and off["reasons"]["off_request"] > 0 and off["rounds"] == 0
    assert not hasattr(complete(client, **ask), "speculation")


def test_the_engines_process_records_its_rounds(client: openai.OpenAI, real: Outside) -> None:
    answer = complete(client, EDIT * 3, temperature=0, max_tokens=40, **spec(method="ngram"))
    stats = answer.speculation
    path = real.folder / EVENTS

    def lines() -> list[SequenceRound]:
        return [text for one in read(path).rounds for text in one.texts if text.id == f"{answer.id}-0"]

    real.wait_for(lambda: lines() and lines()[-1].finish, 10)
    assert (
        sum(one.drafted for one in lines()) == stats["drafted"]
        and sum(one.accepted for one in lines()) == stats["accepted"]
    )
    assert Counter(one.reason for one in lines() if one.reason) == stats["reasons"]
    ways = ["plain" if one.reason else one.drafts[0][0] for one in lines() if not one.prompt]
    assert sum(one["count"] for one in stats["changes"]) == sum(a != b for a, b in pairwise(ways))
    proposals = [one for line in lines() for one in line.proposals]
    assert Counter(one.stop for one in proposals) == stats["stops"]["ngram"] and set(stats["stops"]) == {
        "ngram"
    }
    assert all(bool(one.match) == bool(one.found) == (one.stop == "limit") for one in proposals)
    assert EDIT[:12] not in path.read_text() and answer.choices[0].text[:12] not in path.read_text()


def test_a_shadow_is_reported_and_counted_by_method(client: openai.OpenAI, real: Outside) -> None:
    def metric(name: str) -> float:
        page = httpx.get(real.url() + "/metrics", **LOCAL_HTTP).text.splitlines()
        return sum(
            float(line.split()[1])
            for line in page
            if line.startswith(f'speculon_shadow_{name}_total{{method="ngram",')
        )

    assert metric("rounds") == 0
    ask = {"prompt": EDIT * 3, "temperature": 0, "max_tokens": 40}
    seen = complete(client, **ask, **spec(method="ngram", policy="shadow"))
    done = complete(client, **ask, **spec(method="ngram", policy="fixed"))
    stats, account = seen.speculation["shadow"]["ngram"], done.speculation
    assert seen.choices[0].text == done.choices[0].text
    assert [stats[name] for name in ("rounds", "drafted", "accepted")] == [
        account[n] for n in ("rounds", "drafted", "accepted")
    ]
    assert (
        seen.speculation["rounds"] == 0
        and seen.speculation["reasons"]["shadow"] > 0
        and account["shadow"] == {}
    )
    real.wait_for(lambda: metric("rounds") == stats["rounds"], seconds=10)
    assert (metric("draft_tokens"), metric("accepted_tokens")) == (stats["drafted"], stats["accepted"])


def test_n_and_several_prompts(client: openai.OpenAI) -> None:
    answer = complete(client, [CODE, "import "], n=2, seed=3, max_tokens=12)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    alone = [complete(client, prompt, n=2, seed=3, max_tokens=12).choices for prompt in (CODE, "import ")]
    assert [choice.text for choice in answer.choices] == [
        choice.text for choices in alone for choice in choices
    ]
    assert answer.usage.completion_tokens <= 48
    fresh = complete(client, "found in no cache but by each other " * 9, n=3, max_tokens=2)
    assert fresh.usage.prompt_tokens_details.cached_tokens == 0
    ids = httpx.post(
        str(client.base_url).replace("/v1", "") + "tokenize", json={"prompt": CODE}, **LOCAL_HTTP
    ).json()["tokens"]
    assert (
        complete(client, [ids, ids], temperature=0).choices[1].text
        == complete(client, temperature=0).choices[0].text
    )


def test_logprobs(client: openai.OpenAI) -> None:
    first = complete(client, temperature=0, logprobs=3, max_tokens=6).choices[0]
    table = first.logprobs
    assert "".join(table.tokens) == first.text and len(table.tokens) == 6
    for token, logprob, top in zip(table.tokens, table.token_logprobs, table.top_logprobs, strict=True):
        assert top[token] == logprob == max(top.values()) and sum(map(math.exp, top.values())) <= 1.0001
    content = (
        chat(client, temperature=0, logprobs=True, top_logprobs=2, max_tokens=6).choices[0].logprobs.content
    )
    assert len(content) == 6 and all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(
        entry.logprob == entry.top_logprobs[0].logprob and bytes(entry.bytes).decode() == entry.token
        for entry in content
    )
    assert chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0].top_logprobs == []


def test_penalties_and_biases(client: openai.OpenAI) -> None:
    url = str(client.base_url).replace("/v1/", "/tokenize")
    (token,) = httpx.post(url, json={"prompt": "x"}, **LOCAL_HTTP).json()["tokens"]
    biased = complete(client, temperature=0, max_tokens=8, logit_bias={str(token): 100})
    assert biased.choices[0].text == "x" * 8
    repeating = {"prompt": "x x x x x x x x", "temperature": 0, "max_tokens": 30}
    plain = complete(client, **repeating).choices[0].text
    for penalty in (
        {"presence_penalty": 2.0},
        {"frequency_penalty": 2.0},
        {"extra_body": {"repetition_penalty": 2.0}},
    ):
        assert complete(client, **repeating, **penalty).choices[0].text != plain


# streams


def events(stream: Any) -> list[dict[str, Any]]:
    return [chunk.model_dump(exclude_unset=True) for chunk in stream]


def test_streamed_and_whole_completions_are_alike(client: openai.OpenAI) -> None:
    ask = {"seed": 7, "temperature": 0.7, "n": 3, "logprobs": 2, "echo": True, **spec(method="off")}
    complete(client, **ask)  # what is in the prefix cache is part of the usage
    whole = complete(client, **ask).model_dump(exclude_unset=True)
    streamed = events(complete(client, **ask, stream=True, stream_options={"include_usage": True}))
    check_close(whole, streamed)


def test_streamed_and_whole_chats_are_alike(client: openai.OpenAI) -> None:
    ask = {"seed": 7, "temperature": 0.7, "n": 2, "logprobs": True, "top_logprobs": 3, **spec(method="off")}
    chat(client, **ask)
    whole = chat(client, **ask).model_dump(exclude_unset=True)
    streamed = events(chat(client, **ask, stream=True, stream_options={"include_usage": True}))
    check_close(whole, streamed)


def check_close(whole: Any, streamed: Any) -> None:
    """Alike, with floats to four digits: batches of other shapes add up in another order."""
    check_alike(rounded(whole), rounded(streamed))


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    return [rounded(part) for part in value] if isinstance(value, list) else value


def test_usage_comes_in_a_stream_only_when_asked_for(client: openai.OpenAI) -> None:
    assert not [chunk for chunk in complete(client, stream=True) if chunk.usage]
    *_, last = complete(client, temperature=0, stream=True, stream_options={"include_usage": True})
    assert last.choices == [] and last.usage.completion_tokens == 24
    *_, last = complete(client, stream=True, **spec())
    assert last.choices == [] and last.speculation["method"] and last.usage is None


def test_a_stream_may_be_left(client: openai.OpenAI, real: Outside) -> None:
    def open_requests() -> float:
        page = httpx.get(real.url() + "/metrics", **LOCAL_HTTP).text.splitlines()
        return sum(
            float(line.split()[1])
            for line in page
            if line.startswith(("speculon_requests_open", "speculon_sequences_running"))
        )

    with complete(client, stream=True, max_tokens=256, n=4) as stream:
        next(iter(stream))
    real.wait_for(lambda: open_requests() == 0, seconds=10)


# models and errors


def test_errors_have_the_classes_of_the_client(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(client, model="other")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(client, "x " * 5000)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="colour") as caught:
        complete(client, extra_body={"colour": "red"})
    assert (caught.value.param, caught.value.type) == ("colour", "invalid_request_error")


# explained tokens, and responses


def test_tokens_are_explained_by_the_real_engine(client: openai.OpenAI) -> None:
    way = spec(method="ngram", num_speculative_tokens=4, explain=True)
    answer = complete(client, EDIT * 3, temperature=0, max_tokens=60, **way)
    plain = complete(client, EDIT * 3, temperature=0, max_tokens=60, **spec(method="off"))
    assert answer.choices[0].text == plain.choices[0].text
    tokens = answer.choices[0].speculation["tokens"]
    fates = Counter(token["fate"] for token in tokens)
    assert len(tokens) == 60 and fates["accepted"] == answer.speculation["accepted"] > 0
    assert all((token["source"] == "ngram") == (token["fate"] == "accepted") for token in tokens)
    assert fates["accepted"] + fates["bonus"] + fates["correction"] + fates["plain"] == 60


def test_responses_say_what_chats_do(client: openai.OpenAI) -> None:
    way = spec(method="ngram", explain=True)
    answer = client.responses.create(model="demo", input=ASK, temperature=0, max_output_tokens=24, **way)
    assert answer.output_text == chat(client, temperature=0).choices[0].message.content
    assert answer.status == "incomplete" and answer.usage is not None and answer.usage.output_tokens == 24
    assert len(answer.speculation["tokens"]) == 24  # type: ignore[attr-defined]
    with client.responses.stream(model="demo", input=ASK, temperature=0, max_output_tokens=24) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text


def test_forms_and_stop_strings_under_the_names_of_vllm(client: openai.OpenAI) -> None:
    more = {"seed": 3, "temperature": 0.8, "max_tokens": 40}
    choice = complete(client, **more, extra_body={"guided_choice": ["red", "green"]}).choices[0]
    assert choice.text in ("red", "green")
    form = {"regex": "[ab]{4}STOP[cd]+"}
    body = {"structured_outputs": form, "stop": "STOP", "include_stop_str_in_output": True}
    text = complete(client, **more, extra_body=body).choices[0].text
    assert text.endswith("STOP") and len(text) == 8
    with pytest.raises(openai.BadRequestError, match="Lark"):
        complete(client, extra_body={"guided_grammar": 'root ::= "a"'})


def test_a_form_of_a_response_is_refused_under_its_own_name(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nope"}}}
    with pytest.raises(openai.BadRequestError) as refusal:
        client.responses.create(model="demo", input="x", text=form)
    assert refusal.value.param == "text.format.schema"
