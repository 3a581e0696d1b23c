"""Checkpoints with prediction layers in each layout, the formula of their modules, and a record of rows."""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.mtp.proposer import NAME, Mtp
from speculon.runtimes.torch.kv.draft_pages import TokenRange
from speculon.runtimes.torch.loading.load import load_target
from speculon.runtimes.torch.model.target import Target
from tests.formats.writer import TARGET, Checkpoint, make_checkpoint, published
from tests.tiny.conftest import MOE, TINY, build
from tests.tiny.heads import register_watched, true_draft
from tests.tiny.recurrent import DELTA, DELTA_MOE
from tests.tiny.scripted import Key

Texts = Mapping[Key, list[int]]
H = 32

GLM = {
    **MOE,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "use_qk_norm": True,
}


@dataclass(frozen=True)
class Form:
    """A target with prediction modules: their form in `tests/formats/mtp.json`, and how they compute."""

    header: str
    model_type: str
    settings: dict[str, Any]
    modules: int = 1
    layers: int = 2  # of the target itself
    hidden_first: bool = False
    own_head: bool = False
    joined_experts: bool = False  # in the file
    window: int | None = None  # of the modules' layers

    @property
    def one_plus(self) -> bool:
        """Whether norms multiply by 1 + w."""
        return self.header == "qwen"

    def made(self, target: Any) -> Checkpoint:
        sizes = {"layers": self.layers, "modules": self.modules}
        return make_checkpoint(f"mtp/{self.header}", target, 3, **sizes)

    def path(self, module: int) -> str:
        """The prefix of a module in the files."""
        return published(f"modules.{module}.", self.made(TARGET).rename)


MELLUM = {
    **MOE,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "mlp_layer_types": ["sparse", "sparse"],
}
deepseek = TINY["deepseek_v3"]
FORMS: dict[str, Form] = {
    "deepseek": Form("deepseek", *deepseek),
    "deepseek, two modules": Form("deepseek", *deepseek, modules=2),
    "deepseek, own head": Form("deepseek", *deepseek, own_head=True),
    "glm": Form("deepseek", "glm4_moe", GLM, joined_experts=True),
    "qwen3_next": Form("qwen", "qwen3_next", DELTA_MOE, layers=3),
    "qwen3_5": Form("qwen", "qwen3_5_text", DELTA, layers=3),
    "mellum": Form("mellum", "mellum", MELLUM, window=5),
    "mimo": Form("mimo", "qwen2", {}, hidden_first=True),
    "windows": Form("mimo", "mistral", {"sliding_window": 5}, modules=2, hidden_first=True, window=5),
    "mimo, three modules": Form("mimo", "qwen2", {}, modules=3, hidden_first=True),
}


@dataclass(frozen=True)
class Written:
    """A checkpoint, and what the formula needs of it."""

    form: Form
    folder: Path
    whole: PreTrainedModel  # with the modules' layers after the target's own
    tensors: list[dict[str, Tensor]]  # of each module
    stock: PreTrainedModel  # the target alone, as transformers loads it


def extended(form: Form) -> PreTrainedModel:
    """The model with one more layer of full attention for each module."""
    settings = {**form.settings, "num_hidden_layers": form.layers + form.modules}
    if "layer_types" in settings:
        added = ["sliding_attention" if form.window else "full_attention"] * form.modules
        settings["layer_types"] = [*settings["layer_types"], *added]
    if "mlp_layer_types" in settings:
        settings["mlp_layer_types"] = [*settings["mlp_layer_types"], *["sparse"] * form.modules]
    model, chance = build(form.model_type, **settings), torch.Generator().manual_seed(5)
    for name, weight in model.named_parameters():
        if form.one_plus and "norm" in name and not weight.data.any():  # they begin as zeros
            weight.data = torch.randn(weight.shape, generator=chance) * 0.3
    return model


