"""Layers of drafters' networks: they learn under the published names of their parameters, and draft frozen.

In a frozen network the weights of one input are one product, in the layout that is fastest on this machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speculon.checkpoints.headers import read_header
from speculon.core.config.speculation import Quantization
from speculon.core.errors import CorruptWeights, MissingWeights, UnsupportedModel
from speculon.runtimes.torch.drafters.config import DrafterConfig, check_offsets
from speculon.runtimes.torch.loading.quantization import BITS, HEAD_BITS
from speculon.runtimes.torch.model import block
from speculon.runtimes.torch.model.block import RotaryTables, rotation_tables
from speculon.runtimes.torch.model.linear import Product, joined
from speculon.runtimes.torch.model.quantized import fits, layer_bytes, quantize

if TYPE_CHECKING:
    from speculon.runtimes.torch.model.target import Target

ORDER = "masked_embedding.token_ordering"
NOT_WEIGHTS = {"d2t", "t2d", ORDER}

Bits = Mapping[int, int | None]  # of each linear layer, by its id; None: they stay numbers

# queries, keys and values [..., heads, Dh], and the scaling of scores -> [..., H, Dh]
Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


class TrainedNorm(nn.Module):
    """RMSNorm in fp32, whatever the precision of products."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


@dataclass(slots=True)
class Joined:
    """Linear layers of one input as one product; only frozen ones may have biases."""

    parts: list[nn.Linear]

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, torch.cat([part.weight for part in self.parts]))

    def frozen(self, bits: Bits) -> Product:
        return product(self.parts, bits)


@dataclass(slots=True)
class JoinedNorm:
    """Norms of groups of heads as one: each of so many heads of [..., heads, D]."""

    parts: list[TrainedNorm]
    counts: list[int]

    def __call__(self, heads: Tensor) -> Tensor:
        groups = zip(self.parts, heads.split(self.counts, -2), strict=True)
        return torch.cat([norm(group) for norm, group in groups], -2)

    def frozen(self, _: Bits) -> block.FusedNorm:
        weights = [
            norm.weight.detach().expand(n, -1) for norm, n in zip(self.parts, self.counts, strict=True)
        ]
        return block.FusedNorm(torch.cat(weights), self.parts[0].eps)


