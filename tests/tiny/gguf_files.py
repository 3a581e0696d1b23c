"""A random small Llama, and the GGUF file that a converter would write of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
TOKENS = (*SPECIAL, "\u0120", *(chr(code) for code in range(33, 127)), "\u010a")
MERGES = ("a b", "c d")
ALL = (*TOKENS, "ab", "cd")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        **{
            "vocab_size": len(ALL),
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 128,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "initializer_range": 0.4,
            **changes,
        }
    )
    return LlamaForCausalLM(config).eval()


def gguf_name(name: str) -> str:
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    bare = name.removesuffix(".weight")
    if bare in whole:
        return f"{whole[bare]}.weight"
    _, _, layer, part = bare.split(".", 3)
    return f"blk.{layer}.{NAMES[part]}.weight"


def permuted(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of GGUF files, which rotate neighbours instead of halves."""
    return matrix.reshape(heads, 2, -1, matrix.shape[1]).transpose(1, 2).reshape(matrix.shape)


def write_gguf(
    model: LlamaForCausalLM,
    path: Path,
    *,
    architecture: str = "llama",
    permute: bool = True,
    quantise: str = "F32",
    leave_out: str = "",
    more: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
) -> Path:
    """Writes the model with its tokenizer. Matrices get the type `quantise`, other tensors are F32."""
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_name("tiny")
    add_tokenizer(writer)
    for key, value in (more or {}).items():
        {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)](key, value)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, tensor in model.state_dict().items():
        part = name.split(".")[-2]
        if permute and part in heads:
            tensor = permuted(tensor, heads[part])
        if not leave_out or leave_out not in name:
            stored = gguf.GGMLQuantizationType[quantise if tensor.dim() == 2 else "F32"]
            data = gguf.quantize(tensor.float().numpy(), stored)
            writer.add_tensor(gguf_name(name), data, raw_dtype=stored)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(ALL))
    writer.add_token_types([3 if token in SPECIAL else 1 for token in ALL])
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
