"""Many calls of many threads on one `LLM`, with several seeds."""

from __future__ import annotations

import pytest

from speculon import LLM
from tests.tiny import test_threads
from tests.tiny.test_threads import many_threads

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]
llm = test_threads.llm


@pytest.mark.parametrize("seed", range(1, 4))
def test_mixed_calls_of_many_threads_write_what_they_write_alone(llm: LLM, seed: int) -> None:
    many_threads(llm, seed, calls=50)
