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
    known = f"{proposers.default} where none is named; known are {', '.join([OFF, *names])}"
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
        return row("on", "a lookup in what a request brings", drafts=GIVEN_DRAFTS, **own)
    why = (
        "a lookup in tokens, without a model" if name in proposers.lookups((name,)) else "its model is loaded"
    )
    return row("on", why, drafts=proposers.max_drafts(name, config.most()), **own)


def why_lacking(name: str, reason: Reason, engine: Engine) -> str:
    if reason is Reason.MEMORY:
        return f"its model is not loaded, to keep the memory limit: {engine.proposers.refusals[name].why}"
    if name in WITH_CHECKPOINT and name not in engine.config.speculation.drafts:
        return "no drafter is configured (set --draft)"
    if name in OF_TARGET:
        return f"not loaded: --method {name} loads its layers, if the model's checkpoint has any"
    return (
        f"not loaded: it has layers or weights of its own, for which --method {name} makes room at the start"
    )


def with_probabilities(proposers: Proposers) -> list[str]:
    """Methods whose drafts may have some: those with weights, and plug-ins."""
    built = [name for name in known_methods() if proposers.find(name) is not None]
    return [name for name in built if name not in TABLE or name not in proposers.lookups((name,))]


def speculation(engine: Engine) -> CapabilityRows:
    """What a request may set of its own speculation."""
    proposers, config = engine.proposers, engine.config.speculation
    known = f"{config.policy} where none is named; known are {', '.join(USUAL_DRAFTS)}"
    yield "parameters.policy", row("on", known)
    for name in USUAL_DRAFTS:
        drafts = config.most(name)
        yield f"policies.{name}", row("on", f"at most {drafts} drafts a round", drafts=drafts)
    usual = f"{config.most()} under policy {config.policy}; 0 is plain decoding"
    yield "parameters.num_speculative_tokens", row("on", usual, most=MAX_DRAFTS)
    rules = get_args(AcceptanceSetting)
    known = f"{config.acceptance} where none is named; known are {', '.join(rules)}"
    yield "parameters.acceptance", row("on", known)
    yield "acceptance.matching", row("on", "each row is sampled, and a draft is accepted while it is equal")
    models = ", ".join(with_probabilities(proposers))
    where = f"sampled requests whose drafts have probabilities ({models})"
    none = "no method with a model is loaded, and drafts of lookups are matched"
    for name in rules:
        if name not in ("auto", "matching"):
            yield f"acceptance.{name}", on_or_off(models, where, none)
    off = config.method == OFF or not config.most()
    why_off = "speculation is off in the settings, and a prediction is read where a request names a method"
    given = row("on", "drafts are read from it first", most=MAX_PREDICTION, drafts=GIVEN_DRAFTS)
    given = row("off", why_off) if off else given
    yield "parameters.prediction", given
    yield "parameters.prediction.text", given if engine.tokenizer else row("refused", NO_TOKENIZER)
    built = {name: proposers.find(name) for name in known_methods()}
    remembering = ", ".join(name for name, each in built.items() if isinstance(each, Remembering))
    why = f"earlier answers, which {remembering} drafts from"
    yield "parameters.pool", on_or_off(remembering and config.suffix_pools, why, "suffix_pools is 0")
    lookups = ", ".join(name for name, each in built.items() if isinstance(each, Extending))
    none = "no lookup can continue a draft"
    yield "parameters.chained_drafts", on_or_off(lookups, f"drafts are continued by {lookups}", none)
    branching = ", ".join(sorted(proposers.branching(built)))
    why = f"{branching}, where drafts are judged by matching and no grammar binds the request"
    none = "no method drafts trees here; over recurrent layers none does"
    yield "parameters.draft_depth", on_or_off(branching, why, none)


def sampling(engine: Engine) -> CapabilityRows:
    """Each sampling parameter: refused, without an effect on speculation, or with which."""
    refused = {} if engine.tokenizer else dict.fromkeys(NEED_TOKENIZER, NO_TOKENIZER)
    if engine.tokenizer and (no_grammar := engine.grammars.refusal()):
        refused["structured"] = no_grammar
    changed = {"structured": "drafts are cut where they leave the grammar"}
    if engine.runtime.facts.prefix_cache:
        changed["prompt_logprobs"] = "no prefix is taken from the cache"
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
        why = changed.get(name, "drafts are verified under it")
        why += "; in Python alone, where the engine is in the caller's process" * (name in IN_PYTHON)
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
    yield "limits.vocab_size", row("on", "ids for which the model has a logit", tokens=facts.vocab_size)
    chunks = "max_batch_tokens; longer prompts are computed in chunks"
    yield "limits.max_batch_tokens", row("on", chunks, tokens=config.max_batch_tokens)
    own = config.serve.max_request_tokens
    unlimited, limited = "no limit but the context", "set by max_request_tokens, on the server"
    each = row("on", unlimited) if own is None else row("on", limited, tokens=own)
    yield "limits.max_request_tokens", each
