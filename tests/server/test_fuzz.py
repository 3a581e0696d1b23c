"""The server against its OpenAPI schema: for bodies it allows and forbids, no 5xx, no hang, true answers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from tests.server.inside import served

SEED, SECONDS = 20_261_121, 20.0
EXAMPLES = {"get": 2, "post": 12}  # the soak has more
# many short requests
MOST = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3, "n": 2}
ALTERNATIVES = (
    ("prompt_token_ids", "prompt"),
    ("prompt_token_ids", "messages"),
    ("suffix", "echo"),
    (
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "response_format",
    ),
)
OPERATIONS = {
    "/v1/completions": "post",
    "/v1/chat/completions": "post",
    "/v1/responses": "post",
    "/tokenize": "post",
    "/detokenize": "post",
    "/v1/models/{model}": "get",
    "/v1/speculation/capabilities": "get",
}


class Fuzzed:
    """A server and its description."""

    def __init__(self, url: str, session: requests.Session):
        self.url, self._session = url, session
        document = session.get(url + "/openapi.json", timeout=SECONDS).json()
        self.schema = schemathesis.openapi.from_dict(document)
        parts = document["components"]["schemas"].values()
        self._known = {name for part in parts for name in part.get("properties", {})}
        self._bodies = {
            path: described["content"]["application/json"]["schema"]
            for path, methods in document["paths"].items()
            if (described := methods.get("post", {}).get("requestBody"))
        }
        self._parts = {"components": document["components"]}

    def allowed(self, path: str, body: Any) -> bool:
        """Whether the schema allows a body: a change that one form of a union forbids, another may allow."""
        return jsonschema.Draft202012Validator({**self._bodies[path], **self._parts}).is_valid(body)

    def cases(self, method: str, path: str, mode: GenerationMode) -> st.SearchStrategy[Any]:
        return self.schema[path][method.upper()].as_strategy(generation_mode=mode)

    def try_it(self, case: Any, mode: GenerationMode) -> None:
        """Sends a case and raises where the answer is not as the schema describes it."""
        if mode == GenerationMode.NEGATIVE:
            case.body = refuse(case.body, self._known)
        if isinstance(case.body, dict) and case.path.startswith("/v1"):
            shorten(case.body)
            if mode == GenerationMode.POSITIVE:
                decide(case.body)
        # what the schema allows may still be refused by name: one field may depend on another
        wrong = [positive_data_acceptance]
        if mode == GenerationMode.NEGATIVE and self.allowed(case.path, case.body):
            wrong.append(negative_data_rejection)
        case.call_and_validate(
            base_url=self.url, session=self._session, timeout=SECONDS, excluded_checks=wrong
        )


def shorten(body: dict[str, Any]) -> None:
    """Fewer tokens, where the number is a valid one."""
    for name, most in MOST.items():
        value = body.get(name)
        if type(value) is int and 0 < value < 2**31 and (name != "n" or value <= 64):
            body[name] = min(value, most)
    if "messages" in body and body.get("max_tokens") is None and body.get("max_completion_tokens") is None:
        body["max_tokens"] = MOST["max_tokens"]
    if "input" in body and body.get("max_output_tokens") is None:
        body["max_output_tokens"] = MOST["max_output_tokens"]


def decide(body: dict[str, Any]) -> None:
    """Keeps one of the fields that exclude each other, which the schema cannot say."""
    for names in ALTERNATIVES:
        for name in [name for name in names if body.get(name) is not None][1:]:
            del body[name]


def refuse(body: Any, known: set[str]) -> Any:
    """Gives unknown fields that are null a value: the server ignores them, and no schema says so."""
    if isinstance(body, list):
        return [refuse(part, known) for part in body]
    if not isinstance(body, dict):
        return body
    return {
        name: 0 if part is None and name not in known else refuse(part, known) for name, part in body.items()
    }


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[Fuzzed]:
    with served() as inside, requests.Session() as session:
        session.trust_env = False
        yield Fuzzed(inside.url, session)


def fuzz(fuzzed: Fuzzed, method: str, path: str, mode: GenerationMode, examples: int) -> None:
    @seed(SEED)
    @settings(
        max_examples=examples,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
        deadline=None,
    )
    @given(case=fuzzed.cases(method, path, mode))
    def run(case: Any) -> None:
        fuzzed.try_it(case, mode)

    run()


@pytest.mark.parametrize("path", OPERATIONS)
def test_answers_are_as_described(fuzzed: Fuzzed, path: str) -> None:
    method = OPERATIONS[path]
    fuzz(fuzzed, method, path, GenerationMode.POSITIVE, EXAMPLES[method])


@pytest.mark.parametrize("path", [path for path, method in OPERATIONS.items() if method == "post"])
def test_what_is_not_as_described_is_refused(fuzzed: Fuzzed, path: str) -> None:
    fuzz(fuzzed, "post", path, GenerationMode.NEGATIVE, EXAMPLES["post"])


def test_an_answer_that_is_not_as_described_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: a status that is not in the description, a field that has another type, and a fault."""
    whole = {
        "id": "x",
        "object": "text_completion",
        "created": "today",
        "model": "m",
        "choices": [],
        "usage": {},
    }
    with served() as inside, requests.Session() as session:
        fuzzed = Fuzzed(inside.url, session)
        for planted in (lambda *_: whole, lambda *_: 1 / 0):
            monkeypatch.setattr("speculon.server.answer.Answer.whole", planted)
            with pytest.raises((FailureGroup, ExceptionGroup)):
                # ends at the first body that shows it
                fuzz(fuzzed, "post", "/v1/completions", GenerationMode.POSITIVE, 200)
