"""Checks of the rows of the capability table, each by requests to the engine that made it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from speculon.core.config import MAX_PREDICTION, SamplingParams
from speculon.core.errors import SpeculonError, UnknownModel
from speculon.core.hub import cached_models
from speculon.core.images import ImageInput
from speculon.core.types import Capability, Reason
from speculon.decoding import verify
from speculon.decoding.kv import slots
from speculon.drafters.draft_model.model_drafter import ModelDrafter
from speculon.drafters.known import published_for
from speculon.drafters.runner import CapturedDraft
from speculon.engine.engine import Engine
from speculon.engine.given import read_draft, verify_by
from speculon.speculation.proposers.base import Extending
from speculon.speculation.proposers.registry import known_methods
from speculon.target.block import Gated, Loop
from speculon.target.captured import Captured
from speculon.target.compiled import Program
from speculon.target.fuse import FusedLayer
from tests.tiny.adapter_files import adapted
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, noisy_draft
from tests.tiny.forms import engine_of
from tests.tiny.recurrent import recurrent_target
from tests.tiny.scripted import Result, drain

PROMPT = [5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 8]
# reasons of a method that does not run at all
MISSING = {Reason.NO_DRAFTER, Reason.MEMORY, Reason.ERROR, Reason.OFF_CONFIG, Reason.OFF_REQUEST}


def with_draft() -> Engine:
    noisy_draft()
    return engine_of(speculation=DRAFT)


def without_tokenizer() -> Engine:
    engine = engine_of()
    return Engine(engine.target, None, engine.config)


def without_memory() -> Engine:
    noisy_draft()
    return engine_of(speculation={**DRAFT, "memory_limit_gb": 0.001})


ENGINES: dict[str, Callable[[], Engine]] = {
    "lookups": engine_of,
    "a draft model": with_draft,
    "a draft model without memory": without_memory,
    "no tokenizer": without_tokenizer,
    "recurrent states": lambda: engine_of(recurrent_target("lfm2")),
    "no snapshots": lambda: engine_of(recurrent_target("lfm2"), snapshot_memory_gb=0),
    "few pages": lambda: engine_of(num_blocks=8, prefix_cache=False, max_batch_tokens=8, max_num_seqs=2),
    "off": lambda: engine_of(speculation={"method": "off", "suffix_pools": 0, "policy": "solo"}),
    "ngram": lambda: engine_of(speculation={"method": "ngram", "num_speculative_tokens": 7}),
    # of these, what the model itself decides
    "windows": lambda: engine_of(tiny_target("mistral"), num_blocks=8, max_batch_tokens=8, max_num_seqs=2),
    "states in one call": lambda: engine_of(recurrent_target("qwen3_next")),
    "states row by row": lambda: engine_of(recurrent_target("jamba")),
    "without attention": lambda: engine_of(recurrent_target("mamba")),
    "not fused": lambda: engine_of(tiny_target("llama", fused=False), fuse=False),
    "adapters": lambda: engine_of(adapted("llama")),
}
OF_MODELS = tuple(ENGINES)[-6:]
OF_REQUESTS = ("methods", "parameters", "policies", "acceptance")

# what a request asks for each parameter, and a value beyond the limit of the row
SAMPLED: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 0.1,
    "max_tokens": 3,
    "min_tokens": 2,
    "stop": ["an"],
    "stop_token_ids": [4],
    "ignore_eos": False,
    "seed": 3,
    "n": 3,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {9: 3.0},
    "bad_words": ["an"],
    "structured": {"choice": ["an apple", "a pear"]},
    "thinking": {"opened": True},
    "logits_processor": lambda tokens, logits: logits.roll(1),
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}
OWN: dict[str, Any] = {
    "method": "suffix",
    "policy": "fixed",
    "acceptance": "matching",
    "num_speculative_tokens": 3,
    "chained_drafts": True,
    "draft_depth": 2,
    "pool": "mine",
    "prediction": [9, 10, 11, 12],
    "prediction.text": "an apple",
}
BEYOND: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(("n", "logprobs", "prompt_logprobs", "top_k", "num_speculative_tokens"), lambda n: n),
    "stop": lambda n: ["a"] * n,
    "stop_token_ids": lambda n: [4] * n,
    "bad_words": lambda n: ["a"] * n,
    "logit_bias": lambda n: dict.fromkeys(range(n), 0.0),
    "prediction": lambda n: [4] * n,
    "prediction.text": lambda n: "a" * n,
}


def adapts(engine: Engine) -> bool:
    """Whether a request under an adapter is served, and writes another text than the model itself."""
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    try:
        for adapter in ("", "one"):
            engine.add_request(PROMPT, params, None, f"of {adapter}", adapter=adapter)
    except UnknownModel as error:
        assert error.feature == "adapters"
        drain(engine)
        return False
    base, other = (result.tokens for result in drain(engine).values())
    return base != other


def ask(
    engine: Engine, prompt: list[int] = PROMPT, speculation: dict[str, Any] | None = None, **params: Any
) -> Result:
    """The first sample of a request, run to its end."""
    settings = {"max_tokens": 4, "ignore_eos": True, **params}
    engine.add_request(prompt, SamplingParams(**settings), speculation, "r")
    return drain(engine)["r", 0]


def ask_for(engine: Engine, name: str, value: Any, **params: Any) -> Result:
    if name in SAMPLED:
        return ask(engine, **{**params, name: value})
    return ask(engine, speculation={name.partition(".")[0]: value}, **params)


def refusal(work: Callable[[], Any]) -> str | None:
    """The feature of the error that is raised."""
    with pytest.raises(SpeculonError) as refused:
        work()
    return refused.value.feature


def resolved(engine: Engine, speculation: dict[str, Any] | None = None, **params: Any) -> Any:
    values = SamplingParams(**{"max_tokens": 4, **params})
    return engine.admission.admit("r", PROMPT, values, speculation)[0]


# one check for each group of rows; it raises AssertionError (or pytest's failure) for a false row


def check_method(engine: Engine, name: str, row: Capability) -> None:
    feature = f"methods.{name}"
    if row.status == "refused":
        assert refusal(lambda: ask(engine, speculation={"method": name})) == feature
        return
    reasons = ask(engine, speculation={"method": name}).stats.reasons
    found = {str(reason) for reason in reasons} & {str(reason) for reason in MISSING}
    assert row.status == ("off" if found else "on"), reasons
    request = resolved(engine, {"method": name}).request
    if found:
        assert row.reason.partition(":")[0] in found and not request.max_drafts
        return
    drafts = set(request.max_drafts.values())
    if name in ("prediction", "grammar"):
        brings = {"prediction": [4, 5]} if name == "prediction" else None
        form = {"structured": {"regex": "an+"}} if name == "grammar" and engine.tokenizer else {}
        drafts = {resolved(engine, brings, **form).request.max_drafts.get(name, row.limits["drafts"])}
    assert drafts == {row.limits["drafts"]} or engine.config.speculation.method == "off"
    proposer = engine.proposers.find(name)
    if proposer is not None:
        assert row.limits.get("context") == proposer.needs.max_context


def check_parameter(engine: Engine, name: str, row: Capability) -> None:
    value = SAMPLED.get(name, OWN.get(name))
    if row.status == "refused":
        assert refusal(lambda: ask_for(engine, name, value)) == f"parameters.{name}"
        return
    result = ask_for(engine, name, value)
    assert result.finish is not None and result.finish.reason in ("length", "stop")
    if name in SAMPLED:
        assert row.status == ("changed" if is_changed(engine, name, value) else "on")
    else:
        assert row.status == ("on" if has_effect(engine, name, value) else "off")
    if "most" in row.limits:
        assert row.limits["most"] > 0
        beyond = BEYOND[name](row.limits["most"] + 1)
        assert refusal(lambda: ask_for(engine, name, beyond)) == f"parameters.{name.partition('.')[0]}"
        if row.limits["most"] < min(MAX_PREDICTION, engine.target.vocab_size + 1):
            assert ask_for(engine, name, BEYOND[name](row.limits["most"]), max_tokens=1).finish is not None


def is_changed(engine: Engine, name: str, value: Any) -> bool:
    """Whether speculation works otherwise for such a request."""
    plain, seq = resolved(engine), resolved(engine, **{name: value})
    draws = judged(engine, "block") > 0
    return (
        (draws and seq.request.acceptance != plain.request.acceptance)
        or seq.request.max_drafts != plain.request.max_drafts
        or seq.grammar is not None
        or (caches(engine) and not cached(engine, **{name: value}))
        or (name == "n" and engine.config.speculation.policy == "solo")
    )


def has_effect(engine: Engine, name: str, value: Any) -> bool:
    speculation = {name.partition(".")[0]: value}
    request = resolved(engine, speculation).request
    match name:
        case "prediction" | "prediction.text":
            return "prediction" in request.max_drafts
        case "pool":
            engine.forget_pools()
            ask(engine, speculation={"method": "suffix", "pool": value})
            return engine.forget_pools(value) == 1
        case "chained_drafts":
            return any(isinstance(engine.proposers.find(one), Extending) for one in ("suffix", "ngram"))
        case "draft_depth":
            return bool(engine.proposers.branching(("draft_model", "eagle3")))
        case "num_speculative_tokens":
            named = resolved(engine, {"method": "suffix", name: value}).request
            return set(named.max_drafts.values()) == {value}
        case _:
            return value in (request.policy, request.acceptance, *request.max_drafts)


def cached(engine: Engine, **params: Any) -> int:
    """Tokens that a request finds in the prefix cache after others with its prompt."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(slots, "ALONE", 1)  # a hit behind a snapshot pays, however few tokens it has
        patched.setattr(slots, "FEWEST", 1)
        ask_before(engine)
        return ask(engine, **{"max_tokens": 2, **params, "n": 1}).stats.cached_tokens


