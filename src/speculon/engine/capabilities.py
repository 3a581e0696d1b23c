"""The capability table of an engine, from its model, the registry and its settings.

What requests may ask is found out by admitting one request per parameter, and by comparing what came of it
with a request that asks for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, get_args

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
from speculon.core.errors import InvalidParameter, SpeculonError
from speculon.core.hub import cached_models
from speculon.core.types import Capability, Reason, Status, ceil_div
from speculon.decoding.kv.states import KEPT_BYTES
from speculon.decoding.sequence import Sequence
from speculon.drafters.known import published_for
from speculon.engine.admission import OF_VOCABULARY
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
    from speculon.decoding.kv.blocks import BlockPool
    from speculon.decoding.text.tokenizer import Tokenizer
    from speculon.engine.admission import Admission
    from speculon.speculation.proposers.compose import Proposers
    from speculon.target.budget import MemoryEstimate
    from speculon.target.target import Runner, Target


class EngineParts(Protocol):
    """The parts of an engine that the table is made from."""

    target: Target
    tokenizer: Tokenizer | None
    config: EngineConfig
    max_context: int
    proposers: Proposers
    admission: Admission
    pool: BlockPool
    memory: MemoryEstimate


Rows = Iterator[tuple[str, Capability]]

# a value of each sampling parameter that is not its default
EXAMPLES: Mapping[str, Any] = {
    "temperature": 0.0,
    "top_p": 0.5,
    "top_k": 1,
    "min_p": 0.5,
    "max_tokens": 1,
    "min_tokens": 1,
    "stop": ("a",),
    "stop_token_ids": (0,),
    "ignore_eos": True,
    "seed": 0,
    "n": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "presence_penalty": 1.0,
    "frequency_penalty": 1.0,
    "repetition_penalty": 2.0,
    "logit_bias": {0: 1.0},
    "bad_words": ("a",),
    "structured": {"regex": "(?s:.+)"},
    "thinking": {"opened": True},
    "logits_processor": lambda tokens, logits: logits,
    "skip_special_tokens": False,
    "include_stop_str_in_output": True,
}
PROBE = "capabilities"  # id of the requests that are admitted for the table and never run


def capability_table(engine: EngineParts) -> dict[str, Capability]:
    """The table, by feature."""
    parts = (
        rollback(engine.target),
        *(modes(engine), methods(engine), policies(engine), acceptance(engine), own_drafts(engine)),
        *(sampling(engine), limits(engine)),
    )
    return {feature: row for part in parts for feature, row in part}


# what the engine does


def rollback(target: Target) -> Rows:
    """How rejected drafts are taken back: in pages, and in each class of recurrent mixers."""
    paged = sum(layer.heads > 0 for layer in target.layers)
    effect = "rejected rows are overwritten" if paged else "nothing is kept in pages"
    why = f"{paged} of {len(target.layers)} layers have pages: {effect}"
    yield "rollback.pages", row("on" if paged else "off", why)
    classes = defaultdict(list)
    for mixer in target.mixers:
        classes[type(mixer.module).__name__].append(mixer)
    for name, mixers in classes.items():
        limits = {"kept_rows": KEPT_BYTES // max(1, target.state_bytes)}
        measured = "all rows, since no call of several is exact,"
        if mixers[0].continues:
            limits = {"by_row": mixers[0].by_row, **limits}
            measured = f"up to {mixers[0].by_row} rows"
        why = f"{len(mixers)} mixers: {measured} are one call each, and the state after each is kept; "
        yield f"rollback.states.{name}", row("on", why + "otherwise accepted rows are replayed", **limits)


def modes(engine: EngineParts) -> Rows:
    target, config = engine.target, engine.config
    yield "prefix_cache", prefix_cache(engine)
    runner = target.runner
    why = "setting fuse is off" if not config.fuse else "of layers with recurrent states only norms are"
    fused = runner.fused > 0 or runner.one_loop
    yield "fusion", row("on" if fused else "off", str(runner) if runner.chosen else why)
    drafters = {name: engine.proposers.find(name) for name in known_methods() if name != OFF}
    for name in ("compiled", "captured"):
        yield name, programs(name, runner, target.device.type, config)
        for method, drafter in drafters.items():
            if isinstance(drafter, RunsModel):
                yield f"{name}.{method}", programs(name, drafter.runner, target.device.type, config)
    yield "adapters", adapters(target)
    why = target.invariance.partition(": ")[2] or "setting batch_invariant is off"
    yield "batch_invariant", row("on" if target.batch_invariant else "off", why)
    text = engine.tokenizer
    if text is None:
        yield "tokenizer", row("off", "none, token ids only")
    else:
        yield "tokenizer", row("on", f"{type(text.inner).__name__}, {len(text.inner)} tokens")
    yield "images", images(engine)
    why = "SpeculativeDecoder alone: verify and step judge drafts by the caller's logits (target_logits)"
    yield "external_logits", row("on", why)


def images(engine: EngineParts) -> Capability:
    vision = engine.target.vision
    if vision is None:
        return row("refused", engine.target.no_images)
    forms = {"positions of three axes": vision.has_axes, "attention in both directions within": vision.both}
    why = ", ".join(
        ("features in the place of placeholders", *(form for form, does in forms.items() if does))
    )
    longest = engine.config.max_batch_tokens - engine.config.max_num_seqs
    return row("on", why, **({"tokens_of_one": longest} if vision.both else {}))


def prefix_cache(engine: EngineParts) -> Capability:
    if engine.pool.prefix_cache:
        why = "full pages are found again by their content"
        if snapshots := engine.pool.slots.snapshots:
            return row("on", f"{why}, up to the last with a snapshot of the states", snapshots=snapshots)
        return row("on", why)
    if not engine.config.prefix_cache:
        return row("off", "setting prefix_cache is off")
    return row("off", "recurrent states: there is no room for snapshots of them")


def adapters(target: Target) -> Capability:
    """The LoRA adapters of the target; drafters have none."""
    if not target.adapters:
        return row("off", "none is loaded; setting adapters names some")
    listed = "; ".join(f"{name}: {adapter}" for name, adapter in target.adapters.items())
    captured = ". Steps with rows of adapters are not captured" * (target.runner.form == "captured")
    return row("on", f"{listed}{captured}. Drafts are the base's", adapters=len(target.adapters))


def programs(name: str, runner: Runner, here: str, config: EngineConfig) -> Capability:
    """Whether forwards of a model on device type `here` are compiled ahead of time, or captured as graphs."""
    device = "cuda" if name == "captured" else "cpu"
    if runner.form == name:
        return row("on", str(runner))
    if not config.compile:
        return row("off", "setting compile is off")
    if here != device:
        return row("off", f"only on {device}, and this is {here}")
    return row("off", str(runner) if runner.chosen else "no layer is fused")


# what drafts


def methods(engine: EngineParts) -> Rows:
    """Each method that is registered. Those without weights are built here, as their first request would."""
    names = [name for name in known_methods() if name != OFF]
    known = f"{engine.proposers.default} where none is named; known are {', '.join([OFF, *names])}"
    yield "parameters.method", row("on", known)
    for name in names:
        yield f"methods.{name}", method(name, engine)
    yield "known_drafters", known_drafters(engine)


def known_drafters(engine: EngineParts) -> Capability:
    """Which drafters are published for the target, and whether any is in the hub's cache."""
    name = getattr(engine.target.model, "name_or_path", "")
    published, cached = published_for(name, engine.config.speculation.known_drafters), cached_models()
    if not published:
        return row("off", "none is known for this target; known_drafters adds some")
    if here := [drafter for drafter in published if drafter in cached]:
        return row("on", f"draft = auto takes those that fit, from the hub's cache: {', '.join(here)}")
    return row("off", f"published, and not in the hub's cache: {', '.join(published)}")


