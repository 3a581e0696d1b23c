"""Random small models, and the GGUF files that llama.cpp's converter would write of them.

What a file has where is written down here a second time, from the converter and the tables of the package
`gguf`: a test that shared speculon's own tables would not see a mistake in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

SPECIAL = ("<unk>", "<s>", "</s>", "<|im_end|>")
TOKENS = (*SPECIAL, "\u0120", *(chr(code) for code in range(33, 127)), "\u010a")
MERGES = ("a b", "c d")
ALL = (*TOKENS, "ab", "cd")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
ARCHITECTURES = {  # where they are not the names of transformers
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
}
ROTATED = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
SMALL = {
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
    "pad_token_id": None,
    "initializer_range": 0.4,
}
SMALL_GPT2 = {
    "vocab_size": len(ALL),
    "n_embd": 32,
    "n_inner": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}


def tiny(model_type: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random small model, whose norms and biases are random as well."""
    torch.manual_seed(seed)
    small = SMALL_GPT2 if model_type == "gpt2" else SMALL
    config = AutoConfig.for_model(model_type, **deepcopy(small | changes))  # which changes its dictionaries
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "experts" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def tiny_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SMALL | changes)).eval()


def permuted(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows in the order of GGUF files, which rotate neighbours instead of halves."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).transpose(1, 2).reshape(rows.shape)


def tiled(values: torch.Tensor, dim: int, config: PreTrainedConfig, width: int) -> torch.Tensor:
    """Value heads of Qwen 3.5 so that those of one key head are no longer neighbours; what is before them in
    this dimension stays."""
    keys, heads = config.linear_num_key_heads, config.linear_num_value_heads
    before, own = values.split([values.shape[dim] - heads * width, heads * width], dim)
    own = own.unflatten(dim, (keys, heads // keys, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)
    return torch.cat([before, own], dim)


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    architecture: str = "",
    permute: bool = True,
    quantise: str = "F32",
    leave_out: str = "",
    more: dict[str, Any] | None = None,
    without: Sequence[str] = (),
    tensors: dict[str, torch.Tensor] | None = None,
    split: int = 0,
) -> Path:
    """Writes the model with its tokenizer, as llama.cpp's converter would.

    Matrices get the type `quantise`, other tensors are F32. Keys of `more` are set, those of `without` left
    out. Of several files, with `split` tensors each, the first is returned.
    """
    import gguf

    config = model.config
    architecture = architecture or ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    add_config(writer, config)
    writer.add_name("tiny")
    add_tokenizer(writer)
    for key, value in (more or {}).items():
        add_value(writer, key, value)
    for key in without:
        del writer.kv_data[0][key]
    for name, tensor in converted(model, permute):
        if not leave_out or leave_out not in name:
            in_blocks = tensor.dim() > 1 and tensor.shape[-1] % 32 == 0
            stored = gguf.GGMLQuantizationType[quantise if in_blocks else "F32"]
            data = gguf.quantize(tensor.float().contiguous().numpy(), stored)
            writer.add_tensor(gguf_name(config, name), data, raw_dtype=stored)
    for name, tensor in (tensors or {}).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return next(path.parent.glob(f"{path.stem}-00001-of-*.gguf")) if split else path


def gguf_name(config: PreTrainedConfig, name: str) -> str:
    own = ARCHITECTURES.get(config.model_type, config.model_type)
    found = names_of(own, config.num_hidden_layers).get_name(name, (".weight", ".bias"))
    assert found is not None, name
    return found


@cache
def names_of(architecture: str, num_layers: int) -> Any:
    """The table of the package `gguf`, which takes 40 ms to make."""
    import gguf

    of = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    return gguf.get_tensor_name_map(of, num_layers)


def converted(model: PreTrainedModel, permute: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights by their names, changed as llama.cpp's converter changes those of each architecture."""
    config, tied = model.config, model.config.tie_word_embeddings
    of = ARCHITECTURES.get(config.model_type, config.model_type)
    for name, tensor in model.state_dict().items():
        part = name.split(".")[-2]
        if name == "lm_head.weight" and tied:
            continue
        if of == "gpt-oss":
            yield from of_gpt_oss(name, tensor)
            continue
        if of.startswith("qwen35"):
            name, tensor = of_qwen35(config, name, tensor)
        if part == "experts":
            name += ".weight"
        if name.endswith("experts.gate_up_proj.weight"):
            for half, own in zip(tensor.chunk(2, 1), ("gate_proj", "up_proj"), strict=True):
                yield name.replace("gate_up_proj", own), half
            continue
        if of == "llama" and permute and part in ROTATED:
            tensor = permuted(tensor, getattr(config, ROTATED[part]))
        if of.startswith("gemma") and name.endswith("norm.weight"):
            tensor = tensor + 1
        if of == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
            tensor = tensor.T
        yield name, tensor.squeeze()


def of_qwen35(config: PreTrainedConfig, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    width = config.linear_value_head_dim
    if name.endswith(("in_proj_qkv.weight", "in_proj_z.weight", "conv1d.weight")):
        tensor = tiled(tensor, 0, config, width)
    elif name.endswith(("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias")):
        tensor = tiled(tensor, 0, config, 1)
    elif name.endswith("out_proj.weight"):
        tensor = tiled(tensor, 1, config, width)
    if name.endswith("A_log"):
        tensor = -tensor.exp()
    elif name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        tensor = tensor + 1
    return name.replace(".dt_bias", ".dt_proj.bias"), tensor


def of_gpt_oss(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    name = name.replace("proj_bias", "proj.bias")
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        name, tensor = f"{name}.weight", tensor.transpose(1, 2)
    if "gate_up_proj" in name:
        yield name.replace("gate_up_proj", "gate_proj"), tensor[:, ::2]
        yield name.replace("gate_up_proj", "up_proj"), tensor[:, 1::2]
    else:
        yield f"{name}.weight" if name.endswith("sinks") else name, tensor


def add_config(writer: Any, config: PreTrainedConfig) -> None:
    """The keys that llama.cpp's converter writes, and where it leaves a window out, that as well."""
    of, get = config.model_type, config.to_dict().get
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if size := get("n_inner") or get("intermediate_size"):
        writer.add_feed_forward_length(size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if eps := get("rms_norm_eps") or get("norm_eps"):
        writer.add_layer_norm_rms_eps(eps)
    if eps := get("layer_norm_epsilon") or get("norm_epsilon") or get("layer_norm_eps"):
        writer.add_layer_norm_eps(eps)
    if of == "gpt2":
        return
    if of == "lfm2":
        types = config.layer_types
        writer.add_head_count_kv([config.num_key_value_heads * (one == "full_attention") for one in types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
    if of == "stablelm":
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(width * config.rope_parameters["partial_rotary_factor"]))
        writer.add_parallel_residual(True)  # which the configs of its checkpoints do not say
        return
    if of.startswith("qwen3_5"):
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        share = config.rope_parameters["partial_rotary_factor"]
        writer.add_rope_dimension_count(int(config.head_dim * share))
    if of == "gpt_oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if of not in ("phi3", "lfm2"):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if window := get("sliding_window"):
        writer.add_sliding_window(window)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        if value := get(name):
            getattr(writer, f"add_{name}")(value)
    if number := get("num_experts") or get("num_local_experts"):
        writer.add_expert_count(number)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if size := get("moe_intermediate_size"):
        writer.add_expert_feed_forward_length(size)
    if size := get("shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(size)
    positions = config.rope_parameters
    if local := positions.get("sliding_attention"):
        writer.add_float32(f"{writer.arch}.rope.freq_base_swa", local["rope_theta"])
    add_positions(writer, config, positions.get("full_attention", positions))


def add_positions(writer: Any, config: PreTrainedConfig, positions: dict[str, Any]) -> None:
    import gguf

    writer.add_rope_freq_base(positions["rope_theta"])
    kind = positions["rope_type"]
    if config.model_type in ("llama", "mistral", "mixtral"):
        writer.add_rope_dimension_count(config.head_dim)
    if config.model_type == "phi3":
        width = config.hidden_size // config.num_attention_heads
        writer.add_rope_dimension_count(int(width * positions["partial_rotary_factor"]))
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
    if kind in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(positions["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(positions["original_max_position_embeddings"])
        for name, add in (
            ("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
            ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
            ("beta_slow", writer.add_rope_scaling_yarn_beta_slow),
        ):
            if (value := positions.get(name)) is not None:
                add(value)
    if kind == "longrope":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
        writer.add_rope_scaling_attn_factors(positions["attention_factor"])
        for name in ("long", "short"):
            factors = np.array(positions[f"{name}_factor"], dtype=np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


def add_value(writer: Any, key: str, value: Any) -> None:
    add = {
        str: writer.add_string,
        bool: writer.add_bool,
        float: writer.add_float32,
        int: writer.add_uint32,
        list: writer.add_array,
    }
    add[type(value)](key, value)


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