@cache
def ask_before(engine: Engine) -> None:
    """The first prompt shows what is shared, the second leaves a snapshot there."""
    for _ in range(2):
        ask(engine, max_tokens=1)


@cache
def caches(engine: Engine) -> bool:
    return cached(engine) > 0


@cache
def judged(engine: Engine, rule: str) -> int:
    """How many drafts have probabilities where a request asks for this rule."""
    calls: list[int] = []
    original = verify.WITH_Q[rule]

    def counted(spans: list[Any], *more: Any) -> Any:
        calls.append(len(spans))
        return original(spans, *more)

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(verify.WITH_Q, rule, counted)
        for method in known_methods():
            ask(engine, speculation={"method": method, "acceptance": rule})
    return sum(calls)


def check_policy(engine: Engine, name: str, row: Capability) -> None:
    assert row.status == "on"
    assert ask(engine, speculation={"policy": name}).finish is not None
    request = resolved(engine, {"policy": name, "method": "suffix"}).request
    assert (request.policy, set(request.max_drafts.values())) == (name, {row.limits["drafts"]})


def check_acceptance(engine: Engine, name: str, row: Capability) -> None:
    assert resolved(engine, {"acceptance": name}).request.acceptance == name
    used = name == "matching" or judged(engine, name) > 0
    assert row.status == ("on" if used else "off")


