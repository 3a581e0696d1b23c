"""Which of transformers' causal language models the engine supports.

    python -m recipes.architectures.count --out docs/benchmarks/architectures

A small model with random weights is made of each type, and goes through the same checks as a checkpoint. A
type that cannot be made small is counted as not tested.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from speculon.errors import SpeculonError
from speculon.models.load import wrap_model

MAX_PARAMETERS = 320_000_000  # of a model that is made; larger ones are not tested
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
SMALL: dict[str, Any] = {
    **dict.fromkeys(LAYERS, 2),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_top_k"), 2),
    "moe_intermediate_size": 32,
    **dict.fromkeys(("n_group", "topk_group"), 1),
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
ENCODER_DECODER: dict[str, Any] = {
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 96),
}
NO_HEAD_DIM = {name: value for name, value in SMALL.items() if name != "head_dim"}
ATTEMPTS: tuple[dict[str, Any], ...] = (
    SMALL,
    {**SMALL, "num_key_value_heads": 4},
    {**NO_HEAD_DIM, "num_key_value_heads": 4, "rotary_dim": 8},
    {**NO_HEAD_DIM, "d_model": 64, **ENCODER_DECODER},
    {**SMALL, **dict.fromkeys(LAYERS, 4)},
    {**NO_HEAD_DIM, "num_experts_per_tok": 1},
    {name: SMALL[name] for name in (*LAYERS, "vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    {name: SMALL[name] for name in LAYERS},
    {},
)


def small_config(model_type: str, settings: dict[str, Any]) -> PreTrainedConfig:
    """The type's own config with those of the settings that it knows, in its text part too."""
    known = AutoConfig.for_model(model_type)
    given = {name: value for name, value in settings.items() if hasattr(known, name)}
    inner = getattr(known, "text_config", None)
    if inner is not None and inner is not known:
        text = {name: value for name, value in settings.items() if hasattr(inner, name)}
        given = {"text_config": {"model_type": inner.model_type, **text}}
    return AutoConfig.for_model(model_type, **given)


def make(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        size = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size / 1e6:.0f} M parameters at its smallest here")
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()


def judge(model_type: str) -> dict[str, str]:
    """Supported, or the engine's refusal; not tested where no attempt gives a small model that runs."""
    reason = ""
    for settings in ATTEMPTS:
        torch.manual_seed(0)
        try:
            wrap_model(make(small_config(model_type, settings)))
        except SpeculonError as error:
            return {"outcome": "refused", "reason": first_line(error)}
        except Exception as error:  # a config's own checks raise many types
            reason = reason or first_line(error)
        else:
            return {"outcome": "supported", "reason": ""}
    return {"outcome": "not tested", "reason": reason}


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0][:160] or type(error).__name__


def as_markdown(report: dict[str, Any]) -> str:
    types = report["types"]
    counts = Counter(row["outcome"] for row in types.values())
    order = sorted(types.items(), key=lambda item: (item[1]["outcome"] != "supported", item[0]))
    lines = [
        "# Supported causal types of transformers",
        "",
        f"`{report['command']}`,",
        f"{report['date']}, transformers {report['transformers']}.",
        "A random small model of each type goes through the checks of a checkpoint.",
        "",
        f"**{counts['supported']} of {len(types)} types are supported**, {counts['refused']} are refused",
        f"with a reason, {counts['not tested']} were not tested.",
        "",
        "| type | outcome | reason |",
        "|---|---|---|",
        *(f"| {name} | {row['outcome']} | {row['reason'].replace('|', '/')} |" for name, row in order),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for architectures.json and README.md")
    parser.add_argument("--only", nargs="*", help="these types alone")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    types: dict[str, dict[str, str]] = {}
    for model_type in given.only or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        types[model_type] = judge(model_type)
        print(model_type, *types[model_type].values(), file=sys.stderr, flush=True)
    command = "python -m recipes.architectures.count --out docs/benchmarks/architectures"
    report = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "transformers": transformers.__version__,
        "torch": torch.__version__,
        "types": types,
    }
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "architectures.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        (given.out / "README.md").write_text(as_markdown(report), encoding="utf-8")
    print(Counter(row["outcome"] for row in types.values()))


if __name__ == "__main__":
    main()
