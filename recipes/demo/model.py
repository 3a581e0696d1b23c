"""Qwen3 for training: the same parameter names and arithmetic as transformers, with less around it."""

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a demo model."""

    num_hidden_layers: int = 20
    hidden_size: int = 256
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 384
    vocab_size: int = 4096
    max_position_embeddings: int = 2048
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6

    def as_transformers(self) -> dict[str, object]:
        """config.json of a Qwen3ForCausalLM with these sizes."""
        return {
            **asdict(self),
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": None,
            "eos_token_id": [2, 0],
            "pad_token_id": 0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "layer_types": ["full_attention"] * self.num_hidden_layers,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "sliding_window": None,
            "tie_word_embeddings": True,
            "dtype": "float32",  # computed in: in bf16 near-ties would break equal outputs
            "use_cache": True,
            "use_sliding_window": False,
        }


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding; x [B, T, heads, head_dim], cos and sin [T, 1, head_dim]."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + turned * sin).to(x.dtype)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, groups: int, block: int = 128) -> Tensor:
    """Attention by blocks of queries, which skips half of the scores.

    q [B, T, kv_heads * groups, head_dim], k and v [B, T, kv_heads, head_dim] -> [B, T, heads * head_dim]. On
    a CPU in bf16 plain matrix products beat the fused kernel.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = heads // groups
    q = (q * head_dim**-0.5).reshape(batch, length, kv_heads, groups, head_dim)
    keys = k.permute(0, 2, 3, 1).reshape(batch * kv_heads, head_dim, length)
    values = v.permute(0, 2, 1, 3).reshape(batch * kv_heads, length, head_dim)
    outputs = []
    for start in range(0, length, block):
        stop = min(start + block, length)
        rows = (
            q[:, start:stop]
            .permute(0, 2, 1, 3, 4)
            .reshape(batch * kv_heads, (stop - start) * groups, head_dim)
        )
        scores = torch.bmm(rows, keys[:, :, :stop]).float()
        query = torch.arange(start, stop, device=q.device).repeat_interleave(groups)
        future = torch.arange(stop, device=q.device)[None, :] > query[:, None]
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(q.dtype)
        mixed = torch.bmm(weights, values[:, :stop]).reshape(batch, kv_heads, stop - start, groups, head_dim)
        outputs.append(mixed.permute(0, 2, 1, 3, 4).reshape(batch, stop - start, heads * head_dim))
    return torch.cat(outputs, dim=1)


class Attention(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_width, bias=False)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        head_dim, groups = (
            self.config.head_dim,
            self.config.num_attention_heads // self.config.num_key_value_heads,
        )
        weights = torch.cat((self.q_proj.weight, self.k_proj.weight, self.v_proj.weight))
        widths = (len(self.q_proj.weight), len(self.k_proj.weight), len(self.v_proj.weight))
        q, k, v = F.linear(x, weights).split(widths, -1)
        q = rotate(self.q_norm(q.reshape(batch, length, -1, head_dim)), cos, sin)
        k = rotate(self.k_norm(k.reshape(batch, length, -1, head_dim)), cos, sin)
        v = v.reshape(batch, length, -1, head_dim)
        mixed = causal_attention(q, k, v, groups)
        return self.o_proj(mixed)


class MLP(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, torch.cat((self.gate_proj.weight, self.up_proj.weight))).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class CrossEntropy(torch.autograd.Function):
    """Weighted mean loss of logits [N, vocab] with an explicit gradient, whose kernels are vectorised."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        log_total = log_sum_exp(scores)
        share = weights / weights.sum()
        ctx.save_for_backward(scores, targets, log_total, share)
        picked = scores.gather(-1, targets[:, None]).squeeze(-1).float()
        return ((log_total - picked) * share).sum()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        scores, targets, log_total, share = ctx.saved_tensors
        share = share * gradient
        result = scaled_softmax(scores, log_total, share)
        result[torch.arange(len(targets)), targets] -= share.to(result.dtype)
        return result, None, None


def log_sum_exp(scores: Tensor) -> Tensor:
    """Log of the sum of exponentials of each row, in fp32: [N, vocab] -> [N]."""
    return scores.float().logsumexp(-1)


def scaled_softmax(scores: Tensor, log_total: Tensor, scale: Tensor) -> Tensor:
    """Row softmax times scale [N], in the type of the scores."""
    return ((scores.float() - log_total[:, None]).exp() * scale[:, None]).to(scores.dtype)


class TrainableQwen3(nn.Module):
    """A Qwen3 with tied embeddings whose `forward` is the loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
        steps = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-steps)
        angles = torch.cat((angles, angles), dim=-1)[:, None, :]  # [positions, 1, head_dim]
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Final hidden states [B, T, hidden] of token ids [B, T]."""
        x = self.model.embed_tokens(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.get_autocast_dtype("cpu"))
        cos, sin = self.cos[: tokens.shape[1]].to(x.dtype), self.sin[: tokens.shape[1]].to(x.dtype)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.model.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of the next token."""
        return F.linear(hidden, self.model.embed_tokens.weight)

    def forward(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
        """Mean next-token loss of token ids [B, T + 1]; weights [B, T] of the targets default to one."""
        targets = tokens[:, 1:].flatten()
        scores = self.logits(self.hidden(tokens[:, :-1])).flatten(0, 1)
        return CrossEntropy.apply(
            scores, targets, torch.ones(len(targets)) if weights is None else weights.flatten()
        )
