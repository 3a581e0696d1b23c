"""The capability table of an engine: what it does, what a request may ask of it, and why not the rest.

Each row follows from the model, the settings, the proposers and the limits; a request is judged by the same
facts when it is admitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, get_args

from speculon.checkpoints.hub import cached_models
from speculon.core.config import (
    GIVEN_DRAFTS,
    IN_PYTHON,
    MAX_DRAFTS,
    MAX_PREDICTION,
    USUAL_DRAFTS,
    EngineConfig,
    SamplingParams,
)
from speculon.core.config.speculation import Acceptance
from speculon.core.errors import SpeculonError
from speculon.core.types import Capability, Reason, Status, acceptance_rule, ceil_div
from speculon.decoding.text.tokenizer import NO_TOKENIZER
from speculon.engine.admission import NEED_TOKENIZER, OF_VOCABULARY
from speculon.runtimes.torch.drafters.known import published_for
from speculon.runtimes.torch.kv.states import KEPT_BYTES
from speculon.speculation.proposers.base import Extending, Remembering, RunsModel
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
    from speculon.runtimes.torch.model.target import Runner
    from speculon.speculation.proposers.compose import Proposers

Rows = Iterator[tuple[str, Capability]]


def row(status: Status, reason: str, **limits: int) -> Capability:
    return Capability(status, reason, limits)


def on_or_off(on: object, reason: str, otherwise: str) -> Capability:
    return row("on", reason) if on else row("off", otherwise)


def capability_table(engine: Engine) -> dict[str, Capability]:
    """The table, by feature."""
    parts = (target, engine_modes, methods, speculation, sampling, limits)
    return {feature: row for part in parts for feature, row in part(engine)}


def target(engine: Engine) -> Rows:
    """What the model decides: how rejected drafts are taken back, and what a prompt may hold."""
    model = engine.target
    paged = sum(layer.heads > 0 for layer in model.layers)
    share = f"{paged} of {len(model.layers)} layers have pages"
    overwritten, nothing = f"{share}: rejected rows are overwritten", f"{share}: nothing is kept in pages"
    yield "rollback.pages", on_or_off(paged, overwritten, nothing)
    for name, mixer in {type(mixer.module).__name__: mixer for mixer in model.mixers}.items():
        by_row = {"by_row": mixer.by_row} if mixer.continues else {}
        rows = f"up to {mixer.by_row} rows" if by_row else "all rows, since no call of several is exact,"
        why = f"{rows} are one call each, and the state after each is kept; otherwise accepted rows run again"
        kept = KEPT_BYTES // max(1, model.state_bytes)
        yield f"rollback.states.{name}", row("on", why, **by_row, kept_rows=kept)
    text, vision = engine.tokenizer, model.vision
    words = "" if text is None else f"{type(text.inner).__name__}, {len(text.inner)} tokens"
    yield "tokenizer", on_or_off(text, words, "none, token ids only")
    if vision is None:
        yield "images", row("refused", model.no_images)
    else:
        forms = {
            "positions of three axes": vision.has_axes,
            "attention in both directions within": vision.both,
        }
        why = ", ".join(["features in the place of placeholders", *(form for form in forms if forms[form])])
        longest = engine.config.max_batch_tokens - engine.config.max_num_seqs
        yield "images", row("on", why, **({"tokens_of_one": longest} if vision.both else {}))
    listed = "; ".join(f"{name}: {adapter}" for name, adapter in model.adapters.items())
    captured = ". Steps with rows of adapters are not captured" * (model.runner.form == "captured")
    adapters = row("on", f"{listed}{captured}. Drafts are the base's", adapters=len(model.adapters))
    yield "adapters", adapters if listed else row("off", "none is loaded (set adapters)")


def engine_modes(engine: Engine) -> Rows:
    """How the engine runs the model and its drafters."""
    config, model, runner = engine.config, engine.target, engine.target.runner
    snapshots, found = engine.pool.slots.snapshots, "full pages are found again by their content"
    if not engine.pool.prefix_cache:
        no_room = "the recurrent states of this model leave no room for snapshots of them"
        yield "prefix_cache", row("off", no_room if config.prefix_cache else "prefix_cache is false")
    elif snapshots:
        upto = f"{found}, up to the last with a snapshot of the states"
        yield "prefix_cache", row("on", upto, snapshots=snapshots)
    else:
        yield "prefix_cache", row("on", found)
    why = "of layers with recurrent states only norms are" if config.fuse else "fuse is false"
    why = str(runner) if runner.chosen else why
    yield "fusion", on_or_off(runner.fused or runner.one_loop, str(runner), why)
    drafters = {name: engine.proposers.find(name) for name in known_methods()}
    for form, device in (("compiled", "cpu"), ("captured", "cuda")):
        yield form, programs(form, device, runner, config, model.device.type)
        for name, drafter in drafters.items():
            if isinstance(drafter, RunsModel):
                yield f"{form}.{name}", programs(form, device, drafter.runner, config, model.device.type)
    why = model.invariance.partition(": ")[2] or "batch_invariant is false"
    yield "batch_invariant", on_or_off(model.batch_invariant, why, why)
    own = "SpeculativeDecoder alone: verify and step judge drafts by the caller's logits (target_logits)"
    yield "external_logits", row("on", own)


def programs(form: str, device: str, runner: Runner, config: EngineConfig, here: str) -> Capability:
    """Whether forwards of a model are compiled ahead of time, or captured as graphs."""
    if not config.compile:
        why = "compile is false"
    elif here != device:
        why = f"only on {device}, and this is {here}"
    else:
        why = str(runner) if runner.chosen else "no layer is fused"
    return on_or_off(runner.form == form, str(runner), why)


def methods(engine: Engine) -> Rows:
    """Each registered method. Those without weights are built here, as their first request would."""
    proposers, config = engine.proposers, engine.config.speculation
    names = [name for name in known_methods() if name != OFF]
    known = f"{proposers.default} where none is named; known are {', '.join([OFF, *names])}"
    yield "parameters.method", row("on", known)
    for name in names:
        yield f"methods.{name}", method(name, engine)
    published = published_for(getattr(engine.target.model, "name_or_path", ""), config.known_drafters)
    cached = cached_models()
    here = ", ".join(drafter for drafter in published if drafter in cached)
    why = f"published, and not in the hub's cache: {', '.join(published)}"
    none = "none is known for this target (known_drafters adds some)"
    on = f"draft = auto takes those that fit, from the hub's cache: {here}"
    yield "known_drafters", on_or_off(here, on, why if published else none)


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
    context = proposer and proposer.needs.max_context
    own = {"context": context} if context else {}
    if name in engine.admission.from_request:
        return row("on", "a lookup in what a request brings", drafts=GIVEN_DRAFTS, **own)
    why = (
        "a lookup in tokens, without a model" if name in proposers.lookups((name,)) else "its model is loaded"
    )
    return row("on", why, drafts=proposers.max_drafts(name, config.most()), **own)


def why_lacking(name: str, reason: Reason, engine: Engine) -> str:
    if reason is Reason.MEMORY:
        return f"its model is not loaded, to keep the memory limit: {engine.proposers.refusals[name]}"
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


def speculation(engine: Engine) -> Rows:
    """What a request may set of its own speculation."""
    proposers, config = engine.proposers, engine.config.speculation
    known = f"{config.policy} where none is named; known are {', '.join(USUAL_DRAFTS)}"
    yield "parameters.policy", row("on", known)
    for name in USUAL_DRAFTS:
        drafts = config.most(name)
        yield f"policies.{name}", row("on", f"at most {drafts} drafts a round", drafts=drafts)
    usual = f"{config.most()} under policy {config.policy}; 0 is plain decoding"
    yield "parameters.num_speculative_tokens", row("on", usual, most=MAX_DRAFTS)
    rules = get_args(Acceptance)
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


def sampling(engine: Engine) -> Rows:
    """Each sampling parameter: refused, without an effect on speculation, or with which."""
    refused = {} if engine.tokenizer else dict.fromkeys(NEED_TOKENIZER, NO_TOKENIZER)
    if engine.tokenizer and (no_grammar := engine.grammars.refusal()):
        refused["structured"] = no_grammar
    changed = {"structured": "drafts are cut where they leave the grammar"}
    if engine.pool.prefix_cache:
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
        yield f"parameters.{name}", row(status, why, **most_of(name, engine.target.vocab_size))


def most_of(name: str, vocab_size: int) -> dict[str, int]:
    """The most of a parameter: a whole number, or how many there may be."""
    field = SamplingParams.model_fields[name]
    whole = int in (field.annotation, *get_args(field.annotation))
    names = ("le", "max_length") if whole else ("max_length",)
    most = [getattr(limit, name) for limit in field.metadata for name in names if hasattr(limit, name)]
    if name in OF_VOCABULARY:
        most.append(vocab_size)
    return {"most": min(most)} if most else {}


def limits(engine: Engine) -> Rows:
    config, model, pool = engine.config, engine.target, engine.pool
    notes = "; ".join(note for note in model.notes if "context" in note)
    why = "set by max_context" if config.max_context else notes or "the model's"
    yield "limits.max_context", row("on", why, tokens=engine.max_context)
    yield "limits.vocab_size", row("on", "ids for which the model has a logit", tokens=model.vocab_size)
    tokens, pages = (
        pool.num_blocks * pool.block_size,
        pool.max_pages(engine.max_context, config.max_batch_tokens),
    )
    if pages <= pool.num_blocks:  # those of its windows suffice for any request
        tokens = max(tokens, engine.max_context)
    if config.prefix_cache:  # which keeps the pages before the windows, too
        pages = ceil_div(engine.max_context, config.block_size)
    if config.num_blocks is not None:
        why = "set by num_blocks"
    elif pool.num_blocks >= config.max_num_seqs * pages:
        why = "a full context for each of max_num_seqs"
    else:
        why = "set by kv_memory_gb" if config.kv_memory_gb else "a part of the memory that was free"
    yield "limits.pool", row("on", why, pages=pool.num_blocks, tokens=tokens)
    yield "limits.page", row("on", "block_size", tokens=pool.block_size)
    states = f"; states take {engine.memory.states} bytes" if engine.memory.states else ""
    yield (
        "limits.max_num_seqs",
        row("on", f"max_num_seqs; others wait{states}", sequences=config.max_num_seqs),
    )
    chunks = "max_batch_tokens; longer prompts are computed in chunks"
    yield "limits.max_batch_tokens", row("on", chunks, tokens=config.max_batch_tokens)
    own = config.serve.max_request_tokens
    unlimited, limited = "no limit but the context", "set by max_request_tokens, on the server"
    each = row("on", unlimited) if own is None else row("on", limited, tokens=own)
    yield "limits.max_request_tokens", each
