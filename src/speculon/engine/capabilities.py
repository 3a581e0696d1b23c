"""The capability table of an engine: what it does, what a request may ask of it, and why not the rest.

Each row follows from the model, the settings, the proposers and the limits; a request is judged by the same
facts when it is admitted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_args

from speculon.core.config import (
    GIVEN_DRAFTS,
    IN_PYTHON,
    MAX_DRAFTS,
    MAX_PREDICTION,
    USUAL_DRAFTS,
    SamplingParams,
)
from speculon.core.config.speculation import AcceptanceSetting
from speculon.core.errors import SpeculonError
from speculon.core.types import Capability, CapabilityRows, Reason, Status, acceptance_rule, on_or_off, row
from speculon.decoding.text.tokenizer import NO_TOKENIZER
from speculon.engine.admission import NEED_TOKENIZER, OF_VOCABULARY
from speculon.speculation.proposers.base import Extending, Remembering
from speculon.speculation.proposers.registry import (
    AUTO,
    OF_TARGET,
    OFF,
    TABLE,
    WITH_CHECKPOINT,
    known_methods,
)

if TYPE_CHECKING:
    from speculon.engine.engine import Engine
    from speculon.speculation.proposers.compose import Proposers


def capability_table(engine: Engine) -> dict[str, Capability]:
    """The table, by feature: the runtime's rows, then those of what all runtimes have in common."""
    rows = dict(engine.runtime.capabilities(engine.config))
    parts = (texts, methods, speculation, sampling, limits)
    return rows | {feature: row for part in parts for feature, row in part(engine)}


def texts(engine: Engine) -> CapabilityRows:
    text = engine.tokenizer
    words = "" if text is None else f"{type(text.inner).__name__}, {len(text.inner)} tokens"
    yield "tokenizer", on_or_off(text, words, "none, token ids only")
    own = "SpeculativeDecoder alone: verify and step judge drafts by the caller's logits (target_logits)"
    yield "external_logits", row("on", own)


def methods(engine: Engine) -> CapabilityRows:
    """Each registered method. Those without weights are built here, as their first request would."""
    proposers = engine.proposers
    names = [name for name in known_methods() if name != OFF]
    known = f"{proposers.default}, unless a request names one of {', '.join([OFF, *names])}"
    yield "parameters.method", row("on", known)
    for name in names:
        yield f"methods.{name}", method(name, engine)


def method(name: str, engine: Engine) -> Capability:
    proposers, config = engine.proposers, engine.config.speculation
    try:
        lacking = proposers.lacking(name)
    except Exception as error:  # of a plug-in
        return row("refused", str(error) if isinstance(error, SpeculonError) else type(error).__name__)
    if lacking is not None:
        return row("off", why_lacking(name, lacking, engine))
    if name == AUTO:
        chain = [method for method in proposers.chain(name) if proposers.lacking(method) is None]
        return row("on", f"asks {', then '.join(chain)}", drafts=config.most())
    proposer = proposers.find(name)
    context = proposer and proposer.limits.max_context
    own = {"context": context} if context else {}
    if name in engine.admission.from_request:
        return row(
            "on",
            "looks up drafts in what the request brings: a grammar or a prediction",
            drafts=GIVEN_DRAFTS,
            **own,
        )
    why = (
        "looks up drafts in earlier tokens, without a model"
        if name in proposers.lookups((name,))
        else "its model is loaded"
    )
    return row("on", why, drafts=proposers.max_drafts(name, config.most()), **own)


def why_lacking(name: str, reason: Reason, engine: Engine) -> str:
    if reason is Reason.MEMORY:
        return f"its model is not loaded, to keep the memory limit: {engine.proposers.refusals[name].why}"
    if name in WITH_CHECKPOINT and name not in engine.config.speculation.drafts:
        return "no drafter is configured (set --draft)"
    if name in OF_TARGET:
        return f"not loaded; --method {name} loads its layers, if the model's checkpoint has them"
    return f"not loaded: it has weights of its own, so it must be chosen at the start, by --method {name}"


def with_probabilities(proposers: Proposers) -> list[str]:
    """Methods whose drafts may have some: those with weights, and plug-ins."""
    built = [name for name in known_methods() if proposers.find(name) is not None]
    return [name for name in built if name not in TABLE or name not in proposers.lookups((name,))]