class SelfAttention(nn.Module):
    """The parameters of a layer's attention, of an input of `width`."""

    def __init__(self, config: DrafterConfig, number: int, width: int):
        super().__init__()
        dim, at = config.head_dim, f"layers.{number}.self_attn"

        def linear(name: str, inner: int, outer: int) -> nn.Linear:
            return nn.Linear(inner, outer, bias=f"{at}.{name}.bias" in config.names)

        self.q_proj = linear("q_proj", width, config.heads * dim)
        self.k_proj = linear("k_proj", width, config.kv_heads * dim)
        self.v_proj = linear("v_proj", width, config.kv_heads * dim)
        self.o_proj = linear("o_proj", config.heads * dim, config.hidden)
        normed = config.has(f"{at}.q_norm")
        self.q_norm = TrainedNorm(dim, config.eps) if normed else None
        self.k_norm = TrainedNorm(dim, config.eps) if normed else None


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one product."""

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.intermediate, bias=False)
        self.down_proj = nn.Linear(config.intermediate, config.hidden, bias=False)
        self.gate_up: Product = Joined([self.gate_proj, self.up_proj])
        self.act = ACT2FN[config.act]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down_proj(self.act(gate) * up)


class DecoderLayer(nn.Module):
    """x + o(attention(norm(x))), then x + mlp(norm(x)); whoever runs it says how rows attend."""

    def __init__(self, config: DrafterConfig, number: int, width: int):
        super().__init__()
        self.number, self.head_dim, self.scaling = number, config.head_dim, config.head_dim**-0.5
        self.input_layernorm = TrainedNorm(config.hidden, config.eps)
        self.self_attn = SelfAttention(config, number, width)
        self.post_attention_layernorm = TrainedNorm(config.hidden, config.eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, tables: RotaryTables, attend: Attend) -> Tensor:  # [..., H] -> [..., H]
        return self.end(x, attend(*self.begin(x, tables), self.scaling))

    def begin(self, x: Tensor, tables: RotaryTables) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values, [..., heads, Dh] each."""
        raise NotImplementedError

    def end(self, x: Tensor, seen: Tensor) -> Tensor:  # [..., H], [..., heads, Dh] -> [..., H]
        """The part after attention."""
        x = x + self.self_attn.o_proj(seen.flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Network(nn.Module):
    """What the networks of all methods have: layers, their positions, a vocabulary.

    `embed` is [V, H]. `ids` [Vd] are the target's ids of its draft ids; None: the same.
    """

    reads_states: ClassVar[bool]  # beside ids and positions; its own rows then lie in pages
    config: DrafterConfig
    layers: Any  # of `DecoderLayer`
    norm: Any
    lm_head: Any  # H -> Vd

    def __init__(self, config: DrafterConfig):
        super().__init__()
        self.config = config
        self.rotary = make_rotary(config)
        self.embed: Tensor
        self.register_buffer("embed", torch.empty(0), persistent=False)
        self.ids: Tensor | None
        self.register_buffer("ids", None, persistent=False)

    def forward(self, *arguments: Any) -> Tensor:
        """The states [T, H] after rows: from the arguments of `begin`, [T, ...] each, and a view."""
        *inputs, view = arguments
        x, tables = self.begin(*inputs)
        for layer in self.layers:
            x = layer.end(x, layer.attend(*layer.begin(x, tables), view))
        return self.end(x)

    def begin(self, *args: Any, **kwargs: Any) -> tuple[Tensor, RotaryTables]:
        """What the first layer reads, and the rotary tables of all."""
        raise NotImplementedError

    def end(self, x: Tensor) -> Tensor:
        """What follows the last layer: its norm."""
        return self.norm(x)

    def tables(self, x: Tensor, positions: Tensor) -> RotaryTables:
        """Rotary tables of `positions` [T] in the dtype of `x`."""
        cos, sin = self.rotary(x, positions[None])
        return rotation_tables(cos, sin, self.config.head_dim)

    def widened(self, scores: Tensor, vocab_size: int) -> Tensor:  # [R, Vd] -> [R, V]
        """Logits over the target's vocabulary; minus infinity for tokens that cannot be drafted."""
        if self.ids is not None:
            return scores.new_full((len(scores), vocab_size), -math.inf).index_copy_(1, self.ids, scores)
        missing = vocab_size - scores.shape[1]  # either may be padded
        return scores if not missing else F.pad(scores, (0, missing), value=-math.inf)


def make_rotary(config: DrafterConfig) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(rope_config(config))


def rope_config(config: DrafterConfig) -> LlamaConfig:
    """The config that transformers' rotary table reads."""
    return LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        rope_parameters=dict(config.rope),
    )


def freeze(network: nn.Module, quantization: Quantization = "auto") -> None:
    """Products in the fastest layout, and norms in few operations, in place of parameters."""
    modules, used = [*network.modules()], set[int]()
    bits = {
        id(child): num_bits(name, child.weight.shape, quantization)
        for name, child in network.named_modules()
        if isinstance(child, nn.Linear)
    }
    for module in modules:
        for name, value in [*vars(module).items()]:
            if isinstance(value, Joined | JoinedNorm):
                used |= {id(part) for part in value.parts}
                setattr(module, name, value.frozen(bits))
    for module in modules:
        for name, child in [*module.named_children()]:
            if isinstance(child, nn.Linear | TrainedNorm):
                delattr(module, name)
                if id(child) not in used:
                    setattr(module, name, frozen(child, bits))


def frozen(part: nn.Linear | TrainedNorm, bits: Bits) -> Product:
    if isinstance(part, TrainedNorm):
        return block.FusedNorm(part.weight.detach(), part.eps)
    return product([part], bits)


