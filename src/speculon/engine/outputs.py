"""What callers get back: completions of a prompt, and the result of one step."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from speculon.core.errors import SpeculonError
from speculon.core.telemetry import RequestStats, SpeculationStats
from speculon.core.types import Draft, FinishReason, TokenLogprobs, Verdict
from speculon.decoding.sequence import Event, Fate
from speculon.decoding.text.tokenizer import Tokenizer, final_text

if TYPE_CHECKING:
    from speculon.core.config import SamplingParams


@dataclass(slots=True)
class Completion:
    """One generated text, with its token ids and its statistics."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)  # without the stop token
    finish_reason: FinishReason | None = None
    stop: str | int | None = None  # the stop string or token that ended it
    error: SpeculonError | None = None  # with finish reason "error": the fault, of its logits processor
    logprobs: list[TokenLogprobs] | None = None  # one per token
    # one per token: the method that drafted it; None is the target itself
    sources: list[str | None] = field(default_factory=list)
    fates: list[Fate] = field(default_factory=list)  # one per token: what became of the draft there
    stats: RequestStats = field(default_factory=RequestStats)

    @property
    def reasons(self) -> dict[str, int]:
        """Why rounds had no drafts: `Reason` -> number of rounds."""
        return dict(self.stats.reasons)

    @property
    def changes(self) -> list[dict[str, Any]]:
        """Every change between plain rounds and rounds with drafts, or between methods: from, to, reason and
        count.
        """
        return self.stats.change_list()

    @property
    def speculation(self) -> SpeculationStats:
        """What speculation did for this text. If no round had drafts, only the target calls are counted."""
        return self.stats.speculation()


@dataclass(slots=True)
class RequestOutput:
    """The result of one prompt: its n texts in `outputs`. The fields of the first one are also here."""

    prompt_token_ids: list[int]
    outputs: list[Completion]
    # None for the first token, which nothing precedes
    prompt_logprobs: list[TokenLogprobs | None] | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[0].finish_reason

    @property
    def error(self) -> SpeculonError | None:
        return self.outputs[0].error

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.outputs[0].logprobs

    @property
    def reasons(self) -> dict[str, int]:
        return self.outputs[0].reasons

    @property
    def speculation(self) -> SpeculationStats:
        return self.outputs[0].speculation

    def to_dict(self) -> dict[str, Any]:
        """The whole result as data that JSON can express."""
        outputs: list[dict[str, Any]] = [
            {
                "text": completion.text,
                "token_ids": completion.token_ids,
                "finish_reason": completion.finish_reason,
                "stop": completion.stop,
                "logprobs": completion.logprobs and [asdict(lp) for lp in completion.logprobs],
                "reasons": completion.reasons,
                "changes": completion.changes,
                "prompt": completion.stats.prompt(),
                "speculation": completion.speculation and completion.speculation.to_dict(),
            }
            for completion in self.outputs
        ]
        prompt_logprobs: list[Any] | None = self.prompt_logprobs and [
            lp and asdict(lp) for lp in self.prompt_logprobs
        ]
        return {
            "prompt_token_ids": self.prompt_token_ids,
            "prompt_logprobs": prompt_logprobs,
            "outputs": outputs,
        }


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of `SpeculativeDecoder.step`: one round of one text."""

    draft: Draft
    verdict: Verdict
    reason: str | None  # why nothing was drafted
    draft_ms: float
    verify_ms: float  # the target call, sampling and the commit

    @property
    def draft_tokens(self) -> tuple[int, ...]:
        return self.draft.tokens

    @property
    def accepted_tokens(self) -> tuple[int, ...]:
        return self.draft.tokens[: self.verdict.accepted]

    @property
    def emitted_tokens(self) -> tuple[int, ...]:
        """The accepted drafts, then the correction or the bonus; a stop token is not among them."""
        return self.verdict.tokens

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted in this round; 0.0 without a draft."""
        return self.verdict.accepted / len(self.draft.tokens) if self.draft.tokens else 0.0


def output_of(prompt: list[int], params: SamplingParams) -> RequestOutput:
    """The result of a prompt for which nothing is computed yet."""
    of_first: list[TokenLogprobs | None] | None = None if params.prompt_logprobs is None else [None]
    return RequestOutput(prompt, [Completion() for _ in range(params.n)], of_first)


def absorb(output: RequestOutput, event: Event) -> None:
    """Adds one event to the result it belongs to."""
    completion = output.outputs[event.sample]
    completion.token_ids.extend(event.tokens)
    completion.sources += [*event.sources, *(None for _ in event.tokens[len(event.sources) :])]
    completion.fates += event.fates
    if event.logprobs is not None:
        completion.logprobs = [*(completion.logprobs or ()), *event.logprobs]
    if event.prompt_logprobs is not None and event.sample == 0:
        known = output.prompt_logprobs or [None]
        output.prompt_logprobs = [*known, *event.prompt_logprobs]
    if event.finish:
        completion.finish_reason, completion.stop = event.finish.reason, event.finish.matched
        completion.error = event.finish.error
    if event.stats is not None:
        completion.stats = event.stats


def write_texts(output: RequestOutput, tokenizer: Tokenizer | None, params: SamplingParams) -> None:
    """Sets the texts of ended completions; they stay empty without a tokenizer."""
    if tokenizer is None:
        return
    for completion in output.outputs:
        ids, stop = completion.token_ids, completion.stop
        completion.text = final_text(tokenizer, ids, stop, params, output.prompt_token_ids)
