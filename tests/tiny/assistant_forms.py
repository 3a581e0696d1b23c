"""Gemma 4 targets and their assistants: random checkpoints, what transformers computes with them, and a
record of each row of the library's own assistant.
"""

from __future__ import annotations

import atexit
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, PreTrainedModel

from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.gemma4_assistant.proposer import NAME, Gemma4Assistant
from speculon.runtimes.torch.loading.load import wrap_model
from speculon.runtimes.torch.model.target import Target
from tests.formats.writer import write_checkpoint
from tests.tiny.conftest import BASE, MOE, VOCAB, WINDOW
from tests.tiny.heads import register_watched, true_draft
from tests.tiny.scripted import Key

Texts = Mapping[Key, list[int]]
FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT = 512
COMMON: dict[str, Any] = {
    **{key: value for key, value in BASE.items() if key != "tie_word_embeddings"},
    "max_position_embeddings": CONTEXT,
    "num_hidden_layers": 6,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL] * 3,
    "global_head_dim": 16,
}
SMALL: dict[str, Any] = {
    **COMMON,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
LARGE: dict[str, Any] = {
    **COMMON,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
    "use_bidirectional_attention": "vision",
}
UNIFIED = {key: value for key, value in LARGE.items() if key != "hidden_size_per_layer_input"}
EXPERTS = {
    "enable_moe_block": True,
    "num_experts": MOE["num_experts"],
    "top_k_experts": MOE["num_experts_per_tok"],
    "moe_intermediate_size": MOE["moe_intermediate_size"],
}


@dataclass(frozen=True)
class Form:
    """A target, and an assistant of it: a form in `tests/formats/gemma4_assistant.json`."""

    target_type: str
    target: dict[str, Any]
    assistant: str = "assistant"
    sizes: dict[str, Any] = field(default_factory=dict)


SHARED: dict[str, Any] = {"keys_are_values": True, "global_kv_heads": 1}
FORMS: dict[str, Form] = {
    "small": Form("gemma4_text", SMALL),
    "large": Form("gemma4_text", LARGE, sizes={**SHARED, "hidden": 64, "ordered": False}),
    "experts": Form("gemma4_text", {**LARGE, **EXPERTS}, sizes={**SHARED, "window": 3, "ordered": False}),
    "multimodal": Form("gemma4", SMALL),
    "unified": Form("gemma4_unified", UNIFIED, "unified", SHARED),
}


def nested(model_type: str, text: dict[str, Any]) -> dict[str, Any]:
    """The settings of a model, or of the text part of a multimodal one."""
    if model_type.endswith("_text"):
        return text
    return {
        "text_config": {**text, "model_type": f"{model_type}_text"},
        "vision_config": None,
        "audio_config": None,
    }


@cache
def stock(form: str) -> PreTrainedModel:
    """The target as transformers has it, with weights that all matter; treat it as read-only."""
    one, chance = FORMS[form], torch.Generator().manual_seed(1)
    config = AutoConfig.for_model(one.target_type, **nested(one.target_type, dict(one.target)))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for weight in model.parameters():
        noise = torch.randn(weight.shape, generator=chance)
        weight.data = noise * 0.2 if weight.ndim > 1 else 1 + noise * 0.3
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.8)
    return model.eval()


@cache
def target_of(form: str) -> Target:
    return wrap_model(stock(form), name=form, share=False)