def method(name: str, engine: EngineParts) -> Capability:
    proposers, config = engine.proposers, engine.config.speculation
    try:
        lacking = proposers.lacking(name)
    except Exception as error:  # of a plug-in
        return refused(error)
    if lacking is not None:
        return row("off", f"{lacking}: {why_lacking(name, lacking, engine)}")
    if name == AUTO:
        chain = [method for method in proposers.chain(name) if proposers.lacking(method) is None]
        return row("on", f"asks {', then '.join(chain)}", drafts=config.most())
    proposer = proposers.find(name)
    context = proposer and proposer.needs.max_context
    limits = {"context": context} if context else {}
    if name in engine.admission.from_request:
        return row("on", "a lookup in what a request brings", drafts=GIVEN_DRAFTS, **limits)
    why = "a lookup" if name in proposers.lookups((name,)) else "a model"
    return row("on", why, drafts=proposers.max_drafts(name, config.most()), **limits)


def why_lacking(name: str, reason: Reason, engine: EngineParts) -> str:
    if reason is Reason.MEMORY:
        return engine.proposers.refusals.get(name, "the memory limit")
    if name in WITH_CHECKPOINT and name not in engine.config.speculation.drafts:
        return "not configured: it needs draft = a checkpoint"
    if name in OF_TARGET:
        return f"its layers are in the target's checkpoint, if any; method = {name} at the start loads them"
    return f"it has layers or weights of its own, which only method = {name} at the start makes room for"


