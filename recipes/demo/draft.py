"""Distil the demo's draft model from the demo target: `python recipes/demo/draft.py --out FOLDER`.

The target first generates outputs after beginnings of training files. The draft model then learns the
target's distribution on them and on the training stream. Stopped at any time, it resumes with the same
`--work`.
"""

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from data import Corpus, Stream, load_tokenizer, write_atomically
from draft_export import export_draft
from draft_texts import OUTPUT, TEMPERATURES, write_texts
from manifest import manifest
from model import ModelConfig, TrainableQwen3
from optim import export_state, import_state, make_optimizers
from report import Report
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.autograd.function import FunctionCtx

from speculon.measure.bench.corpus import stdlib_root

WRITTEN_SHARE = 0.5  # of the rows of a batch; the others come from the target's own training stream
WRITTEN_WEIGHT = 3.0  # how much more a token that the target wrote itself counts in the loss


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--target", type=Path, required=True, help="folder of the target model")
    add("--out", type=Path, required=True, help="folder of the finished draft")
    add("--work", type=Path, default=Path("build/draft"), help="folder of texts, checkpoint and log")
    add("--stdlib", type=Path, default=stdlib_root(), help="the standard library the target was trained on")
    add("--minutes", type=float, default=40, help="of training")
    add("--texts", type=int, default=3000, help="written by the target to learn from")
    add("--text-tokens", type=int, default=OUTPUT, help="most tokens of such a text")
    add("--temperatures", type=float, nargs="+", default=TEMPERATURES, help="one is drawn for each text")
    add("--windows", type=int, default=3000, help="of the target's training stream to learn from")
    add("--probes", type=int, default=96, help="written after held-out files, to measure on")
    add(
        "--layers",
        type=int,
        default=2,
        help="one layer cannot copy: that takes an attention layer upon another",
    )
    add("--intermediate", type=int, default=768)
    add("--rows", type=int, default=4)
    add("--length", type=int, default=512)
    add(
        "--decay-from",
        type=float,
        default=0.5,
        help="share of the run after which the learning rate goes down",
    )
    add("--muon-lr", type=float, default=1e-2)
    add("--adam-lr", type=float, default=3e-3)
    add("--hard", type=float, default=0.2, help="weight of the target's best token beside its distribution")
    add("--seed", type=int, default=0)
    return parser.parse_args()


class SoftCrossEntropy(torch.autograd.Function):
    """Weighted mean of -sum t log q over logits [N, V]; t mixes p and its best token; gradient (q - t) w."""

    @staticmethod
    def forward(ctx: FunctionCtx, scores: Tensor, teacher: Tensor, weights: Tensor, hard: float) -> Tensor:
        labels = teacher.float().softmax(-1).mul_(1 - hard)
        labels.scatter_add_(1, teacher.argmax(-1, keepdim=True), torch.full((len(teacher), 1), hard))
        log_q = scores.float().log_softmax(-1)
        share = (weights / weights.sum())[:, None]
        ctx.save_for_backward(log_q, labels, share)
        return -(labels * log_q).sum(-1, keepdim=True).mul_(share).sum()

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        log_q, labels, share = ctx.saved_tensors
        return ((log_q.exp() - labels) * (gradient * share)).bfloat16(), None, None, None