def write_mtp(folder: Path, form: Form) -> Written:
    """Saves a random checkpoint, whose layers after the target's own become its modules."""
    whole = extended(form)
    whole.save_pretrained(folder)
    made, stored = form.made(whole.config), load_file(folder / "model.safetensors")
    parts: list[dict[str, Tensor]] = []
    for module in range(form.modules):
        at = f"model.layers.{form.layers + module}."
        layer = published(f"modules.{module}.layer.", made.rename)
        for name in [name for name in stored if name.startswith(at)]:
            stored[layer + name.removeprefix(at)] = stored.pop(name)
        if form.joined_experts:
            join_experts(stored, layer)
        own = {
            name.removeprefix(f"modules.{module}.").removesuffix(".weight"): tensor
            for name, tensor in made.tensors.items()
            if name.startswith(f"modules.{module}.")
        }
        if made.copies:  # of what the target has
            own["head"] = stored["lm_head.weight"] + 0.1 * own["head"] * form.own_head
            own["embed"] = stored["model.embed_tokens.weight"].clone()
        parts.append(own)
    for module, own in enumerate(parts):
        stored |= {
            published(f"modules.{module}.{part}.weight", made.rename): tensor for part, tensor in own.items()
        }
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | made.config
    for name in ("layer_types", "mlp_layer_types"):
        if config.get(name):
            config[name] = config[name][: form.layers]
    (folder / "config.json").write_text(json.dumps(config))
    stock = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    return Written(form, folder, whole, parts, stock.eval())


def join_experts(stored: dict[str, Tensor], at: str) -> None:
    """Stores the experts of one module side by side, as some checkpoints do."""
    own = [name for name in stored if name.startswith(f"{at}mlp.experts.")]
    of = {name: stored.pop(name) for name in own}
    count = len(own) // 3
    weights = [
        [of[f"{at}mlp.experts.{i}.{n}_proj.weight"] for n in ("gate", "up", "down")] for i in range(count)
    ]
    stored[f"{at}mlp.experts.gate_up_proj"] = torch.stack([torch.cat(parts[:2]) for parts in weights])
    stored[f"{at}mlp.experts.down_proj"] = torch.stack([parts[2] for parts in weights])


@cache
def written(name: str) -> Written:
    """One folder for all tests; treat it as read-only."""
    folder = TemporaryDirectory(prefix="mtp-")
    atexit.register(folder.cleanup)
    return write_mtp(Path(folder.name), FORMS[name])


@cache
def target_of(name: str) -> Target:
    return load_target(written(name).folder, dtype="float32", device="cpu")


# the formula


def rms_norm(form: Form, x: Tensor, weight: Tensor) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * w, or * (1 + w); eps is that of the tiny configs."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * (weight + form.one_plus)


def run_module(at: Written, module: int, tokens: list[int], states: Tensor) -> Tensor:
    """Rows of one module by the formula, with dense causal attention: n tokens, states [n, H] -> [n, H]."""
    form, parts, model = at.form, at.tensors[module], at.whole.model
    embedded = at.whole.get_input_embeddings().weight[torch.tensor(tokens)]
    pair = [rms_norm(form, embedded, parts["embed_norm"]), rms_norm(form, states, parts["state_norm"])]
    joined = torch.cat(pair[::-1] if form.hidden_first else pair, -1) @ parts["proj"].T
    n = len(tokens)
    positions, ages = torch.arange(n)[None], torch.arange(n)[:, None] - torch.arange(n)
    mask = torch.zeros(n, n).masked_fill((ages < 0) | (ages >= (form.window or n)), -1e30)[None, None]
    typed = {"layer_type": "sliding_attention"} if form.model_type == "mellum" else {}
    tables = model.rotary_emb(joined[None], positions, **typed)
    layer = model.layers[form.layers + module]
    out = layer(joined[None], attention_mask=mask, position_ids=positions, position_embeddings=tables)
    return rms_norm(form, (out[0] if isinstance(out, tuple) else out)[0], parts["norm"])


@torch.inference_mode()
def true_states(at: Written, ids: list[int]) -> Tensor:  # [n, H]
    """What the stock target's head reads."""
    return at.stock.model(torch.tensor([ids])).last_hidden_state[0]


@torch.inference_mode()
def reference_rows(at: Written, ids: list[int]) -> list[Tensor]:
    """The rows of each module for n tokens: row i of module k has token i + k + 1."""
    states, rows = true_states(at, ids), []
    for module in range(at.form.modules):
        tokens = ids[module + 1 :]
        states = run_module(at, module, tokens, states[: len(tokens)])
        rows.append(states)
    return rows


