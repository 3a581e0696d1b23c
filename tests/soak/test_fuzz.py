"""More bodies that the OpenAPI schema allows and forbids, against a server of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests
from schemathesis import GenerationMode

from tests.server.outside import REAL, started
from tests.server.test_fuzz import OPERATIONS, Fuzzed, fuzz

EXAMPLES = 60
POSTS = [path for path, method in OPERATIONS.items() if method == "post"]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzed]:
    options = ("--model", "demo", "--threads", "1", "--policy", "fixed", "--max-request-tokens", "256")
    with started(tmp_path_factory.mktemp("server"), *options, program=REAL) as server:
        with requests.Session() as session:
            session.trust_env = False
            server.ready()
            yield Fuzzed(server.url(), session)
        assert server.end() == 0, server.stderr


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE])
@pytest.mark.parametrize("path", POSTS)
def test_answers_are_as_described(fuzzed: Fuzzed, path: str, mode: GenerationMode) -> None:
    fuzz(fuzzed, "post", path, mode, EXAMPLES)
