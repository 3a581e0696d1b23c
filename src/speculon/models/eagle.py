"""The EAGLE-3 head (Li et al. 2025) over pages: one layer that reads the target's own states, sometimes more.

Row i pairs the target's states g_i with token x_{i+1} and guesses x_{i+2}. It lies at slot i + 1 of its
sequence, beside the target's keys of that token, so slot 0 holds nothing; its rotary position is i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculon.batch import Batch
from speculon.checkpoints.eagle3_config import Eagle3Config, check_offsets
from speculon.checkpoints.headers import read_header
from speculon.core import LayerSpec, Needs
from speculon.errors import MissingWeights, UnsupportedModel
from speculon.kv.store import PageStore, SpanView, View
from speculon.models.block import Attention, Block, Gated, Norm, Tables, tables_of
from speculon.models.linear import Product, joined
from speculon.models.target import scratch_bytes

if TYPE_CHECKING:
    from speculon.models.target import Target

NOT_WEIGHTS = {"d2t", "t2d"}


@dataclass(slots=True)
class FirstLayer:
    """Attention over [embedding, state] side by side; the sum runs over the state alone."""

    embed_norm: Norm
    state_norm: Norm
    attention: Attention  # of width 2 H
    mlp_norm: Norm
    mlp: Gated
    norm_before_residual: bool

    # [T, H] each -> [T, H]
    def __call__(self, embedded: Tensor, state: Tensor, tables: Tables, view: View) -> Tensor:
        normed = self.state_norm(state)
        seen = self.attention(torch.cat([self.embed_norm(embedded), normed], -1), tables, view)
        x = (normed if self.norm_before_residual else state) + seen
        return x + self.mlp(self.mlp_norm(x))


@dataclass(slots=True)
class EagleHead:
    """What an EAGLE-3 checkpoint computes, in the target's dtype and on its device."""

    embed: Tensor  # [V, H]
    fc: Product  # k * Ht -> H
    tap_norms: tuple[Norm, ...]  # one over all taps, or one for each, or none
    first: FirstLayer
    more: list[Block]
    norm: Norm
    norm_output: bool
    head: Product  # H -> Vd
    scale: float
    rotary: nn.Module
    ids: Tensor | None  # [Vd] the target's ids of the draft's, None: the same

    def fuse(self, taps: Tensor) -> Tensor:  # [T, k * Ht] -> [T, H]
        """The state of each row, from what the target's layers left there."""
        if self.tap_norms:
            parts = taps.chunk(len(self.tap_norms), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)
        return self.fc(taps)

    def __call__(self, ids: Tensor, state: Tensor, positions: Tensor, view: View) -> Tensor:
        """The state [T, H] after each row: what the next draft position reads. ids, positions [T], state [T,
        H].
        """
        embedded = F.embedding(ids, self.embed)
        cos, sin = self.rotary(embedded, positions[None])
        tables = tables_of(cos, sin, self.first.attention.head_dim)
        x = self.first(embedded, state, tables, view)
        for block in self.more:
            x = block(x, tables, view)
        return self.norm(x) if self.norm_output else x

    def logits(self, state: Tensor, vocab_size: int) -> Tensor:  # [R, H] -> [R, V]
        """Scores over the target's vocabulary; minus infinity for what the draft's lacks."""
        scores = self.head(state if self.norm_output else self.norm(state)).float()
        if self.scale != 1:
            scores = scores * self.scale
        if self.ids is not None:
            return scores.new_full((len(scores), vocab_size), -math.inf).index_copy_(1, self.ids, scores)
        missing = vocab_size - scores.shape[1]  # one of the two may be padded
        return scores if not missing else F.pad(scores, (0, missing), value=-math.inf)


def head_needs(sheet: Eagle3Config, taps: tuple[int, ...], target: Target, rows: int, scored: int) -> Needs:
    """The claims of a head that is not loaded; T = `rows`, R = `scored` in its largest forward."""
    dtype, widths = target.dtype, sheet.taps * sheet.target_hidden
    layers = [LayerSpec("taps", 1, widths, 0, dtype)]
    layers += [
        LayerSpec("attention", sheet.kv_heads, sheet.head_dim, sheet.head_dim, dtype, window)
        for window in sheet.windows
    ]
    headers = {name: entry for file in sheet.files for name, entry in read_header(file)[0].items()}
    weights = sum(
        math.prod(headers[stored]["shape"]) for name, stored in sheet.names.items() if name not in NOT_WEIGHTS
    )
    config = rope_config(sheet)
    config.vocab_size = sheet.vocab_size  # its scores are spread over all of it
    scratch = scratch_bytes(config, dtype, target.device, rows, scored) + 2 * rows * widths * dtype.itemsize
    return Needs(taps, tuple(layers), bytes_fixed=weights * dtype.itemsize, bytes_scratch=scratch)