class Distiller:
    """Target, draft, and the texts between them."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        args.work.mkdir(parents=True, exist_ok=True)
        self.report = Report(args.work / "log.jsonl", quiet=False)
        if not (args.work / "tokenizer.json").exists():
            write_atomically(args.work / "tokenizer.json", (args.target / "tokenizer.json").read_bytes())
        self.data = Corpus(args.stdlib, load_tokenizer(args.work, args.stdlib), args.work / "corpus.json")
        write_texts(args, self.data, self.report)
        texts = json.loads((args.work / "texts.json").read_bytes())
        self.probes = {name: texts[name] for name in ("greedy", "sampled")}
        self.written = np.concatenate(
            [np.array([*ids, self.data.end], dtype=np.int32) for _, ids in texts["written"]]
        )
        # a row's weight is that of the token after it
        scores = [
            [1.0] * (n - 1) + [WRITTEN_WEIGHT] * (len(ids) - n) + [1.0, 1.0] for n, ids in texts["written"]
        ]
        self.written_weights = np.concatenate([np.array(score, dtype=np.float32) for score in scores])
        torch.manual_seed(args.seed)
        self.teacher = load_teacher(args.target)
        self.drafter = TrainableQwen3(
            replace(self.teacher.config, num_hidden_layers=args.layers, intermediate_size=args.intermediate)
        )
        with torch.no_grad():
            self.drafter.model.embed_tokens.weight.copy_(self.teacher.model.embed_tokens.weight)
            self.drafter.model.norm.weight.copy_(self.teacher.model.norm.weight)
        self.optimizers = make_optimizers(self.drafter)
        self.step, self.tokens, self.elapsed = 0, 0, 0.0
        self.checkpoint_path = args.work / "checkpoint.safetensors"
        if self.checkpoint_path.exists():
            self._resume()
        for layer in (*self.teacher.model.layers, *self.drafter.model.layers):
            layer.compile(dynamic=False)
        self._look_once()

    def _resume(self) -> None:
        tensors = load_file(self.checkpoint_path)
        meta = json.loads(bytes(tensors.pop("meta").tolist()))
        import_state(self.drafter, self.optimizers, tensors)
        self.step, self.tokens, self.elapsed = meta["step"], meta["tokens"], meta["elapsed"]

    def checkpoint(self) -> None:
        """Everything a resumed run needs, replacing the last checkpoint at once."""
        meta = {"step": self.step, "tokens": self.tokens, "elapsed": self.elapsed}
        tensors = export_state(self.drafter, self.optimizers)
        tensors["meta"] = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
        temporary = self.checkpoint_path.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.replace(self.checkpoint_path)

    def _look_once(self) -> None:
        """windows.safetensors: token ids and weights [n, T] and the target's last states [n, T, D]."""
        path = self.args.work / "windows.safetensors"
        if not path.exists():
            length, rows, scores = self.args.length, [], []
            for first in range(0, len(self.written) - length, length):
                rows.append(self.written[first : first + length])
                scores.append(self.written_weights[first : first + length])
            stream = Stream(self.data, self.args.seed + 1)
            for _ in range(self.args.windows):
                rows.append(stream.batch(1, length - 1)[0][0])
                scores.append(np.ones(length, dtype=np.float32))
            ids = torch.from_numpy(np.stack(rows))
            hidden = torch.empty(len(ids), length, self.teacher.config.hidden_size, dtype=torch.bfloat16)
            for first in range(0, len(ids), 4):
                with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                    hidden[first : first + 4] = self.teacher.hidden(ids[first : first + 4].long())
                if first % 400 == 0:
                    self.report.log(windows=first, of=len(ids))
            save_file({"ids": ids, "weights": torch.from_numpy(np.stack(scores)), "hidden": hidden}, path)
        self.windows = load_file(path)
        # the first ones hold what the target wrote
        self.own = int((self.windows["weights"] > 1).any(-1).sum())

    def batch(self) -> tuple[Tensor, Tensor, Tensor]:
        """Ids [rows, T], weights [rows, T] and the target's states [rows, T, D] of random windows."""
        rng = random.Random(f"{self.args.seed}:{self.step}")
        count = len(self.windows["ids"])
        chosen = [
            rng.randrange(self.own) if rng.random() < WRITTEN_SHARE else rng.randrange(self.own, count)
            for _ in range(self.args.rows)
        ]
        return (
            self.windows["ids"][chosen].long(),
            self.windows["weights"][chosen],
            self.windows["hidden"][chosen],
        )

    def train_step(self) -> float:
        """One optimizer step; returns the loss."""
        ids, weights, hidden = self.batch()
        with torch.autocast("cpu", torch.bfloat16):
            labels = self.teacher.logits(hidden).flatten(0, 1)
            scores = self.drafter.logits(self.drafter.hidden(ids)).flatten(0, 1)
        loss = SoftCrossEntropy.apply(scores, labels, weights.flatten(), self.args.hard)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += ids.numel()
        return loss.item()

    def set_rates(self, progress: float) -> None:
        """Warm up, hold, then go down in a line to nothing."""
        scale = min(1.0, (self.step + 1) / 50, max(0.0, (1 - progress) / (1 - self.args.decay_from)))
        for optimizer, rate in zip(self.optimizers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """After held-out files: share of equal best tokens (greedy), mean sum of min(p, q) (sampled)."""
        sums: dict[str, list[float]] = {"greedy": [], "sampled": []}
        with torch.compiler.set_stance("force_eager"), torch.autocast("cpu", torch.bfloat16):
            for name, texts in self.probes.items():
                for prompt, ids in texts:
                    row = torch.tensor([ids[:-1]])
                    p, q = (
                        m.logits(m.hidden(row))[0, prompt - 1 :].float() for m in (self.teacher, self.drafter)
                    )
                    same = (
                        p.argmax(-1) == q.argmax(-1)
                        if name == "greedy"
                        else torch.minimum(p.softmax(-1), q.softmax(-1)).sum(-1)
                    )
                    sums[name] += same.float().tolist()
        return {f"agreement_{name}": sum(values) / len(values) for name, values in sums.items()}

    def run(self) -> None:
        """Train until the time is up, then write the model."""
        saved = time.monotonic()
        while (progress := self.elapsed / 60 / self.args.minutes) < 1:
            began = time.monotonic()
            self.set_rates(progress)
            self.report.step(progress, self.train_step(), self.args.rows * self.args.length)
            if self.step % 50 == 0:
                self.report.interval(step=self.step, tokens=self.tokens, minutes=round(self.elapsed / 60, 2))
            if self.step % 400 == 0:
                self.report.log(step=self.step, **self.measure())
            if time.monotonic() - saved > 120:
                self.checkpoint()
                saved = time.monotonic()
            self.elapsed += time.monotonic() - began
        self.checkpoint()
        options = (
            "texts",
            "windows",
            "intermediate",
            "rows",
            "length",
            "decay_from",
            "muon_lr",
            "adam_lr",
            "hard",
            "seed",
        )
        facts = {
            **self.measure(),
            "train_tokens": self.tokens,
            "written_tokens": int((self.written_weights > 1).sum()),
            "probe_tokens": {
                name: sum(len(ids) - n for n, ids in texts) for name, texts in self.probes.items()
            },
            "steps": self.step,
            "minutes": round(self.elapsed / 60, 1),
            "layers": self.args.layers,
            "options": {name: getattr(self.args, name) for name in options},
            "corpus": manifest(self.args.stdlib),
        }
        self.report.log(**{name: value for name, value in facts.items() if name != "corpus"})
        export_draft(self.drafter, self.args.target, self.args.out, facts)


def load_teacher(folder: Path) -> TrainableQwen3:
    """The target as the recipe's own module."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    known = {name: config[name] for name in ModelConfig.__dataclass_fields__}
    teacher = TrainableQwen3(ModelConfig(**known))
    teacher.load_state_dict(
        {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    )
    return teacher.requires_grad_(False)


if __name__ == "__main__":
    Distiller(parse_arguments()).run()
