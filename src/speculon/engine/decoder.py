"""Speculative decoding with model objects: draft, verify, step and generate, one sequence at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speculon.core.config import MAX_DRAFTS, EngineConfig, ModelObject, SamplingParams, SpeculationConfig
from speculon.core.errors import ConfigError, InvalidParameter, NeverFits
from speculon.core.telemetry import RequestStats, SpeculationStats, Stopwatch
from speculon.core.types import Ask, Decision, Draft, Verdict
from speculon.decoding.sequence import Event, Sequence, Span
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.drafters.choose import by_method
from speculon.drafters.pairing import is_search
from speculon.engine.admission import check_room, read_ids
from speculon.engine.engine import Engine
from speculon.engine.given import GIVEN, read_draft, round_by, verify_by
from speculon.engine.outputs import Completion, RequestOutput, StepResult, absorb, write_texts
from speculon.loading.ends import add_ends
from speculon.loading.load import wrap_model
from speculon.speculation.control.adaptive import Adaptive, AdaptiveLookahead
from speculon.speculation.control.fixed import Fixed
from speculon.speculation.drafting import Drafting
from speculon.speculation.proposers.registry import OFF, WITH_CHECKPOINT

OF_CHECKPOINTS = "model dtype device allow_pickle trust_remote_code generation_config quantization".split()
UNUSABLE = {
    "state": "is kept by LLM and by the server",
    "adapters": "are of LLM and of the server",
    "draft_depth": "drafts are chains here, since a caller's logits have a row for each",
}
PLAIN_CALLS = 8  # guess: plain calls whose median is the plain cost
ROUND = "round"  # id of the requests that are made for one round

Ids = str | Seq[int] | Tensor


class SpeculativeDecoder:
    """A target model object with a way of drafting (Leviathan et al. 2023; Chen et al. 2023).

    >>> decoder = SpeculativeDecoder(model, draft_model, method="draft_model")
    >>> ids += decoder.step(ids, SamplingParams(temperature=0)).emitted_tokens

    `model` is a causal `PreTrainedModel`; `draft` another one, a checkpoint's path, or None for methods that
    need none. Neither is modified; a draft object stays on its device and in its dtype. `tokenizer` is a
    transformers tokenizer: only with one are strings taken as prompts, and `stop` and `bad_words` as
    parameters. Further keywords are the fields of `EngineConfig` and of `SpeculationConfig`. Raises
    `ConfigError` for a wrong setting, `UnknownMethod`, and `ModelError` for a model that is not supported or
    a draft that does not fit the target.

    Texts are token ids, [n] as a list or a tensor. `prompt_len` says how many of them are the prompt (None:
    all): noise, penalties, min_tokens and max_tokens count from there, so the rounds of one text add up to
    the text of `generate`. Nothing is kept between calls but KV pages, found again by content, the counters,
    and what the policy has learned. Every method raises `InvalidRequest` for what cannot be served.
    """

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
            raise ConfigError(f"model = {type(model).__name__}: a transformers model object; LLM takes paths")
        for name in OF_CHECKPOINTS:
            if name in settings:
                raise ConfigError(f"{name} = {settings[name]!r}: the model object has settled it")
        for name, why in UNUSABLE.items():
            if settings.get(name):
                raise ConfigError(f"{name} = {settings[name]!r}: {why}")
        speculation = {
            name: settings.pop(name) for name in SpeculationConfig.model_fields if name in settings
        }
        speculation |= {"method": method, "num_speculative_tokens": num_speculative_tokens}
        if isinstance(draft, str) and is_search(draft):
            why = "a model object lies in no folder to look around in; name the drafter's"
            raise ConfigError(f"draft = {draft!r}: {why}")
        if draft is not None:
            speculation["draft"] = by_method(draft) if isinstance(draft, str) else draft
        self.config = EngineConfig(**settings, speculation=speculation)
        if method in WITH_CHECKPOINT and method not in self.config.speculation.drafts:
            raise ConfigError(f"method = {method!r}: needs draft = a model object or a checkpoint")
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        self.tokenizer = None if tokenizer is None else Tokenizer(tokenizer)
        target = wrap_model(
            model,
            **self.config.model_dump(include={"max_context", "compile", "batch_invariant"}),
            fused=self.config.fuse,
        )
        add_ends(target, self.tokenizer)
        target.prompts_apart = False  # what is one round's prompt was generated in another
        self.engine = Engine(target, self.tokenizer, self.config)
        self._last: tuple[list[int], SamplingParams]  # text and parameters last worked on
        self._sequence: Sequence | None = None  # of the last step, which the policy knows
        self._ms, self._tokens = 0.0, 0  # of rounds, without prompts
        self._plain_ms: float | None = None
        self._stats = RequestStats()
        self._k: int | None = None  # the lookahead that was set; None: the settings' own
        self._adaptive: AdaptiveLookahead | None = None
        chosen = self.config.speculation
        self._policy = "fixed" if chosen.policy == "adaptive" else chosen.policy  # without a controller
        if chosen.policy == "adaptive" and chosen.most():
            self.adaptive = AdaptiveLookahead(chosen.adaptive.within(chosen.most()))

    # how many drafts

    @property
    def adaptive(self) -> AdaptiveLookahead | None:
        """The controller of the number of drafts; None (the default, except with policy="adaptive"): the
        number is fixed.

        `draft` without k and `step` draft `adaptive.lookahead` tokens, and so does each round of `generate`.
        `step` and `generate` report the drafted and accepted tokens of each round to it, by the rules of
        policy `adaptive`. It goes on from one sequence to the next. None returns to the fixed number, or to
        another policy that was given. Raises `InvalidParameter` for anything else.
        """
        return self._adaptive

    @adaptive.setter
    def adaptive(self, controller: AdaptiveLookahead | None) -> None:
        if not isinstance(controller, AdaptiveLookahead | None):
            raise InvalidParameter("adaptive", controller, "takes an AdaptiveLookahead or None")
        self._forget_sequence()  # the former policy has seen its last round of that sequence
        self.engine.policy.use("adaptive", Adaptive(self.config.speculation.adaptive, controller))
        self._adaptive = controller

    @property
    def lookahead(self) -> int:
        """The most tokens that are drafted in the next round; 0 is plain decoding.

        It may be set between rounds, from 0 to 64; until then drafts that a grammar forces may have 32
        tokens. Under a policy that chooses fewer drafts it is a limit. With a controller it is
        `adaptive.lookahead` and cannot be set. Raises `InvalidParameter` for what cannot be set.
        """
        if self._adaptive is not None:
            return self._adaptive.lookahead
        return self.config.speculation.most(self._policy) if self._k is None else self._k

    @lookahead.setter
    def lookahead(self, k: int) -> None:
        if self._adaptive is not None:
            raise InvalidParameter("lookahead", k, "the controller sets it; set adaptive = None first")
        if not isinstance(k, int) or isinstance(k, bool) or not 0 <= k <= MAX_DRAFTS:
            raise InvalidParameter("lookahead", k, f"takes an int from 0 to {MAX_DRAFTS}")
        self._k = k

    def _asked(self, k: int | None) -> dict[str, Any]:
        """What a sequence asks of the engine: at most `k` drafts a round (None: as set), and its policy."""
        most, policy = self._k, self._policy
        if self._adaptive is not None:
            most, policy = self._adaptive.config.max, "adaptive"
        return {"num_speculative_tokens": most if k is None else k, "policy": policy, "draft_depth": 0}

    # one round

    @torch.inference_mode()
    def draft(
        self,
        ids: Ids,
        k: int | None = None,
        params: SamplingParams | None = None,
        *,
        prompt_len: int | None = None,
    ) -> Draft:
        """What the drafter proposes after `ids`: at most `k` tokens (None: as `lookahead` says), none where
        it has none.

        The target is not asked and nothing is counted.
        """
        if k is None and self._adaptive is not None:
            k = self._adaptive.lookahead
        with self._last_span(ids, params, prompt_len, k) as span:
            Fixed().decide([span], self.engine.scheduler.load)
            with self.engine.leases.reserve([span]) as lease:
                drafting = Drafting(self.engine.proposers, Fixed(), lease, [span])
                drafting.ask_lookups()
                drafting.ask_models()
        return span.draft

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
        """The target's judgement of `drafts` [K] after `ids`: those that stand, then its correction or bonus.

        Nothing is counted and no drafter is told. Drafts that carry q (as from `draft`) are judged
        with it where `step` would do so.

        With `target_logits` [K + 1, V] or [K, V] the target is not called: these are its raw logits, row i
        those that draft i is judged by, and the last row gives the bonus token. With K rows there is no bonus
        token. All else is the same, and with the target's own logits so is the verdict. Raises
        `InvalidParameter` for logits that are no float tensor of such a shape, for a NaN or +inf in them, and
        for `prompt_logprobs`, which need the prompt's rows.
        """
        draft = read_draft(drafts, self.engine.target.vocab_size)
        k = len(draft.tokens)
        if target_logits is not None:
            return verify_by(self.engine, self._prepare(ids, params, prompt_len), draft, target_logits)
        with self._last_span(ids, params, prompt_len) as span:
            check_room(span.seq, k)
            span.decision = Decision.of([Ask(GIVEN, k)])
            with self.engine.leases.reserve([span]) as lease:
                if span.reserved < k:  # the pages of a window may be all that there are
                    raise NeverFits(f"{k} drafts after {len(span.seq.tokens)} tokens: no pages for them")
                span.draft = draft
                self.engine.ask_target([span], lease, Stopwatch())
        return span.verdict

    def step(
        self,
        ids: Ids,
        params: SamplingParams | None = None,
        *,
        k: int | None = None,
        prompt_len: int | None = None,
        target_logits: Tensor | None = None,
    ) -> StepResult:
        """Drafts and verifies one round after `ids`, and counts it.

        `k` limits the drafts of this round alone (None: as `lookahead` says); a policy, or the controller,
        may choose fewer. What has been computed for an earlier beginning of `ids` is found again, except for
        the last, unfinished page.

        With `target_logits`, as `verify` takes them, they judge what `draft` returns for the same ids, k and
        params, and the target is not called for it. The round counts and teaches as any other, but is not in
        `speedup_estimate`. Raises also where a model would draft anew: sampled, without a seed.
        """
        if target_logits is not None and k is None and self._adaptive is not None:
            k = self._adaptive.lookahead
        with self._last_span(ids, params, prompt_len, k, goes_on=True) as span:
            self._last, stats = (list(span.seq.tokens), span.seq.request.params), span.seq.stats
            began = perf_counter()
            if target_logits is None:
                self.engine.round([span])
            else:
                round_by(self.engine, span, target_logits)
            ms = (perf_counter() - began) * 1e3
        self._stats.add(stats)
        if span.verdict.finish:
            self._forget_sequence()
        if target_logits is None:
            self._clock(ms, len(span.verdict.tokens))
        reason = next(iter(stats.reasons), None)
        return StepResult(span.draft, span.verdict, reason, stats.draft_ms, ms - stats.draft_ms)

    # a whole text

    def generate(
        self, ids: Ids, params: SamplingParams | None = None, *, max_tokens: int | None = None
    ) -> RequestOutput:
        """Continues one prompt to its end: the same result as `LLM.generate`, with empty texts without a
        tokenizer.

        `max_tokens` replaces that of `params`.
        """
        params = params or SamplingParams()
        if max_tokens is not None:
            params = SamplingParams(**{**params.model_dump(), "max_tokens": max_tokens})
        prompt = self._encode(ids)
        self._last = prompt, params
        output = RequestOutput(prompt, [Completion() for _ in range(params.n)])
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
        """The account of all steps and texts since the last reset; zeros before the first round."""
        return self._stats.account()

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted; 0.0 before any draft."""
        return self.stats.acceptance_rate

    @property
    def tokens_per_target_call(self) -> float:
        """Generated tokens, stop tokens among them / target calls that sampled; 0.0 before any call."""
        return self._stats.tokens_per_target_call

    @property
    def naive_speedup(self) -> float:
        """Accepted drafts per speculative round + 1, which is often reported as the speed-up; 1.0 before any
        round.

        It takes drafting for free, a call over K + 1 rows for as cheap as one over a single row, and leaves
        out the calls that had no draft. `speedup_estimate` is below it by what these cost.
        """
        return 1.0 + self.stats.mean_accepted_per_round

    @property
    def speedup_estimate(self) -> float:
        """Plain ms per token / ms per token of the rounds so far, both measured on this machine; 1.0 before
        any round.

        Plain calls are timed when this is first asked, after the text last worked on, and remembered until
        the next reset. Prompts are left out on both sides, and so are texts with n > 1. In `step` the rounds
        also pay for the unfinished page that is computed again. See `naive_speedup` for what others report.
        """
        if not self._tokens:
            return 1.0
        if self._plain_ms is None:
            self._plain_ms = self._time_plain_calls(*self._last)
        return self._plain_ms * self._tokens / self._ms

    def reset_stats(self) -> None:
        """Zeroes the counters and forgets the plain cost and what the policy knows of a text. Texts do not
        depend on it.

        The controller begins anew; a lookahead that was set stays.
        """
        self._forget_sequence()
        if self._adaptive is not None:
            self._adaptive.reset()
        self._stats = RequestStats()
        self._ms, self._tokens, self._plain_ms = 0.0, 0, None

    def _clock(self, ms: float, tokens: int) -> None:
        self._ms += ms
        self._tokens += tokens

    def _time_plain_calls(self, ids: list[int], params: SamplingParams) -> float:
        """Median ms of plain calls with one row, sampled as `params` say."""
        pool = self.engine.pool
        room = min(self.engine.max_context, pool.num_blocks * pool.block_size)
        prompt = ids[: max(1, room - PLAIN_CALLS - 1)]
        endless = {
            "max_tokens": min(PLAIN_CALLS + 1, room - len(prompt)),
            "min_tokens": 0,
            "ignore_eos": True,
        }
        unchecked = {"n": 1, "stop": (), "stop_token_ids": (), "prompt_logprobs": None, "structured": None}
        plain = params.model_copy(update=endless | unchecked)
        return median([ms for ms, events in self._run(prompt, plain, OFF) if events][-PLAIN_CALLS:])

    # behind all of them

    def _run(
        self, prompt: list[int], params: SamplingParams, method: str | None = None
    ) -> Generator[tuple[float, list[Event]], None, None]:
        """Each step of one request through the engine: its ms and its events."""
        engine = self.engine
        request_id = engine.add_request(prompt, params, {"method": method, **self._asked(None)})
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
        engine.pool.attach(seq)
        try:
            pool, max_rows = engine.pool, self.config.max_batch_tokens
            # a drafter that reads states waits for them
            beside = 1 if engine.target.taps else min(max_rows, pool.block_size)
            while seq.pending > beside:
                rows = pool.chunk(seq, min(max_rows, seq.pending - 1))
                engine.round([Span(seq, seq.committed, rows)])
            yield Span(seq, seq.committed, seq.pending, decodes=True)  # drafts may follow a prompt
        finally:
            engine.proposers.release(seq)
            engine.pool.release(seq)

    def _prepare(
        self, ids: Ids, params: SamplingParams | None, prompt_len: int | None, k: int | None = None
    ) -> Sequence:
        """A sequence that holds `ids`, checked, without pages."""
        params, tokens = params or SamplingParams(), self._encode(ids)
        if params.n != 1:
            raise InvalidParameter("n", params.n, "a round carries one text")
        if prompt_len is not None and not 0 < prompt_len <= len(tokens):
            raise InvalidParameter("prompt_len", prompt_len, f"of {len(tokens)} ids, 1 to all are the prompt")
        at = len(tokens) if prompt_len is None else prompt_len
        (seq,) = self.engine.admission.admit(ROUND, tokens[:at], params, self._asked(k), written=tokens[at:])
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

    def _encode(self, ids: Ids) -> list[int]:
        if isinstance(ids, str) and self.tokenizer is not None:
            return self.tokenizer.encode(ids)
        return read_ids("ids", ids)
