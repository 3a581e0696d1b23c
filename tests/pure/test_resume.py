"""Which requests another engine can continue after a lost one, and the message that asks for the rest."""

from __future__ import annotations

from typing import Any

import pytest

from speculon.core.config import RequestSpeculation, SamplingParams, SpeculationConfig
from speculon.core.types import Finish, TokenLogprobs
from speculon.decoding.sequence import Event
from speculon.engine.messages import Add
from speculon.engine.progress import RequestProgress
from speculon.engine.waiting import OutputQueue, RequestTable

GREEDY = {"temperature": 0}
SEEDED = {"seed": 7}
LOGPROBS = (TokenLogprobs(3, -0.5, 1, ()),)


def begun(
    acceptance: Any = None, default: Any = "auto", changed: Any = None, **params: Any
) -> RequestProgress:
    """A request of which three tokens came; the default rule may have `changed` since the engine's start."""
    defaults = None if changed is None else SpeculationConfig(acceptance=changed)
    speculation = RequestSpeculation(acceptance=acceptance, defaults=defaults)
    progress = RequestProgress(Add("r", [1], SamplingParams(**params), speculation), default)
    progress.note(Event("r", 0, (4, 5, 6)))
    return progress


@pytest.mark.parametrize(
    ("params", "resumable"),
    [
        (GREEDY, True),
        (SEEDED, True),
        ({}, False),
        ({"acceptance": "matching"}, False),
        ({**SEEDED, "acceptance": "rejection"}, False),
        ({**SEEDED, "acceptance": "block"}, False),
        ({**SEEDED, "default": "rejection"}, False),
        ({**SEEDED, "acceptance": "matching", "default": "block"}, True),
        ({**SEEDED, "default": "matching", "changed": "block"}, False),
        ({**SEEDED, "default": "block", "changed": "matching"}, True),
        ({**SEEDED, "acceptance": "matching", "changed": "block"}, True),
        ({**GREEDY, "acceptance": "rejection"}, True),
    ],
)
def test_the_rest_must_be_determined(params: dict[str, Any], resumable: bool) -> None:
    assert begun(**params).resumable == resumable


def test_a_request_of_which_nothing_came_is_sent_again_as_it_was() -> None:
    progress = RequestProgress(Add("r", [1], SamplingParams(n=2)))
    assert progress.resumable and progress.rest() is progress.add


def test_the_rest_has_the_open_samples_alone() -> None:
    progress = begun(**SEEDED, n=3)
    progress.note(Event("r", 2, (9,)))
    progress.note(Event("r", 2, (8,), finish=Finish("stop")))
    progress.note(Event("r", 0, (7,)))
    rest = progress.rest()
    assert (
        rest.written == {0: [4, 5, 6, 7], 1: []} and rest.prompt == [1] and rest.params == progress.add.params
    )
    again = RequestProgress(rest)
    again.note(Event("r", 1, (2,)))
    assert again.rest().written == {0: [4, 5, 6, 7], 1: [2]}, "of a request that was resumed before"


def test_a_second_loss_without_a_token_between_is_the_end() -> None:
    progress = begun(**GREEDY)
    progress.rest()
    assert not progress.resumable
    progress.note(Event("r", 0, (7,)))
    assert progress.resumable


def test_log_probabilities_of_the_prompt_come_once() -> None:
    add = Add("r", [1, 3], SamplingParams(temperature=0, prompt_logprobs=0))
    progress = RequestProgress(add)
    progress.note(Event("r", 0, (), prompt_logprobs=LOGPROBS))
    assert not progress.resumable, "some of them may be lost"
    progress.note(Event("r", 0, (4,)))
    assert progress.resumable and progress.rest().params.prompt_logprobs is None


class NoHost:
    def abort(self, request_ids: list[str]) -> None:
        raise AssertionError

    def end(self, queue: OutputQueue) -> None:
        assert not queue.open, "it has ended"


def test_a_queue_is_resumed_as_a_whole_or_not_at_all() -> None:
    adds = [Add("a", [1], SamplingParams(temperature=0)), Add("b", [1], SamplingParams())]
    queue, table = OutputQueue(NoHost()), RequestTable()
    for add in adds:
        table.add(RequestProgress(add), queue)
    queue.put(Event("a", 0, (4,)))
    assert queue.resumable and [add.request_id for add in queue.rest()] == ["a", "b"]
    queue.put(Event("a", 0, (5,), finish=Finish("length")))
    assert not queue.resumable, "nothing came of b since"
    queue.put(Event("b", 0, (4,)))
    assert not queue.resumable, "and now its rest is not determined"
    queue.put(Event("b", 0, (), finish=Finish("length")))
    assert queue.resumable and not queue.rest() and queue.resumed == 2
    queue.close()
