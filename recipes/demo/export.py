"""Write a model folder that transformers and speculon read."""

import json
import shutil
from pathlib import Path

import torch
from card import model_card
from model import TrainableQwen3
from safetensors.torch import save_file
from tokenizer import save_tokenizer
from tokenizers import Tokenizer


def export_model(
    model: TrainableQwen3, tokenizer: Tokenizer, folder: Path, facts: dict | None = None
) -> None:
    """config.json, generation_config.json, bf16 weights and tokenizer, swapped into place once complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    tensors = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(tensors, fresh / "model.safetensors", metadata={"format": "pt"})
    config = model.config.as_transformers()
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {
        "do_sample": False,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, fresh, model.config.max_position_embeddings)
    if facts:
        (fresh / "training.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
        (fresh / "README.md").write_text(model_card(model, facts), encoding="utf-8")
    old = folder.with_name(folder.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