def policies(engine: EngineParts) -> Rows:
    config = engine.config.speculation
    chosen = f"{config.policy} where none is named; known are {', '.join(USUAL_DRAFTS)}"
    yield "parameters.policy", row("on", chosen)
    for name in USUAL_DRAFTS:
        seq, drafts = admit(engine, speculation={"policy": name}), config.most(name)
        usable = row("on", f"at most {drafts} drafts a round", drafts=drafts)
        yield f"policies.{name}", seq if isinstance(seq, Capability) else usable
    usual = f"{config.most()} under policy {config.policy}; 0 is plain decoding"
    yield "parameters.num_speculative_tokens", row("on", usual, most=MAX_DRAFTS)


def acceptance(engine: EngineParts) -> Rows:
    """The rules for drafts that carry probabilities, which lookups do not have."""
    known = get_args(Acceptance)
    chosen = f"{engine.config.speculation.acceptance} where none is named; known are {', '.join(known)}"
    yield "parameters.acceptance", row("on", chosen)
    yield "acceptance.matching", row("on", "each row is sampled, and a draft is accepted while it is equal")
    models = with_probabilities(engine.proposers)
    where = f"sampled requests whose drafts have probabilities ({', '.join(models)})"
    none = "no method with a model is loaded, and drafts of lookups are matched"
    for rule in known:
        if rule not in ("auto", "matching"):
            yield f"acceptance.{rule}", row("on", where) if models else row("off", none)


def with_probabilities(proposers: Proposers) -> list[str]:
    """Methods whose drafts may have some: those with weights, and plug-ins."""
    built = [name for name in known_methods() if proposers.find(name) is not None]
    return [name for name in built if name not in TABLE or name not in proposers.lookups((name,))]


def own_drafts(engine: EngineParts) -> Rows:
    """What a request brings or names to draft from."""
    for feature, value in (("prediction", (0,)), ("prediction.text", "a")):
        yield f"parameters.{feature}", prediction(engine, value)
    config, built = engine.config.speculation, [n for n in known_methods() if engine.proposers.find(n)]
    remembering = [name for name in built if isinstance(engine.proposers.find(name), Remembering)]
    usable = bool(remembering and config.suffix_pools)
    why = f"earlier answers, which {', '.join(remembering)} drafts from" if usable else "suffix_pools is 0"
    yield "parameters.pool", row("on" if usable else "off", why)
    lookups = [name for name in built if isinstance(engine.proposers.find(name), Extending)]
    why = f"drafts are continued by {', '.join(lookups)}" if lookups else "no lookup can continue a draft"
    yield "parameters.chained_drafts", row("on" if lookups else "off", why)
    branching = sorted(engine.proposers.branching(built))
    why = f"{', '.join(branching)}, where drafts are judged by matching and no grammar binds the request"
    why = why if branching else "no method drafts trees here; over recurrent layers none does"
    yield "parameters.draft_depth", row("on" if branching else "off", why)


def prediction(engine: EngineParts, value: Any) -> Capability:
    seq = admit(engine, speculation={"prediction": value})
    if isinstance(seq, Capability):
        return seq
    if "prediction" in seq.request.from_request:
        return row("on", "drafts are read from it first", most=MAX_PREDICTION, drafts=GIVEN_DRAFTS)
    return row("off", f"{seq.request.off}: nothing drafts where a request names no method")


# what a request may ask of its text


def sampling(engine: EngineParts) -> Rows:
    """Each sampling parameter: refused, without an effect on speculation, or with which."""
    plain = engine.admission.admit(PROBE, [0], SamplingParams(max_tokens=1))[0]
    for name, value in EXAMPLES.items():
        seq = admit(engine, {name: value})
        if isinstance(seq, Capability):
            yield f"parameters.{name}", seq
            continue
        changes = differences(plain, seq, engine)
        why = "; ".join(changes) or "drafts are verified under it"
        why += "; in Python alone, where the engine is in the caller's process" * (name in IN_PYTHON)
        limits = parameter_limit(name, engine.target.vocab_size)
        yield f"parameters.{name}", row("changed" if changes else "on", why, **limits)


