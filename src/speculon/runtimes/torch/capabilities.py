"""Rows of the capability table that follow from the model, its drafters and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from speculon.checkpoints.hub import cached_models
from speculon.core.config import EngineConfig
from speculon.core.types import Capability, CapabilityRows, ceil_div, on_or_off, row
from speculon.runtimes.torch.drafters.known import published_for
from speculon.runtimes.torch.kv.states import KEPT_BYTES

if TYPE_CHECKING:
    from speculon.runtimes.torch.model.target import Runner
    from speculon.runtimes.torch.runtime import TorchRuntime


def capabilities(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    for rows in (rollback, inputs, modes, known_drafters, limits):
        yield from rows(runtime, config)


def rollback(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    """How rejected drafts are taken back."""
    model = runtime.target
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


def inputs(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    """What a prompt may hold beside tokens, and under which adapters it may be continued."""
    model = runtime.target
    if (vision := model.vision) is None:
        yield "images", row("refused", model.no_images)
    else:
        forms = {
            "positions of three axes": vision.has_axes,
            "attention in both directions within": vision.both,
        }
        why = ", ".join(["features in the place of placeholders", *(form for form in forms if forms[form])])
        yield "images", row("on", why, **({"tokens_of_one": runtime.image_rows} if vision.both else {}))
    listed = "; ".join(f"{name}: {adapter}" for name, adapter in model.adapters.items())
    captured = ". Steps with rows of adapters are not captured" * (model.runner.form == "captured")
    adapters = row("on", f"{listed}{captured}. Drafts are the base's", adapters=len(model.adapters))
    yield "adapters", adapters if listed else row("off", "none is loaded (set adapters)")


def modes(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    """How the model and its drafters run."""
    model, runner, space = runtime.target, runtime.target.runner, runtime.space
    snapshots, found = space.slots.snapshots, "full pages are found again by their content"
    if not space.prefix_cache:
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
    for form, device in (("compiled", "cpu"), ("captured", "cuda")):
        yield form, programs(form, device, runner, config, model.device.type)
        for name, drafter in runtime.drafters.items():
            if (own := getattr(drafter, "runner", None)) is not None:
                yield f"{form}.{name}", programs(form, device, own, config, model.device.type)
    why = model.invariance.partition(": ")[2] or "batch_invariant is false"
    yield "batch_invariant", on_or_off(model.batch_invariant, why, why)


def programs(form: str, device: str, runner: Runner, config: EngineConfig, here: str) -> Capability:
    """Whether forwards of a model are compiled ahead of time, or captured as graphs."""
    if config.compile == "off":
        why = "compile is off"
    elif here != device:
        why = f"only on {device}, and this is {here}"
    elif config.compile == "auto":
        why = runner.programs or "auto compiles models that run as a loop on a CPU, and nothing else"
    else:
        why = str(runner) if runner.chosen else "no layer is fused"
    return on_or_off(runner.form == form, str(runner), why)


def known_drafters(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    source = getattr(runtime.target.model, "name_or_path", "")
    published = published_for(source, config.speculation.known_drafters)
    cached = cached_models()
    here = ", ".join(drafter for drafter in published if drafter in cached)
    why = f"published, and not in the hub's cache: {', '.join(published)}"
    none = "none is known for this target (known_drafters adds some)"
    on = f"draft = auto takes those that fit, from the hub's cache: {here}"
    yield "known_drafters", on_or_off(here, on, why if published else none)


def limits(runtime: TorchRuntime, config: EngineConfig) -> CapabilityRows:
    space, facts, estimate = runtime.space, runtime.facts, runtime.estimate
    notes = "; ".join(note for note in runtime.target.notes if "context" in note)
    why = "set by max_context" if config.max_context else notes or "the model's"
    yield "limits.max_context", row("on", why, tokens=facts.max_context)
    tokens, needed = facts.capacity, space.most(facts.max_context)
    if needed <= facts.capacity:  # those of its windows suffice for any request
        tokens = max(tokens, facts.max_context)
    pages = needed // space.block_size
    if config.prefix_cache:  # which keeps the pages before the windows, too
        pages = ceil_div(facts.max_context, config.block_size)
    if config.num_blocks is not None:
        why = "set by num_blocks"
    elif space.num_blocks >= config.max_num_seqs * pages:
        why = "a full context for each of max_num_seqs"
    else:
        why = "set by kv_memory_gb" if config.kv_memory_gb else "a part of the memory that was free"
    yield "limits.pool", row("on", why, pages=space.num_blocks, tokens=tokens)
    yield "limits.page", row("on", "block_size", tokens=space.block_size)
    states = f"; states take {estimate.states} bytes" if estimate.states else ""
    why = f"max_num_seqs; others wait{states}"
    yield "limits.max_num_seqs", row("on", why, sequences=config.max_num_seqs)