@cache
def assistant(form: str) -> PreTrainedModel:
    """The assistant's checkpoint as transformers reads it; treat it as read-only."""
    config = AutoConfig.from_pretrained(folder_of(form))
    layers = config.text_config.num_hidden_layers
    # transformers 5.23 refuses assistants here: no layer of theirs makes what all of them read
    with patch.object(type(config.text_config), "kv_sharing_modes", ["reuse"] * layers):
        model = AutoModelForCausalLM.from_pretrained(
            folder_of(form), config=config, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@cache
def folder_of(form: str) -> Path:
    """The assistant's checkpoint, beside that of its target: `X-assistant` and `X`."""
    place, one = TemporaryDirectory(), FORMS[form]
    atexit.register(place.cleanup)
    home = Path(place.name)
    stock(form).save_pretrained(home / form)
    target = stock(form).config.get_text_config()
    return write_checkpoint(
        home / f"{form}-assistant", f"gemma4_assistant/{one.assistant}", target, **one.sizes
    )


# transformers' own forwards


_recorded: dict[int, tuple[Tensor, Tensor]] = {}


def recording(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **more: Any) -> Any:
    """Eager attention that keeps what each layer reads."""
    from transformers.models.gemma4.modeling_gemma4 import eager_attention_forward

    layer: Any = module.layer_idx
    _recorded[layer] = key, value
    return eager_attention_forward(module, query, key, value, mask, **more)


AttentionInterface.register("recording", recording)


@dataclass(frozen=True)
class Seen:
    """What the stock target leaves of a sequence: its states, and the keys and values of each layer."""

    states: Tensor  # [1, n, Ht], after the last norm
    layers: dict[int, tuple[Tensor, Tensor]]  # [1, Hkv, n, Dh]
    types: list[str]

    def shared(self, n: int) -> dict[str, tuple[Tensor, ...]]:
        """Of the first n tokens: what transformers gives to an assistant."""
        last = {kind: layer for layer, kind in enumerate(self.types)}
        return {kind: tuple(x[:, :, :n] for x in self.layers[layer]) for kind, layer in last.items()}


@cache
@torch.inference_mode()
def seen(form: str, ids: tuple[int, ...]) -> Seen:
    from transformers.masking_utils import AttentionMaskInterface, eager_mask

    AttentionMaskInterface.register("recording", eager_mask)
    model = stock(form)
    model.set_attn_implementation("recording")
    try:
        out = model(torch.tensor([ids]), output_hidden_states=True, use_cache=False)
    finally:
        model.set_attn_implementation("eager")
    types = list(model.config.get_text_config().layer_types)
    return Seen(out.hidden_states[-1], dict(_recorded), types)


@dataclass(frozen=True)
class Step:
    logits: Tensor  # [V]
    state: Tensor  # [Ht]


@torch.inference_mode()
def reference_steps(
    form: str,
    ids: list[int],
    length: int,
    drafts: tuple[int, ...],
    before: list[Tensor] | None = None,
) -> list[Step]:
    """transformers' assistant after the first `length` of these tokens, where `drafts` are drafted; each step
    reads its own last state, or those `before` [Ht].
    """
    n, whole = length - 1, seen(form, tuple(ids))
    model, embed = assistant(form), stock(form).get_input_embeddings()
    state, steps = whole.states[0, n - 1], list[Step]()
    for j, token in enumerate((ids[n], *drafts[:-1])):
        if j and before is not None:
            state = before[j - 1]
        out = model(
            inputs_embeds=torch.cat([embed(torch.tensor([[token]])), state[None, None]], -1),
            position_ids=torch.tensor([[n]]),
            shared_kv_states=whole.shared(n),
        )
        state = out.last_hidden_state[0, 0]
        steps.append(Step(out.logits[0, 0], state))
    return steps


# the library's own rows


@dataclass
class Round:
    """What the assistant drafted by itself after some tokens of a sequence, and each row on the way."""

    key: Key
    length: int
    drafts: tuple[int, ...]
    steps: list[Step]


class Watched(Gemma4Assistant):
    """Records every row, and drafts the known output with some errors, so that all lengths are accepted."""

    watch: list[Round]
    truth: Texts

    def _propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        self.calls: list[Tensor] = []
        drafts = super()._propose(seqs, budgets)
        pairs = zip(seqs, drafts, strict=True)
        rounds = [Round((s.request.id, s.sample), len(s.tokens), d.tokens, []) for s, d in pairs]
        for j, after in enumerate(self.calls):
            active = [one for one in rounds if len(one.drafts) > j]
            logits, states = self.network.logits(after, VOCAB), self.network.post_projection(after)
            for one, *row in zip(active, logits, states, strict=True):
                one.steps.append(Step(*row))
        self.watch += rounds
        if not self.truth:
            return drafts
        return [true_draft(NAME, self.truth, seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]

    def load(self) -> None:
        super().load()
        run = self.runner.run

        def recorded(*arguments: Any) -> Tensor:
            self.calls.append(run(*arguments))
            return self.calls[-1]

        self.runner.run = recorded


def watch_assistants(truth: Texts | None = None, watched: type[Watched] = Watched) -> list[Round]:
    """Makes the method that of an assistant that is watched, and that says `truth` where there is any."""
    watch: list[Round] = []
    register_watched(NAME, watched, watch, truth)
    return watch


def wrong_rows(form: str, watch: list[Round], texts: Texts, atol: float = 1e-3) -> list[str]:
    """Rows that are not those of transformers; `texts` are prompts with what was written."""
    wrong = []
    for one in watch:
        before = [step.state for step in one.steps]
        steps = reference_steps(form, texts[one.key], one.length, one.drafts, before)
        for j, (ours, theirs) in enumerate(zip(one.steps, steps, strict=True)):
            off = max(distance(ours.logits, theirs.logits), distance(ours.state, theirs.state))
            if not off < atol:
                wrong.append(f"{one.key}: draft {j} after {one.length} tokens is off by {off:.1e}")
    return wrong


def distance(a: Tensor, b: Tensor) -> float:
    """The largest, as a share of the largest value."""
    return float((a - b).abs().max() / b.abs().max())