def check_rollback(engine: Engine, name: str, row: Capability) -> None:
    target = engine.target
    if name == "pages":
        in_pages = any(layer.bytes_per_token for layer in target.layers)
        assert row.status == ("on" if in_pages else "off")
        return
    mixers = [m for m in target.mixers if f"states.{type(m.module).__name__}" == name]
    assert mixers and row.status == "on"
    assert {row.limits.get("by_row")} == {m.by_row if m.continues else None for m in mixers}


def check_limit(engine: Engine, name: str, row: Capability) -> None:
    assert row.status == "on"
    most = next(iter(row.limits.values()), 0)
    room = engine.pool.num_blocks * engine.pool.block_size
    match name:
        case "max_context":
            assert refusal(lambda: ask(engine, [4] * most, max_tokens=1)) == "limits.max_context"
            if most <= engine.capabilities()["limits.pool"].limits["tokens"]:
                assert ask(engine, [4] * (most - 1), max_tokens=1).finish is not None
            else:
                assert refusal(lambda: ask(engine, [4] * (most - 1), max_tokens=1)) == "limits.pool"
        case "pool":
            assert row.limits["pages"] == engine.pool.num_blocks and (tokens := row.limits["tokens"]) >= room
            if tokens < engine.max_context:
                assert refusal(lambda: ask(engine, [4] * tokens, max_tokens=1)) == "limits.pool"
            longest = min(tokens, engine.max_context)
            assert ask(engine, [4] * (longest - 1), max_tokens=1).finish is not None
        case "vocab_size":
            assert refusal(lambda: ask(engine, [most])) == "limits.vocab_size"
            assert ask(engine, [most - 1]).finish is not None
        case "page":
            assert most == engine.pool.block_size
        case "max_num_seqs":
            for i in range(most + 1):
                params = SamplingParams(max_tokens=2, ignore_eos=True)
                engine.add_request([4], params, {"method": "off"}, f"r{i}")
            engine.step()
            assert (engine.load.running, engine.load.waiting) == (most, 1)
            drain(engine)
        case "max_batch_tokens":
            engine.add_request(PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), None, "r")
            engine.step()
            assert engine.scheduler.running[0].committed == min(len(PROMPT), most)
            drain(engine)
        case _:
            assert name == "max_request_tokens" and (most or None) == engine.config.serve.max_request_tokens


