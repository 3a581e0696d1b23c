"""What a loaded target is, for people and programs that look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from speculon.runtimes.torch.kv.slots import PER_SEQUENCE
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.model.target import Runner, Target

Facts = dict[str, Any]
LAYER = ("heads", "k_dim", "v_dim", "window", "dtype", "chunk")


def describe_alone(model: str, form: Facts, tell: Callable[[str], None]) -> Facts:
    """A target without an engine, where one cannot be made of it."""
    others = {name: value for name, value in form.items() if name not in ("fuse", "compile", "runtime")}
    form = {"fused": form.get("fuse", True), "compile": form.get("compile") == "now"}
    return target_facts(load_target(model, batch_invariant=None, progress=tell, **form, **others))


def target_facts(target: Target) -> Facts:
    """Of a loaded target; `states` say how a recurrent one restores them."""
    states = {
        "mixers": len(target.mixers),
        "bytes_per_sequence": PER_SEQUENCE * target.state_bytes,
        "single_rows": {
            type(mixer.module).__name__: mixer.by_row if mixer.continues else None for mixer in target.mixers
        },
    }
    return {
        "dtype": dtype_name(target.dtype),
        "device": target.device.type,
        "num_parameters": target.num_parameters,
        "max_context": target.max_context,
        "weight_bytes": target.num_bytes,
        "kv_bytes_per_token": sum(layer.bytes_per_token for layer in target.layers),
        "layers": [
            {name: getattr(layer, name) for name in LAYER} | {"dtype": dtype_name(layer.dtype)}
            for layer in target.layers
            if layer.heads
        ],
        "states": states if target.recurrent else None,
        "packed": target.packed,
        "fused": str(target.runner),
        "speed": speed_words(target.runner),
        "images": None if target.vision else target.no_images,  # why it takes none
        "batch_invariant": target.invariance,
        "adapters": [f"{name}: {adapter}" for name, adapter in target.adapters.items()],
        "notes": list(target.notes),
        "checked": "equal to its stock forward",
        "supported": True,
    }


def speed_words(runner: Runner) -> str:
    """Whether layers are fused, and how what is between two attentions runs."""
    if not runner.chosen:
        fused = "no layer is fused"
    elif runner.fused == runner.layers:
        fused = f"all {runner.layers} layers are fused"
    else:
        why = ", ".join(f"{reason} ({count})" for reason, count in runner.refused.items())
        fused = f"{runner.fused} of {runner.layers} layers are fused, since others differ: {why}"
    programs = {"compiled": "and compiled", "captured": "and captured as CUDA graphs"}
    not_compiled = f"and not compiled ({runner.programs or 'set --compile now'})"
    return f"{fused} {programs.get(runner.form, not_compiled)}"


def dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")