def differences(plain: Sequence, seq: Sequence, engine: EngineParts) -> list[str]:
    """What is otherwise in the speculation of a request than in that of one which asks for nothing."""
    request, usual, changes = seq.request, plain.request, list[str]()
    if request.acceptance != usual.acceptance and with_probabilities(engine.proposers):
        changes.append(f"acceptance is {request.acceptance} instead of {usual.acceptance}")
    if seq.grammar is not None:
        changes.append("drafts are cut where they leave the grammar")
    if request.from_request != usual.from_request:
        changes.append(f"drafts come from {', '.join(request.from_request)} first")
    if engine.pool.prefix_cache and seq.wants_prompt_logprobs:
        changes.append("no prefix is taken from the cache")
    if request.params.n > 1 and request.policy == "solo":
        changes.append("policy solo drafts for one sequence at a time")
    return changes


def parameter_limit(name: str, vocab_size: int) -> dict[str, int]:
    """The most of a parameter: a whole number, or how many there may be."""
    field = SamplingParams.model_fields[name]
    whole = int in (field.annotation, *get_args(field.annotation))
    names = ("le", "max_length") if whole else ("max_length",)
    limits = [getattr(limit, name) for limit in field.metadata for name in names if hasattr(limit, name)]
    if name in OF_VOCABULARY:
        limits.append(vocab_size)
    return {"most": min(limits)} if limits else {}


def admit(
    engine: EngineParts, params: Mapping[str, Any] | None = None, speculation: Mapping[str, Any] | None = None
) -> Sequence | Capability:
    """The first sequence of such a request, by the engine's own admission, or the refusal."""
    try:
        values = SamplingParams(**{"max_tokens": 1, **(params or {})})
        return engine.admission.admit(PROBE, [0], values, speculation)[0]
    except Exception as error:  # also of a plug-in, or a tokenizer
        return refused(error)


# limits


def limits(engine: EngineParts) -> Rows:
    config, target, pool = engine.config, engine.target, engine.pool
    notes = "; ".join(note for note in target.notes if "context" in note)
    why = "set by max_context" if config.max_context else notes or "the model's"
    yield "limits.max_context", row("on", why, tokens=engine.max_context)
    yield "limits.vocab_size", row("on", "ids for which the model has a logit", tokens=target.vocab_size)
    yield "limits.pool", row("on", pool_reason(engine), pages=pool.num_blocks, tokens=room(engine))
    yield "limits.page", row("on", "block_size", tokens=pool.block_size)
    states = f"; states take {engine.memory.states} bytes" if engine.memory.states else ""
    waits = f"max_num_seqs; others wait{states}"
    yield "limits.max_num_seqs", row("on", waits, sequences=config.max_num_seqs)
    chunks = "max_batch_tokens; longer prompts are computed in chunks"
    yield "limits.max_batch_tokens", row("on", chunks, tokens=config.max_batch_tokens)
    own = config.serve.max_request_tokens
    if own is None:
        yield "limits.max_request_tokens", row("on", "no limit but the context")
    else:
        yield "limits.max_request_tokens", row("on", "set by max_request_tokens, on the server", tokens=own)


def room(engine: EngineParts) -> int:
    """The most tokens of a request for which there are pages: any, where those of its windows suffice."""
    pool = engine.pool
    tokens = pool.num_blocks * pool.block_size
    if pool.max_pages(engine.max_context, engine.config.max_batch_tokens) <= pool.num_blocks:
        return max(tokens, engine.max_context)
    return tokens


def pool_reason(engine: EngineParts) -> str:
    config, pool = engine.config, engine.pool
    if config.num_blocks is not None:
        return "set by num_blocks"
    pages = pool.max_pages(engine.max_context, config.max_batch_tokens)
    if config.prefix_cache:  # which keeps the pages before the windows, too
        pages = ceil_div(engine.max_context, config.block_size)
    if pool.num_blocks >= config.max_num_seqs * pages:
        return "a full context for each of max_num_seqs"
    return "set by kv_memory_gb" if config.kv_memory_gb else "a part of the memory that was free"


def row(status: Status, reason: str, **limits: int) -> Capability:
    return Capability(status, reason, limits)


def refused(error: Exception) -> Capability:
    """A row with the reason alone: the value was an example."""
    why = error.limit if isinstance(error, InvalidParameter) else str(error)
    return Capability("refused", why if isinstance(error, SpeculonError) else type(error).__name__)