def product(parts: list[nn.Linear], bits: Bits) -> Product:
    """One product for linear layers of the same input, each rounded to its bits."""
    if None in (numbers := [bits[id(part)] for part in parts]):
        return joined(parts, share=False)
    pairs = zip(parts, numbers, strict=True)
    rounded = [quantize(part.weight, part.bias, n, part.weight.dtype) for part, n in pairs if n]
    return block.FusedRows(joined(rounded, share=False))


def num_bits(name: str, shape: Sequence[int], quantization: Quantization) -> int | None:
    """Of the weight of a module: those of layers and of fc have as many as is set, a head has 8."""
    if quantization not in BITS or len(shape) != 2 or not fits(shape):
        return None
    bits = BITS[quantization]
    return {"layers": bits, "fc": bits, "lm_head": HEAD_BITS}.get(name.partition(".")[0])


AnyNetwork = TypeVar("AnyNetwork", bound=Network)


def load_network(
    network_class: Callable[[Any], AnyNetwork], config: DrafterConfig, target: Target
) -> AnyNetwork:
    """The network of a checkpoint, frozen, in the target's dtype; what the checkpoint lacks is the target's.

    Raises `UnsupportedModel` for an activation that is not known, `ModelError` for a tensor that is missing.
    """
    if config.act not in ACT2FN:
        raise UnsupportedModel(f"{config.path}: hidden_act {config.act!r} is not known")
    tensors = read_tensors(config)
    with torch.device("meta"):
        network = network_class(config)
    weights: dict[str, Tensor] = {}
    for name, parameter in network.state_dict().items():
        if name not in tensors:
            raise MissingWeights(f"{config.path}: tensor {name} is missing")
        if (shape := tensors[name].shape) != parameter.shape:
            sizes = f"{list(shape)}, not {list(parameter.shape)}"
            raise CorruptWeights(f"{config.path}: {config.names[name]} is {sizes}")
        weights[name] = tensors.pop(name).to(target.device, target.dtype)
    network.load_state_dict(weights, assign=True)
    weights.clear()
    network.requires_grad_(False)
    freeze(network, config.quantization)
    network.rotary = make_rotary(config).to(target.device)
    own = tensors.get("embed_tokens.weight")
    network.embed = target.embedding.detach() if own is None else own.to(target.device, target.dtype)
    network.ids = target_ids(config.path, target.vocab_size, tensors.get("d2t"), target.device)
    if not config.has("lm_head"):
        network.lm_head = target.head
    return network


def target_ids(
    path: Path, vocab_size: int, offsets: Tensor | None, device: torch.device
) -> Tensor | None:  # [Vd] -> [Vd]
    """The target's id of each draft id; d2t holds the differences."""
    if offsets is None:
        return None
    check_offsets(path, offsets.tolist(), vocab_size)
    return torch.arange(len(offsets), device=device) + offsets.to(device, torch.long)


def read_tensors(config: DrafterConfig) -> dict[str, Tensor]:
    """The tensors of a checkpoint under the names used here."""
    tensors: dict[str, Tensor] = {}
    for path in config.files:
        with safe_open(path, framework="pt") as file:
            here = set(file.keys())
            tensors |= {
                name: file.get_tensor(stored) for name, stored in config.names.items() if stored in here
            }
    return tensors


def weight_bytes(config: DrafterConfig, dtype: torch.dtype) -> int:
    """The weights of a drafter in `dtype`, or in the bits that are set, from the headers of its files."""
    headers = {name: entry for file in config.files for name, entry in read_header(file)[0].items()}
    total = 0
    for name, stored in config.names.items():
        if name in NOT_WEIGHTS:
            continue
        shape = headers[stored]["shape"]
        size, bits = math.prod(shape), num_bits(name, shape, config.quantization)
        total += size * dtype.itemsize if bits is None else layer_bytes(size, bits, dtype)
    return total