@torch.inference_mode()
def reference_chain(at: Written, ids: list[int], k: int) -> tuple[list[int], Tensor]:
    """k greedy drafts after n tokens, and the logits [k, V] that gave them."""
    rows, drafts, logits = true_states(at, ids)[: len(ids) - 1], list[int](), []
    tokens, last = ids[1:], at.form.modules - 1
    for step in range(k):
        module = min(step, last)
        if step <= last:
            tokens = [*ids, *drafts][module + 1 :]
            inputs = rows
            after = rows = run_module(at, module, tokens, inputs)
        else:  # the last module once more, over its own state
            inputs, tokens = torch.cat([inputs, after[-1:]]), [*tokens, drafts[-1]]
            after = run_module(at, module, tokens, inputs)
        logits.append(after[-1] @ head_of(at, module).T)
        drafts.append(int(logits[-1].argmax()))
    return drafts, torch.stack(logits)


def head_of(at: Written, module: int) -> Tensor:
    own = at.tensors[module].get("head")
    return at.whole.get_output_embeddings().weight if own is None else own


# the record


@dataclass
class Round:
    key: Key
    length: int
    drafts: tuple[int, ...]
    logits: Tensor  # [k, V]


@dataclass
class Rows:
    """Rows of committed tokens, by module: from slot `start` on."""

    key: Key
    module: int
    start: int
    states: Tensor  # [n, H]


@dataclass
class Watch:
    rounds: list[Round] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)


class Watched(Mtp):
    """Records every row, and drafts the known output with some errors, so that all lengths are accepted."""

    watch: Watch
    truth: Texts
    reading = False

    def propose(self, seqs: list[Sequence], budgets: list[int]) -> list[Draft]:
        self.scores: dict[Key, list[Tensor]] = {key_of(seq): [] for seq in seqs}
        drafts = super().propose(seqs, budgets)
        for seq, draft in zip(seqs, drafts, strict=True):
            if draft.tokens:
                scores = torch.stack(self.scores[key_of(seq)])
                self.watch.rounds.append(Round(key_of(seq), len(seq.tokens), draft.tokens, scores))
        if not self.truth:
            return drafts
        return [true_draft(NAME, self.truth, seq, draft) for seq, draft in zip(seqs, drafts, strict=True)]

    def _read(self, ranges: list[TokenRange]) -> Tensor:
        self.reading = True
        after = super()._read(ranges)
        self.reading = False
        self._score(ranges, 0, after)
        return after

    def _forward(
        self, module: int, ranges: list[TokenRange], ids: list[int], states: Tensor | None
    ) -> Tensor:
        out = super()._forward(module, ranges, ids, states)
        row, ends = 0, []
        for seq, start, end in ranges:
            rows = out[row : row + end - start].cpu().clone()
            if self.reading:
                self.watch.rows.append(Rows(key_of(seq), module, start, rows))
            row += end - start
            ends.append(row - 1)
        if not self.reading:
            self._score(ranges, module, out[ends])
        return out

    def _score(self, ranges: list[TokenRange], module: int, after: Tensor) -> None:
        logits = self.head.logits(module, after, self.vocab_size)
        for (seq, _, end), scores in zip(ranges, logits, strict=True):
            if end >= len(seq.tokens):
                self.scores[key_of(seq)].append(scores.cpu().clone())


def key_of(seq: Sequence) -> Key:
    return seq.request.id, seq.sample


def watch_mtp(truth: Texts | None = None) -> Watch:
    """Makes `mtp` the name of modules that are watched, and that say `truth` where there is any."""
    watch = Watch()

    register_watched(NAME, Watched, watch, truth)
    return watch


def wrong_rows(watch: Watch, at: Written, texts: Texts, atol: float = 1e-3) -> list[str]:
    """Rows, logits and drafts that are not the formula's; `texts` are prompts with what was written."""
    wrong = []
    for key, ids in texts.items():
        expected = reference_rows(at, ids)
        for rows in (rows for rows in watch.rows if rows.key == key):
            first = rows.start - rows.module - 1
            truth = expected[rows.module][first : first + len(rows.states)]
            if not (off := (rows.states - truth).abs().max().item()) < atol:
                wrong.append(f"{key}: module {rows.module}, slots from {rows.start} on are off by {off:.1e}")
        for made in (made for made in watch.rounds if made.key == key):
            drafts, logits = reference_chain(at, ids[: made.length], len(made.drafts))
            off = (made.logits - logits).abs().max().item()
            if tuple(drafts) != made.drafts or not off < 10 * atol:
                found = f"{made.drafts}, not {tuple(drafts)}; logits are off by {off:.1e}"
                wrong.append(f"{key}: after {made.length} tokens {found}")
    return wrong