def check_mode(engine: Engine, name: str, row: Capability) -> None:
    target = engine.target
    found = {
        "prefix_cache": lambda: cached(engine) > 0,
        "fusion": lambda: (
            isinstance(target.runner.run, Loop)
            or any(isinstance(m, FusedLayer) for m in target.model.modules())
        ),
        "compiled": lambda: compiled(target.runner.run),
        "captured": lambda: isinstance(target.runner.run, Captured),
        "batch_invariant": lambda: target.batch_invariant,
        "tokenizer": lambda: engine.tokenizer is not None,
        "adapters": lambda: adapts(engine),
        "known_drafters": lambda: bool(cached_models().keys() & published(engine)),
        "external_logits": lambda: judged_by_caller(engine) == ((5, 6), 1),
    }
    assert row.status == ("on" if found[name]() else "off")


def published(engine: Engine) -> set[str]:
    return {*published_for(engine.target.model.name_or_path, engine.config.speculation.known_drafters)}


def judged_by_caller(engine: Engine) -> tuple[tuple[int, ...], int]:
    """Tokens and accepted drafts where the caller's logits have 5 and then 6, and the drafts are 5 and 4."""
    seq = engine.admission.admit("caller", PROMPT, SamplingParams(temperature=0, max_tokens=4))[0]
    logits = torch.zeros(3, engine.target.vocab_size)
    logits[[0, 1, 2], [5, 6, 7]] = 1.0
    verdict = verify_by(engine, seq, read_draft([5, 4], engine.target.vocab_size), logits)
    return verdict.tokens, verdict.accepted


def check_programs(engine: Engine, name: str, row: Capability) -> None:
    """Of the target, where `name` is that of the group; else of a drafter's model or network."""
    if name in ("compiled", "captured"):
        check_mode(engine, name, row)
        return
    drafter: Any = engine.proposers.find(name)
    run = drafter.model.runner.run if isinstance(drafter, ModelDrafter) else getattr(drafter, "run", None)
    assert row.status == ("on" if compiled(run) or isinstance(run, Captured | CapturedDraft) else "off")


def compiled(run: object) -> bool:
    """Whether it is a loop whose operations are programs."""
    return (
        isinstance(run, Loop)
        and isinstance(run.blocks[0].mlp, Gated)
        and isinstance(run.blocks[0].mlp.gating, Program)
    )


def check_images(engine: Engine, name: str, row: Capability) -> None:
    """A prompt with an image that no text has; what a vision tower does with one is tested elsewhere."""
    image = ImageInput((0,), "0", {"pixel_values": np.zeros((1, 3, 28, 28), np.float32)})
    found = refusal(
        lambda: engine.admission.admit("images", PROMPT, SamplingParams(max_tokens=1), images=[image])
    )
    assert (row.status, found) == (("refused", "images") if engine.target.vision is None else ("on", None))


CHECKS: dict[str, Callable[[Engine, str, Capability], None]] = {
    "images": check_images,
    "compiled": check_programs,
    "captured": check_programs,
    "methods": check_method,
    "parameters": check_parameter,
    "policies": check_policy,
    "acceptance": check_acceptance,
    "rollback": check_rollback,
    "limits": check_limit,
}


def check(engine: Engine, feature: str, row: Capability) -> None:
    group, _, name = feature.partition(".")
    assert row.reason
    CHECKS.get(group, check_mode)(engine, name or feature, row)
