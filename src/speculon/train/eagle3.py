"""Training method `eagle3`: an EAGLE-3 head for the target, with the training-time test (Li 2025) as loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from speculon.checkpoints.headers import parameters_by_dtype, read_config
from speculon.checkpoints.locate import locate
from speculon.core.errors import InvalidParameter, UnsupportedModel
from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config
from speculon.runtimes.torch.drafters.eagle3.network import Eagle3Network
from speculon.train.data import DocumentRows
from speculon.train.losses import attention, kl
from speculon.train.record import write_json
from speculon.train.settings import HeadSettings
from speculon.train.teacher import Teacher, TeacherBatch
from speculon.train.training import Training, attention_heads

WEIGHTS = "model.safetensors"
Past = list[tuple[Tensor, Tensor]]  # keys and values [B, KV, N, D] of each step so far


class Eagle3Head(Eagle3Network):
    """A head as it learns: row i of step k predicts token i + 2 + k, a draft at depth k."""

    def __init__(self, config: Eagle3Config, steps: int, decay: float):
        super().__init__(config)
        self.steps, self.decay = steps, decay

    def hiddens(self, ids: Tensor, taps: Tensor) -> Iterator[Tensor]:
        """Normed states [B, N, H] of each step, N = T - steps. ids [B, T], taps [B, T, k * H].

        Row i of step k pairs the fused taps of position i (k = 0), or the head's output of the last step,
        with token i + 1 + k at rotary position i + k; it predicts token i + 2 + k.
        """
        rows, past = ids.shape[1] - self.steps, [Past() for _ in self.layers]
        x = self.fuse(taps[:, :rows]).float()
        cos, sin = self.tables(self.embed, torch.arange(ids.shape[1], device=ids.device))
        for k in range(self.steps):
            embedded = F.embedding(ids[:, k + 1 : k + 1 + rows], self.embed)
            x, tables = torch.cat([embedded, x], -1), (cos[k : k + rows], sin[k : k + rows])
            for layer, before in zip(self.layers, past, strict=True):
                x = layer(x, tables, partial(attend, before))
            normed = self.norm(x)
            yield normed
            x = normed if self.norm_output else x

    def loss(self, batch: TeacherBatch) -> Tensor:
        """sum_k decay^k KL(p || q), each a weighted mean over rows."""
        total = torch.zeros((), device=batch.ids.device)
        for k, states in enumerate(self.hiddens(batch.ids, batch.taps)):
            at = self._positions(k, batch)
            learned = batch.weights[:, at] > 0  # [B, N]
            p, entropy, weights = (each[:, at][learned] for each in (batch.p, batch.entropy, batch.weights))
            total = total + self.decay**k * kl(states[learned], self.lm_head.weight, p, entropy, weights)
        return total

    def correct(self, batch: TeacherBatch) -> Tensor:
        """Whether the best token of each step is the target's, for rows of non-zero weight [steps, M]."""
        assert self.ids is not None
        counts, found = batch.weights[:, self._positions(0, batch)] > 0, []  # [B, N]
        for k, states in enumerate(self.hiddens(batch.ids, batch.taps)):
            best = self.ids[self.lm_head(states[counts]).argmax(-1)]
            found.append(best == batch.best[:, self._positions(k, batch)][counts])
        return torch.stack(found)

    def _positions(self, step: int, batch: TeacherBatch) -> slice:
        """The target's positions that predict the same tokens as the rows of a step."""
        return slice(step + 1, step + 1 + batch.ids.shape[1] - self.steps)