def speculation(engine: Engine) -> CapabilityRows:
    """What a request may set of its own speculation."""
    proposers, config = engine.proposers, engine.config.speculation
    known = f"{config.policy}, unless a request names one of {', '.join(USUAL_DRAFTS)}"
    yield "parameters.policy", row("on", known)
    for name in USUAL_DRAFTS:
        drafts = config.most(name)
        yield f"policies.{name}", row("on", f"at most {drafts} drafts per round", drafts=drafts)
    usual = f"{config.most()} under policy {config.policy}; 0 is plain decoding"
    yield "parameters.num_speculative_tokens", row("on", usual, most=MAX_DRAFTS)
    rules = get_args(AcceptanceSetting)
    known = f"{config.acceptance}, unless a request names one of {', '.join(rules)}"
    yield "parameters.acceptance", row("on", known)
    yield (
        "acceptance.matching",
        row(
            "on", "each row is sampled from the target, and drafts are accepted while they equal the samples"
        ),
    )
    models = ", ".join(with_probabilities(proposers))
    where = f"sampled requests whose drafts have probabilities ({models})"
    none = "no method with a model is loaded, and drafts of lookups are judged by matching"
    for name in rules:
        if name not in ("auto", "matching"):
            yield f"acceptance.{name}", on_or_off(models, where, none)
    off = config.method == OFF or not config.most()
    why_off = "speculation is off in the settings; a prediction is used only when the request names a method"
    given = row("on", "drafts are taken from the prediction first", most=MAX_PREDICTION, drafts=GIVEN_DRAFTS)
    given = row("off", why_off) if off else given
    yield "parameters.prediction", given
    yield "parameters.prediction.text", given if engine.tokenizer else row("refused", NO_TOKENIZER)
    built = {name: proposers.find(name) for name in known_methods()}
    remembering = ", ".join(name for name, each in built.items() if isinstance(each, Remembering))
    why = f"earlier answers, which {remembering} drafts from"
    yield (
        "parameters.pool",
        on_or_off(
            remembering and config.suffix_pools, why, "suffix_pools is 0, so no earlier answers are kept"
        ),
    )
    lookups = ", ".join(name for name, each in built.items() if isinstance(each, Extending))
    none = "no lookup can continue a draft"
    yield (
        "parameters.chained_drafts",
        on_or_off(lookups, f"these lookups can continue another method's draft: {lookups}", none),
    )
    branching = ", ".join(sorted(proposers.branching(built)))
    why = f"{branching}, when drafts are judged by matching and the request has no grammar"
    none = "no loaded method drafts trees, or the model has recurrent layers, which allow none"
    yield "parameters.draft_depth", on_or_off(branching, why, none)


def sampling(engine: Engine) -> CapabilityRows:
    """Each sampling parameter: refused, without an effect on speculation, or with which."""
    refused = {} if engine.tokenizer else dict.fromkeys(NEED_TOKENIZER, NO_TOKENIZER)
    if engine.tokenizer and (no_grammar := engine.grammars.refusal()):
        refused["structured"] = no_grammar
    changed = {"structured": "a draft is cut at the first token that the grammar does not allow"}
    if engine.runtime.facts.prefix_cache:
        changed["prompt_logprobs"] = "the prompt is computed anew, without the prefix cache"
    if engine.config.speculation.policy == "solo":
        changed["n"] = "policy solo drafts for one sequence at a time"
    if with_probabilities(engine.proposers):
        rule = partial(acceptance_rule, engine.config.speculation.acceptance)
        usual, greedy, seeded = map(
            rule, (SamplingParams(), SamplingParams(temperature=0), SamplingParams(seed=0))
        )
        if greedy != usual:
            changed["temperature"] = f"at 0, acceptance is {greedy} instead of {usual}"
        if seeded != usual:
            changed["seed"] = f"acceptance is {seeded} instead of {usual}"
    for name in SamplingParams.model_fields:
        if name in refused:
            yield f"parameters.{name}", row("refused", refused[name])
            continue
        status: Status = "changed" if name in changed else "on"
        why = changed.get(name, "drafts are verified with it")
        why += "; only in Python, where the engine runs in the caller's process" * (name in IN_PYTHON)
        yield f"parameters.{name}", row(status, why, **most_of(name, engine.runtime.facts.vocab_size))


def most_of(name: str, vocab_size: int) -> dict[str, int]:
    """The most of a parameter: a whole number, or how many there may be."""
    field = SamplingParams.model_fields[name]
    whole = int in (field.annotation, *get_args(field.annotation))
    names = ("le", "max_length") if whole else ("max_length",)
    most = [getattr(limit, name) for limit in field.metadata for name in names if hasattr(limit, name)]
    if name in OF_VOCABULARY:
        most.append(vocab_size)
    return {"most": min(most)} if most else {}


def limits(engine: Engine) -> CapabilityRows:
    config, facts = engine.config, engine.runtime.facts
    yield "limits.vocab_size", row("on", "token ids must be below it", tokens=facts.vocab_size)
    chunks = "max_batch_tokens; longer prompts are computed in chunks"
    yield "limits.max_batch_tokens", row("on", chunks, tokens=config.max_batch_tokens)
    own = config.serve.max_request_tokens
    unlimited, limited = (
        "not set, so only the context limits a request",
        "set by max_request_tokens, on the server",
    )
    each = row("on", unlimited) if own is None else row("on", limited, tokens=own)
    yield "limits.max_request_tokens", each
