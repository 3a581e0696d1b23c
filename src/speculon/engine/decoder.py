"""Speculative decoding with model objects: draft, verify, step and generate, one sequence at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from dataclasses import replace
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculon.core.config import EngineConfig, ModelObject, SamplingParams, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter, NeverFits
from speculon.core.telemetry import RequestStats, SpeculationStats, Stopwatch
from speculon.core.types import CallCost, Draft, Load, Verdict
from speculon.decoding.rounds import Budget, Drafted, Grant, Judged, Round, Span
from speculon.decoding.sequence import Event, Request, Sequence
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.decoding.verify import read_logits, verify_given
from speculon.engine.admission import check_draft, check_room, read_ids
from speculon.engine.engine import Engine
from speculon.engine.outputs import RequestOutput, StepResult, absorb, output_of, write_texts
from speculon.runtimes.registry import TORCH, backend
from speculon.speculation.control.adaptive import Adaptive, AdaptiveLookahead
from speculon.speculation.control.fixed import Fixed
from speculon.speculation.drafting import Drafting
from speculon.speculation.proposers.registry import OFF, WITH_CHECKPOINT

SETTLED = "model dtype device allow_pickle trust_remote_code generation_config quantization".split()
UNUSABLE = {
    **dict.fromkeys(SETTLED, "the model object has settled it"),
    "state": "is kept by LLM and by the server",
    "adapters": "are of LLM and of the server",
    "draft_depth": "drafts are chains here, since a caller's logits have a row for each",
}
PLAIN_CALLS = 8  # guess: plain calls whose median is the plain cost
GIVEN = "given"  # source of drafts that came from the caller
ROUND = "round"  # id of the requests that are made for one round
ALONE = Load(1, 0, 0)

Ids = str | Seq[int] | Tensor


class SpeculativeDecoder:
    """Runs speculative decoding round by round with a model object in memory (Leviathan et al. 2023; Chen et
    al. 2023).

    >>> decoder = SpeculativeDecoder(model, draft_model, method="draft_model")
    >>> ids += decoder.step(ids, SamplingParams(temperature=0)).emitted_tokens

    `draft` proposes tokens, `verify` judges them, `step` does both, and `generate` writes a whole text. Every
    method raises `InvalidRequest` for a text or a parameter that it cannot serve.

    A text is a list or a tensor [n] of token ids. `prompt_len` says how many of them are the prompt (None:
    all). Noise, penalties, `min_tokens` and `max_tokens` count from there, so the rounds of one text add up
    to the text of `generate`. Between calls the decoder keeps only the KV pages, which it finds again by
    their content, the counters, and what the policy has learned.

    Args:
        model: The target, a causal `PreTrainedModel`. It is not modified.
        draft: The drafter: another model object, the path of a checkpoint, a table `{method: either}`, or
            None for methods without one. A model object is not modified, and keeps its device and its dtype.
        method: What drafts, as `SpeculationConfig.method`.
        tokenizer: A tokenizer of transformers. Strings as prompts, `stop` and `bad_words` need one.
        num_speculative_tokens: K, the most drafts of a round. None: the number of the policy.
        **settings: The fields of `EngineConfig` and of `SpeculationConfig`.

    Raises:
        ConfigError: A setting is wrong.
        UnknownMethod: There is no method of this name.
        ModelError: The model is not supported, or the drafter does not fit the target.
    """

    adaptive: AdaptiveLookahead | None  # the controller of the number of drafts, under policy="adaptive"

    def __init__(
        self,
        model: PreTrainedModel,
        draft: ModelObject | str | Mapping[str, ModelObject | str] | None = None,
        *,
        method: str = "auto",
        tokenizer: PreTrainedTokenizerBase | None = None,
        num_speculative_tokens: int | None = None,
        **settings: Any,
    ):
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"model = {type(model).__name__}: must be a model object of transformers; use LLM for a path"
            )
        for name, why in UNUSABLE.items():
            if name in settings and (name in SETTLED or settings[name]):
                raise ConfigError(f"{name} = {settings[name]!r}: {why}")
        own = {name: settings.pop(name) for name in SpeculationConfig.model_fields if name in settings}
        own |= {"method": method, "num_speculative_tokens": num_speculative_tokens}
        if draft is not None:
            own["draft"] = backend().drafts_of(draft) if isinstance(draft, str) else draft
        self.config = EngineConfig(**settings, speculation=own)
        chosen = self.config.speculation
        if method in WITH_CHECKPOINT and method not in chosen.drafts:
            raise ConfigError(f"method = {method!r}: this method needs draft, a model object or a checkpoint")
        self.tokenizer = None if tokenizer is None else Tokenizer(tokenizer)
        named = self.config.runtime
        runtime = backend(TORCH if named == "auto" else named).wrap(model, self.tokenizer, self.config)
        self.engine = Engine(runtime, self.tokenizer, self.config)
        self.adaptive = None
        if chosen.policy == "adaptive" and chosen.most():
            self.adaptive = AdaptiveLookahead(chosen.adaptive.within(chosen.most()))
            self.engine.policy.use("adaptive", Adaptive(chosen.adaptive, self.adaptive))
        self._sequence: Sequence | None = None  # of the last step, which the policy knows
        self._last: tuple[list[int], SamplingParams]  # text and parameters last worked on
        self._plain_ms: float | None = None
        self.reset_stats()

    # one round

    @property
    def lookahead(self) -> int:
        """The most tokens that the next round drafts; a policy may choose fewer."""
        return self.config.speculation.most() if self.adaptive is None else self.adaptive.lookahead

    @torch.inference_mode()
    def draft(
        self,
        ids: Ids,
        k: int | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_len: int | None = None,
    ) -> Draft:
        """Proposes tokens after `ids`, without calling the target. Nothing is counted.

        Args:
            ids: The text so far, as token ids [n] or as a string.
            k: The most tokens of the draft. None: `lookahead`.
            params: How the text is sampled. Default: `SamplingParams()`.
            prompt_len: How many of `ids` are the prompt. None: all.

        Returns:
            A draft of at most `k` tokens, which is empty if the method found nothing.
        """
        with self._last_span(ids, params, prompt_len, self._whole_draft(k)) as span:
            drafted, _ = self._drafted(span)
        return drafted.draft

    @torch.inference_mode()
    def verify(
        self,
        ids: Ids,
        drafts: Draft | Seq[int] | Tensor,
        params: SamplingParams | None = None,
        *,
        target_logits: Tensor | None = None,
        prompt_len: int | None = None,
    ) -> Verdict:
        """Lets the target judge `drafts` after `ids`. Nothing is counted, and no drafter learns of it.

        Args:
            ids: The text so far, as token ids [n] or as a string.
            drafts: A draft of `draft`, or token ids [K]. Drafts with probabilities q are judged with q
                whenever `step` would do so.
            params: How the text is sampled. Default: `SamplingParams()`.
            target_logits: Raw logits [K + 1, V] or [K, V], used instead of a call of the target. Row i judges
                draft i, and the last of K + 1 rows gives the bonus token; with K rows there is none. With the
                target's own logits the verdict is the same as without them.
            prompt_len: How many of `ids` are the prompt. None: all.

        Returns:
            The accepted drafts, followed by the correction or the bonus token.

        Raises:
            InvalidParameter: The logits have another shape or dtype, or a NaN or +inf; or `prompt_logprobs`
                is set together with `target_logits`, which have no rows of the prompt.
        """
        draft = read_draft(drafts, self.engine.runtime.facts.vocab_size)
        k = len(draft.tokens)
        if target_logits is not None:
            seq = self._prepare(ids, params, prompt_len)
            check_room(seq, k)
            last = Drafted(Span.of(seq, len(seq.tokens) - 1, 1), draft)
            return verify_given(last, self._rows(target_logits, k, seq.request)).verdict
        with self._last_span(ids, params, prompt_len) as span:
            check_room(span.seq, k)
            span = replace(span, given=k)
            with self.engine.runtime.reserve([span]) as step:
                (grant,) = step.grants
                if grant.drafts < k:  # the pages of a window may be all that there are
                    raise NeverFits(
                        f"{k} drafts after {len(span.seq.tokens)} tokens need more pages than are free: "
                        "give fewer drafts"
                    )
                (judged,) = self.engine.forward_and_verify(step, [Drafted(span, draft)], Stopwatch())
        return judged.verdict

    @torch.inference_mode()
    def step(
        self,
        ids: Ids,
        params: SamplingParams | None = None,
        *,
        k: int | None = None,
        prompt_len: int | None = None,
        target_logits: Tensor | None = None,
    ) -> StepResult:
        """Drafts and verifies one round after `ids`, counts it, and lets policy and drafters learn from it.

        What was computed for an earlier beginning of `ids` is found again in the KV pages, except for the
        last, incomplete page.

        Args:
            ids: The text so far, as token ids [n] or as a string.
            params: How the text is sampled. Default: `SamplingParams()`.
            k: The most drafts of this round. None: `lookahead`; the policy may choose fewer.
            prompt_len: How many of `ids` are the prompt. None: all.
            target_logits: As in `verify`. They judge the draft that `draft` returns for the same `ids`, `k`
                and `params`, and the target is not called. Such a round is not part of `speedup_estimate`.

        Raises:
            InvalidParameter: Besides the errors of `verify`: with `target_logits`, a sampled text without a
                seed would get another draft from a model than the one that the logits belong to.
        """
        given = target_logits is not None
        k = self._whole_draft(k) if given else k
        with self._last_span(ids, params, prompt_len, k, goes_on=True) as span:
            self._last, stats = (list(span.seq.tokens), span.seq.request.params), span.seq.stats
            began = perf_counter()
            (judged,) = self._round_by(span, target_logits) if given else self.engine.round([span])
            ms = (perf_counter() - began) * 1e3
        self._stats.add(stats)
        if judged.verdict.finish:
            self._forget_sequence()
        if not given:
            self._clock(ms, len(judged.verdict.tokens))
        reason = next(iter(stats.reasons), None)
        return StepResult(judged.draft, judged.verdict, reason, stats.draft_ms, ms - stats.draft_ms)

    # a whole text

    def generate(
        self, ids: Ids, params: SamplingParams | None = None, *, max_tokens: int | None = None
    ) -> RequestOutput:
        """Continues one prompt to its end. The result is that of `LLM.generate`; without a tokenizer its
        texts are empty.

        Args:
            ids: The prompt, as token ids [n] or as a string.
            params: How the text is sampled. Default: `SamplingParams()`.
            max_tokens: Replaces `max_tokens` of `params`.
        """
        params = params or SamplingParams()
        if max_tokens is not None:
            params = SamplingParams(**{**params.model_dump(), "max_tokens": max_tokens})
        prompt = self._encode(ids)
        self._last = prompt, params
        output = output_of(prompt, params)
        with closing(self._run(prompt, params)) as steps:
            for ms, events in steps:
                # the first token is the prompt's, and samples share their calls
                if params.n == 1 and output.token_ids:
                    self._clock(ms, sum(len(event.tokens) for event in events))
                for event in events:
                    absorb(output, event)
        for completion in output.outputs:
            self._stats.add(completion.stats)
        write_texts(output, self.tokenizer, params)
        return output

    # accounts

    @property
    def stats(self) -> SpeculationStats:
        """What speculation did in all steps and texts since the last reset; zeros before the first round."""
        return self._stats.speculation()

    @property
    def acceptance_rate(self) -> float:
        """Accepted drafts / drafted tokens; 0.0 before the first draft."""
        return self.stats.acceptance_rate

    @property
    def tokens_per_target_call(self) -> float:
        """Generated tokens, stop tokens included, / target calls that sampled; 0.0 before the first call."""
        return self.stats.tokens_per_target_call

    @property
    def speedup_estimate(self) -> float:
        """How many times faster than plain decoding the rounds so far were: ms per token of plain calls / ms
        per token of the rounds, both measured on this machine. 1.0 before the first round.

        The first read times some plain calls after the latest text, and keeps their time until the next
        reset. Neither side includes prompts, or texts with n > 1. The rounds of `step` include the time to
        compute the incomplete page again.
        """
        if not self._tokens:
            return 1.0
        if self._plain_ms is None:
            self._plain_ms = self._time_plain_calls(*self._last)
        return self._plain_ms * self._tokens / self._ms

    def reset_stats(self) -> None:
        """Sets the counters to zero, and forgets the measured plain cost, what the policy knows of the latest
        text, and the state of the `adaptive` controller. The texts do not depend on any of these.
        """
        self._forget_sequence()
        if self.adaptive is not None:
            self.adaptive.reset()
        self._stats = RequestStats()
        self._ms, self._tokens = 0.0, 0  # of rounds, without prompts
        self._plain_ms = None

    def _clock(self, ms: float, tokens: int) -> None:
        self._ms += ms
        self._tokens += tokens

    def _time_plain_calls(self, ids: list[int], params: SamplingParams) -> float:
        """Median ms of plain calls with one row, at the temperature and with the filters of `params`."""
        facts = self.engine.runtime.facts
        room = min(facts.max_context, facts.capacity)
        prompt = ids[: max(1, room - PLAIN_CALLS - 1)]
        kept = params.model_dump(include={"temperature", "top_p", "top_k", "min_p"})
        plain = SamplingParams(**kept, max_tokens=min(PLAIN_CALLS + 1, room - len(prompt)), ignore_eos=True)
        return median([ms for ms, events in self._run(prompt, plain, OFF) if events][-PLAIN_CALLS:])

    # behind all of them

    def _run(
        self, prompt: list[int], params: SamplingParams, method: str | None = None
    ) -> Generator[tuple[float, list[Event]], None, None]:
        """Each step of one request through the engine: its ms and its events."""
        engine = self.engine
        request_id = engine.add_request(prompt, params, {"method": method, "draft_depth": 0})
        try:
            while engine.has_work:
                began = perf_counter()
                events = engine.step()
                yield (perf_counter() - began) * 1e3, events
        finally:
            engine.abort(request_id)
        engine.check_integrity()

    @contextmanager
    def _last_span(
        self,
        ids: Ids,
        params: SamplingParams | None,
        prompt_len: int | None,
        k: int | None = None,
        goes_on: bool = False,
    ) -> Iterator[Span]:
        """The end of a text whose earlier tokens are in pages; afterwards, come what may, the pages are
        nobody's.

        With `goes_on` the policy is to know it by the name it had, if it is the last step's.
        """
        engine, seq = self.engine, self._prepare(ids, params, prompt_len, k)
        seq = self._continued(seq) if goes_on else seq
        space, max_rows = engine.runtime.space, self.config.max_batch_tokens
        seq.committed = space.open(seq)
        try:
            # a drafter that reads states waits for them
            beside = 1 if engine.proposers.reads_states else min(max_rows, space.block_size)
            while seq.pending > beside:
                rows = space.chunk(seq, min(max_rows, seq.pending - 1))
                engine.round([Span.of(seq, seq.committed, rows)])
            yield Span.of(seq, seq.committed, seq.pending, decodes=True)  # drafts may follow a prompt
        finally:
            engine.proposers.release(seq)
            space.close(seq)
            seq.committed = 0

    def _prepare(
        self, ids: Ids, params: SamplingParams | None, prompt_len: int | None, k: int | None = None
    ) -> Sequence:
        """A sequence that holds `ids`, checked, without pages."""
        params, tokens = params or SamplingParams(), self._encode(ids)
        if params.n != 1:
            raise InvalidParameter("n", params.n, "must be 1, because a round carries one text")
        if prompt_len is not None and not 0 < prompt_len <= len(tokens):
            raise InvalidParameter(
                "prompt_len", prompt_len, f"must be from 1 to the number of ids, {len(tokens)}"
            )
        at = len(tokens) if prompt_len is None else prompt_len
        asked = {"num_speculative_tokens": k, "draft_depth": 0}
        (seq,) = self.engine.admission.admit(ROUND, tokens[:at], params, asked, written=tokens[at:])
        return seq

    def _continued(self, seq: Sequence) -> Sequence:
        """The sequence of the last step, with the request and tokens of `seq`, where these continue it."""
        last, request = self._sequence, seq.request
        if last and seq.continues(last):
            last.request, last.tokens, last.grammar, last.stats = request, seq.tokens, seq.grammar, seq.stats
            last.failed, last.prompt_scored, last.noise = False, 0, {}  # of the former request
            return last
        self._forget_sequence()
        self._sequence = seq
        return seq

    def _forget_sequence(self) -> None:
        """Counts what the policy has still to report of the last step's sequence."""
        if self._sequence is not None:
            self._sequence.stats = RequestStats()
            self.engine.policy.forget(self._sequence)
            self._stats.add(self._sequence.stats)
            self._sequence = None

    def _whole_draft(self, k: int | None) -> int | None:
        """How many drafts `draft` makes, whatever the policy would choose."""
        return self.lookahead if k is None and self.adaptive is not None else k

    def _drafted(self, span: Span) -> tuple[Drafted, Mapping[str, CallCost]]:
        """As many drafts as the sequence may have, and what their calls took; nothing of it is kept."""
        fixed, engine = Fixed(), self.engine
        with engine.runtime.reserve([span]) as step:
            budgets: list[Budget] = engine.budgets([span], step)
            drafting = Drafting(engine.proposers, fixed, budgets, fixed.decide(budgets, ALONE))
            drafting.ask_lookups()
            drafting.ask_models()
            (drafted,) = drafting.drafted
            return drafted, drafting.calls

    def _round_by(self, span: Span, target_logits: Any) -> list[Judged]:
        """`Engine.round` of one span with these logits in the place of its target call.

        The span's own policy learns from it. The runtime keeps nothing: the target has not computed it.
        """
        engine, seq, load = self.engine, span.seq, self.engine.scheduler.load
        watch = Stopwatch(engine.counters.profile)
        budget = Budget.of(span, Grant(span.most_drafts), engine.proposers.unread(seq))
        engine.policy.decide([budget], load)  # it has to know the sequence
        watch.lap("decide")
        drafted, calls = self._drafted(span)
        draft_ms = watch.lap("propose")
        drawn = {each.method for each in drafted.proposals if each.draft.tokens} - seq.request.lookups
        if drawn and not seq.request.params.greedy and seq.request.params.seed is None:  # `draft` had others
            names = ", ".join(sorted(drawn))
            limit = f"must be set, or temperature = 0: with target_logits, drafts of {names} need one of them"
            raise InvalidParameter("seed", None, limit)
        judged = verify_given(drafted, self._rows(target_logits, len(drafted.draft.tokens), seq.request))
        seq.advance(seq.committed, judged.verdict.tokens, 0)
        watch.lap("verify")
        engine.proposers.observe([judged])
        engine._learn(Round(load, [judged], calls, draft_ms, None), True, watch)
        return [judged]

    def _rows(self, target_logits: Any, k: int, request: Request) -> Tensor:  # [K + 1, V] or [K, V]
        """A caller's logits for `k` drafts."""
        if (asked := request.params.prompt_logprobs) is not None:
            raise InvalidParameter(
                "prompt_logprobs", asked, "must be None with target_logits, which have no rows of the prompt"
            )
        runtime = self.engine.runtime
        return read_logits(target_logits, k, runtime.facts.vocab_size).to(runtime.device)

    def _encode(self, ids: Ids) -> list[int]:
        if isinstance(ids, str) and self.tokenizer is not None:
            return self.tokenizer.encode(ids)
        return read_ids("ids", ids)


def read_draft(drafts: Any, vocab_size: int) -> Draft:
    """A draft as it is, or one of token ids [K]. Raises by name what cannot be judged in one round."""
    tokens = () if isinstance(drafts, Draft) else tuple(read_ids("drafts", drafts))
    draft = drafts if isinstance(drafts, Draft) else Draft(tokens, (GIVEN,) * len(tokens))
    check_draft(draft, vocab_size)
    return draft