def attend(past: Past, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """Rows [B, N, heads, D] of a step attend to `past`, to which their keys and values are appended."""
    past.append((key.to(value.dtype).transpose(1, 2), value.transpose(1, 2)))
    keys, values = zip(*past, strict=True)
    return attention(query.to(value.dtype).transpose(1, 2), list(keys), list(values)).transpose(1, 2)


class Eagle3Training(Training[HeadSettings, Eagle3Head]):
    """How `train eagle3` makes its drafter, and writes it at the end."""

    method = proposer = "eagle3"

    def __init__(self, settings: HeadSettings):
        super().__init__(settings)
        self.taps = settings.tap_ids

    @property
    def spare(self) -> int:
        return self.settings.ttt

    def check(self, teacher: Teacher) -> None:
        config = config_of(self.settings, teacher)
        if self.settings.start is not None:
            refuse_other_form(self.settings.start, config, self.settings.draft_vocab or teacher.vocab_size)
        count = self.settings.draft_vocab or 0
        if count > teacher.vocab_size:
            raise InvalidParameter(
                "draft_vocab", count, f"must be at most the target's vocabulary, {teacher.vocab_size}"
            )

    def drafter(self, teacher: Teacher, rows: DocumentRows) -> Eagle3Head:
        """Random layers between the target's embeddings and output head, or the head that it starts from."""
        settings = self.settings
        before = {} if settings.start is None else load_file(locate(settings.start) / WEIGHTS)
        offsets = before.get("d2t")
        if offsets is None:
            used = most_used(rows, settings.draft_vocab, teacher)
        else:
            used = offsets + torch.arange(len(offsets))
        teacher.used = used.to(teacher.device)
        head = Eagle3Head(config_of(settings, teacher), settings.ttt, settings.decay).to(teacher.device)
        begin(head, teacher.embed, teacher.norm)
        head.ids = teacher.used
        with torch.no_grad():
            head.lm_head.weight.copy_(teacher.head.weight[teacher.used.to(teacher.head.weight.device)])
            for name, parameter in head.named_parameters() if before else ():
                shape, here = list(before[name].shape) if name in before else "missing", list(parameter.shape)
                if shape != here:
                    reason = f"{name} is {shape} there and {here} here: give the settings of that head"
                    raise InvalidParameter("start", str(settings.start), reason)
                parameter.copy_(before[name])
        return head

    def write(self, drafter: Eagle3Head, teacher: Teacher, target: str, folder: Path) -> None:
        """In the speculators format."""
        config, used = drafter.config, teacher.used.cpu()
        tables: dict[str, Tensor] = {}
        if config.draft_vocab_size < config.vocab_size:
            tables["d2t"] = used - torch.arange(len(used))  # an offset: target id = draft id + d2t
            tables["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, used, True)
        write_head(drafter, speculators_config(config, target), folder, tables)


@torch.no_grad()
def begin(head: Eagle3Network, embed: Tensor, norm: Tensor | None) -> None:
    """Small random matrices; embeddings and last norm are the target's.

    Matrices that end a layer are zero, so that it adds nothing at first.
    """
    for name, parameter in head.named_parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            nn.init.zeros_(parameter)
    head.embed = embed.detach().float()
    if norm is not None:
        head.norm.weight.copy_(norm)


def write_head(
    head: nn.Module, config: Mapping[str, Any], folder: Path, tables: Mapping[str, Tensor]
) -> None:
    """config.json, and all parameters in bf16 with the `tables`; what is the target's is not written."""
    parameters = head.named_parameters()
    tensors = {name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in parameters}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({**tensors, **tables}, folder / WEIGHTS, {"format": "pt"})
    known = {**config, "dtype": "bfloat16", "transformers_version": transformers.__version__}
    write_json(folder / "config.json", known)


def refuse_other_form(start: str, config: Eagle3Config, vocab: int) -> None:
    """Raises InvalidParameter where `start` is no head of this form, ModelError where it is damaged."""
    folder = locate(start)
    if not all((folder / name).is_file() for name in ("config.json", WEIGHTS)):
        raise InvalidParameter("start", str(start), f"must be a folder with config.json and {WEIGHTS}")
    stored = read_config(folder)
    parameters_by_dtype(folder / WEIGHTS)
    for name, value in {**form_of(config), "draft_vocab_size": vocab}.items():
        if stored.get(name) != value:
            reason = f"{name} is {stored.get(name)} there and {value} here: give that head's settings"
            raise InvalidParameter("start", str(start), reason)


def config_of(settings: HeadSettings, teacher: Teacher) -> Eagle3Config:
    return Eagle3Config(
        **network_sizes(settings, teacher),
        norm_before_residual=settings.norm_before_residual,
        norm_before_fc=settings.norm_all,
        fc_norm=settings.fc_norm,
        norm_output=settings.norm_output,
        tap_ids=tuple(tap + 1 for tap in teacher.taps),
        after=False,  # the format numbers the inputs of layers
        speculative_tokens=settings.ttt,
        verifier=tuple(teacher.model.config.architectures or ()),
        names={"lm_head.weight": "lm_head.weight"},
    )


def network_sizes(settings: HeadSettings, teacher: Teacher) -> dict[str, Any]:
    """Fields of `DrafterConfig`; numbers that are not set are the target's. Raises InvalidParameter."""
    config = teacher.config
    heads, kv_heads = attention_heads(settings.heads, settings.kv_heads, config)
    rope = getattr(config, "rope_parameters", None) or {}
    intermediate = settings.intermediate or getattr(config, "intermediate_size", None) or 4 * teacher.width
    return {
        "hidden": teacher.width,
        "target_hidden": teacher.width,
        "taps": len(teacher.taps),
        "layers": settings.layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": getattr(config, "head_dim", None) or teacher.width // config.num_attention_heads,
        "intermediate": intermediate,
        "vocab_size": teacher.vocab_size,
        "draft_vocab_size": len(teacher.used),
        "eps": getattr(config, "rms_norm_eps", 1e-6),
        "rope": {"rope_type": "default", "rope_theta": float(rope.get("rope_theta") or 10_000.0)},
        "windows": (None,) * settings.layers,
        "max_context": getattr(config, "max_position_embeddings", 2048),
    }


def form_of(config: Eagle3Config) -> dict[str, Any]:
    """What the format says of a head beside its layers."""
    return {
        "eagle_aux_hidden_state_layer_ids": list(config.tap_ids or ()),
        "draft_vocab_size": config.draft_vocab_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
    }


def speculators_config(config: Eagle3Config, target: str) -> dict[str, Any]:
    """The config.json of a head."""
    layer = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden,
        intermediate_size=config.intermediate,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        rms_norm_eps=config.eps,
        rope_parameters=dict(config.rope),
        tie_word_embeddings=False,
    )
    drafts = {
        "speculative_tokens": config.speculative_tokens,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", **drafts}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target, "architectures": list(config.verifier)},
        },
        "transformer_layer_config": layer.to_diff_dict()
        | {"model_type": "llama", "num_hidden_layers": config.layers},
        "target_hidden_size": config.target_hidden,
        "embed_requires_grad": False,
        **form_of(config),
    }


def most_used(rows: DocumentRows, count: int | None, teacher: Teacher) -> torch.Tensor:
    """The `count` tokens with the largest loss weight, in rising order [Vd]; None: all tokens."""
    if count is None:
        return torch.arange(teacher.vocab_size)
    counts = np.zeros(teacher.vocab_size)
    np.add.at(counts, rows.ids[:, 1:].ravel(), rows.weights[:, :-1].ravel())
    if teacher.head.weight.shape[0] != teacher.vocab_size:
        raise UnsupportedModel("the target's head and embedding have different numbers of tokens")
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]))