def load_head(sheet: Eagle3Config, target: Target) -> EagleHead:
    """The head in the target's dtype, sharing what its checkpoint leaves out.

    Raises a `ModelError` for what it lacks.
    """
    if sheet.act not in ACT2FN:
        raise UnsupportedModel(f"{sheet.path}: hidden_act {sheet.act!r} is not known")
    tensors = read_tensors(sheet)

    def weight(name: str) -> Tensor:
        if name not in tensors:
            raise MissingWeights(f"{sheet.path}: tensor {name} is missing")
        return tensors[name].to(target.device, target.dtype)

    def norm(name: str) -> Norm:
        return Norm(weight(f"{name}.weight"), sheet.eps)

    def linear(name: str) -> nn.Linear:
        matrix = weight(f"{name}.weight")
        layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=f"{name}.bias" in tensors, device="meta")
        layer.weight = nn.Parameter(matrix, requires_grad=False)
        if layer.bias is not None:
            layer.bias = nn.Parameter(weight(f"{name}.bias"), requires_grad=False)
        return layer

    def product(*names: str) -> Product:
        return joined([linear(name) for name in names], share=False)

    def attention(layer: int) -> Attention:
        at = f"layers.{layer}.self_attn"
        heads_norm = None
        if f"{at}.q_norm.weight" in tensors:
            query, key = (weight(f"{at}.{name}.weight") for name in ("q_norm", "k_norm"))
            heads_norm = Norm(
                torch.cat([query.expand(sheet.heads, -1), key.expand(sheet.kv_heads, -1)]), sheet.eps
            )
        return Attention(
            layer=layer,
            qkv=product(f"{at}.q_proj", f"{at}.k_proj", f"{at}.v_proj"),
            out=product(f"{at}.o_proj"),
            heads=sheet.heads,
            kv_heads=sheet.kv_heads,
            head_dim=sheet.head_dim,
            scaling=sheet.head_dim**-0.5,
            norm=heads_norm,
            rotates=True,
            softcap=None,
            sinks=None,
        )

    def mlp(layer: int) -> Gated:
        at = f"layers.{layer}.mlp"
        return Gated(
            product(f"{at}.gate_proj", f"{at}.up_proj"), product(f"{at}.down_proj"), ACT2FN[sheet.act]
        )

    def block(layer: int) -> Block:
        at = f"layers.{layer}"
        before = next(
            (name for name in ("input_layernorm", "hidden_norm") if f"{at}.{name}.weight" in tensors),
            "input_layernorm",
        )
        norms = (norm(f"{at}.{before}"), None, norm(f"{at}.post_attention_layernorm"), None)
        return Block(attention(layer), mlp(layer), norms)

    tap_norms = (
        ["input_norm"]
        if sheet.norm_before_fc
        else [f"fc_norm.{i}" for i in range(sheet.taps)]
        if sheet.fc_norm
        else []
    )
    first = FirstLayer(
        norm("layers.0.input_layernorm"),
        norm("layers.0.hidden_norm"),
        attention(0),
        norm("layers.0.post_attention_layernorm"),
        mlp(0),
        sheet.norm_before_residual,
    )
    return EagleHead(
        embed=weight("embed_tokens.weight") if "embed_tokens.weight" in tensors else target.embedding,
        fc=product("fc"),
        tap_norms=tuple(norm(name) for name in tap_norms),
        first=first,
        more=[block(layer) for layer in range(1, sheet.layers)],
        norm=norm("norm"),
        norm_output=sheet.norm_output,
        head=product("lm_head") if "lm_head.weight" in tensors else target.head,
        scale=sheet.logit_scale,
        rotary=LlamaRotaryEmbedding(rope_config(sheet)).to(target.device),
        ids=ids_of(sheet, tensors.get("d2t"), target.device),
    )


@torch.inference_mode()
def agreement(
    head: EagleHead, target: Target, layers: tuple[LayerSpec, ...], taps: tuple[int, ...], ids: list[int]
) -> float:
    """The share of rows of a text in which the head, reading these taps, guesses the target's best token.

    `layers` are those of the head's attention in the pages. Sets what the target yields of states.
    """
    n, device = len(ids), target.device
    store = PageStore((*target.layers, *layers), 1, n, device)
    rows = torch.arange(n, device=device)
    batch = Batch([], torch.tensor([ids], device=device), rows[None], rows)
    target.capture(taps)
    out = target.forward(batch, store.view_of([SpanView(0, n, slice(0, n), n)]))
    assert out.taps is not None
    states = head.fuse(torch.cat([out.taps[layer][:-1] for layer in taps], -1))
    view = store.view_of([SpanView(0, n - 1, slice(1, n), n - 1)], len(target.layers))
    guesses = head.logits(head(batch.input_ids[0, 1:], states, rows[:-1], view), target.vocab_size).argmax(-1)
    return (guesses == out.logits[1:].argmax(-1)).float().mean().item()


def read_tensors(sheet: Eagle3Config) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the sheet's names."""
    wanted = {stored: name for name, stored in sheet.names.items()}
    tensors: dict[str, Tensor] = {}
    for path in sheet.files:
        with safe_open(path, framework="pt") as file:
            tensors |= {wanted[stored]: file.get_tensor(stored) for stored in file.keys() if stored in wanted}
    return tensors


def rope_config(sheet: Eagle3Config) -> LlamaConfig:
    """What the library's rotary table reads."""
    return LlamaConfig(
        hidden_size=sheet.hidden,
        intermediate_size=sheet.intermediate,
        num_attention_heads=sheet.heads,
        num_key_value_heads=sheet.kv_heads,
        head_dim=sheet.head_dim,
        rope_parameters=dict(sheet.rope),
    )


def ids_of(
    sheet: Eagle3Config, offsets: Tensor | None, device: torch.device
) -> Tensor | None:  # [Vd] -> [Vd]
    """The target's id of each draft id: d2t holds the difference."""
    if offsets is None:
        return None
    check_offsets(sheet.path, offsets.tolist(), sheet.vocab_size)
    return torch.arange(len(offsets), device=device) + offsets.to(device, torch.long)
