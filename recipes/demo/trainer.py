"""The training loop: stages of growing depth, two worker processes, checkpoints, validation."""

import argparse
import json
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import torch
import torch.distributed as dist
from data import Corpus, Stream, edit_probe, held_out_tokens, load_tokenizer
from evaluate import count_exact, loss_sum
from export import export_model
from manifest import manifest
from model import ModelConfig, TrainableQwen3
from optim import export_state, grow, import_state, make_optimizers
from report import Report
from safetensors.torch import load_file, save_file


@dataclass(frozen=True)
class Stage:
    """From a share of the run on: how deep the model is, and rows and length of a batch."""

    start: float
    layers: int
    rows: int
    length: int

    @property
    def chunk(self) -> int:
        """Rows of the pieces a batch is cut into: about two thousand tokens."""
        return max(1, 2048 // self.length)


def parse_stages(text: str) -> list[Stage]:
    """`START:LAYERSxROWSxLENGTH`, separated by commas."""
    stages = []
    for part in text.split(","):
        start, shape = part.split(":")
        layers, rows, length = (int(number) for number in shape.split("x"))
        stages.append(Stage(float(start), layers, rows, length))
    return stages


class Trainer:
    """One worker of the run; every worker holds the whole model and computes its share of each batch."""

    def __init__(self, args: argparse.Namespace, rank: int, tickets: Synchronized) -> None:
        self.args, self.rank = args, rank
        self.tickets, self.next_ticket = tickets, 0
        self.report = Report(args.work / "log.jsonl", quiet=rank > 0)
        self.tokenizer = load_tokenizer(args.work, args.stdlib)
        self.stages = parse_stages(args.stages)
        self.data = Corpus(args.stdlib, self.tokenizer, args.work / "corpus.json")
        self.held_out = held_out_tokens(args.stdlib, self.tokenizer)
        self.probe = edit_probe(args.stdlib, self.tokenizer, args.probe, seed=0)
        self.report.say(
            f"{len(self.data.files)} files, {self.data.tokens / 1e6:.2f} M tokens, "
            f"{len(self.data.snippets)} functions, {len(self.held_out)} held-out tokens"
        )
        self.step, self.tokens, self.elapsed, self.stopping = 0, 0, 0.0, False
        self.checkpoint_path: Path = args.work / "checkpoint.safetensors"
        if self.checkpoint_path.exists():
            self._resume()
        else:
            self._build(self.stages[0].layers)
            self.stream = Stream(self.data, args.seed)

    def _build(self, layers: int) -> None:
        torch.manual_seed(self.args.seed)
        self.model = TrainableQwen3(ModelConfig(num_hidden_layers=layers))
        self.optimizers = make_optimizers(self.model)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for layer in self.model.model.layers:
            layer.compile(dynamic=False)

    def _resume(self) -> None:
        tensors = load_file(self.checkpoint_path)
        meta = json.loads(bytes(tensors.pop("meta").tolist()))
        self._build(meta["layers"])
        import_state(self.model, self.optimizers, tensors)
        self.step, self.tokens, self.elapsed = meta["step"], meta["tokens"], meta["elapsed"]
        self.stream = Stream(self.data, self.args.seed, **meta["stream"])
        self.report.say(f"resumed at step {self.step}, {self.tokens / 1e6:.2f} M tokens")

    def checkpoint(self) -> None:
        """Write everything a resumed run needs, replacing the last checkpoint at once."""
        meta = {
            "step": self.step,
            "tokens": self.tokens,
            "elapsed": self.elapsed,
            "layers": self.model.config.num_hidden_layers,
            "stream": self.stream.state(),
        }
        tensors = export_state(self.model, self.optimizers)
        tensors["meta"] = torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
        temporary = self.checkpoint_path.with_suffix(".tmp")
        save_file(tensors, temporary)
        temporary.replace(self.checkpoint_path)

    def progress(self) -> float:
        """Share of the run that is done, by tokens or time; `plan.json` in the work folder sets the end."""
        minutes, plan = self.args.minutes, self.args.work / "plan.json"
        if plan.exists():
            minutes = float(json.loads(plan.read_text())["minutes"])
        done = self.tokens / self.args.tokens if self.args.tokens else self.elapsed / 60 / minutes
        return min(done, 1.0)

    def set_rates(self, progress: float) -> float:
        """Warm up, hold, then go down in a line to nearly nothing; returns the share of the full rate."""
        scale = min(1.0, (self.step + 1) / self.args.warmup)
        if progress > self.args.decay_from:
            scale *= max(0.01, (1 - progress) / (1 - self.args.decay_from))
        for optimizer, rate in zip(self.optimizers, (self.args.muon_lr, self.args.adam_lr), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * scale
        return scale

    def train_step(self, stage: Stage) -> float:
        """One optimizer step; every worker takes chunks of the batch until none is left.

        Returns the mean loss.
        """
        batch = self.stream.batch(stage.rows, stage.length)
        ids, weights = (torch.from_numpy(array).split(stage.chunk) for array in batch)
        total, last = 0.0, self.next_ticket + len(ids)
        while (ticket := self._take_ticket()) < last:
            index = ticket - self.next_ticket
            with torch.autocast("cpu", torch.bfloat16):
                loss = self.model(ids[index].long(), weights[index]) / len(ids)
            loss.backward()
            total += loss.item()
        self.next_ticket = last + self.args.workers  # every worker drew one ticket too many
        total = self._sum_gradients(total)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
        for parameter in self.model.parameters():
            parameter.grad.zero_()
        self.step += 1
        self.tokens += stage.rows * stage.length
        return total

    def _take_ticket(self) -> int:
        """The number of the next free chunk; a worker slowed down by other processes takes fewer."""
        with self.tickets.get_lock():
            self.tickets.value += 1
            return self.tickets.value - 1

    def _sum_gradients(self, loss: float) -> float:
        """Replace every gradient by its sum over the workers; returns the sum of the losses."""
        if self.args.workers == 1:
            return loss
        gradients = [parameter.grad for parameter in self.model.parameters()]
        flat = torch.cat([torch.tensor([loss]), *(gradient.flatten() for gradient in gradients)])
        dist.all_reduce(flat)
        parts = flat.split([1, *(gradient.numel() for gradient in gradients)])
        for gradient, part in zip(gradients, parts[1:], strict=True):
            gradient.copy_(part.view_as(gradient))
        return float(parts[0])

    def _sum(self, values: Iterable[float]) -> list[float]:
        """The sum of each value over the workers."""
        totals = torch.tensor(list(values), dtype=torch.float64)
        if self.args.workers > 1:
            dist.all_reduce(totals)
        return totals.tolist()

    def validate(self, windows: int, length: int = 512) -> float:
        """Mean loss over windows spread evenly over the held-out files."""
        starts = torch.linspace(0, len(self.held_out) - length - 1, windows).long().tolist()
        mine = loss_sum(self.model, self.held_out, starts[self.rank :: self.args.workers], length)
        return self._sum([mine])[0] / windows

    def edit_exactness(self) -> tuple[float, float]:
        """Share of exact answers to held-out edit prompts, and share of right answer tokens."""
        exact, right = self._sum(count_exact(self.model, self.probe[self.rank :: self.args.workers]))
        return exact / len(self.probe), right / sum(len(answer) for _, answer in self.probe)

    def stop(self, *_: object) -> None:
        """Ask the run to write a checkpoint and leave."""
        self.stopping = True

    def run(self) -> None:
        """Train until the end of the plan or a signal."""
        signal.signal(signal.SIGTERM, self.stop)
        signal.signal(signal.SIGINT, self.stop)
        started = saved = exported = time.monotonic()
        while True:
            stopping, progress = self._sum([self.stopping, self.progress() / self.args.workers])
            if stopping or progress >= 1:
                break
            stage = [item for item in self.stages if item.start <= progress or item is self.stages[0]][-1]
            if stage.layers > self.model.config.num_hidden_layers:
                self.grow(stage.layers)
            scale = self.set_rates(progress)
            self.report.step(progress, self.train_step(stage), stage.rows * stage.length)
            if self.step % self.args.log_every == 0:
                self.report.interval(
                    step=self.step,
                    tokens=self.tokens,
                    minutes=round(self.elapsed / 60, 2),
                    done=progress,
                    rate=scale,
                    layers=stage.layers,
                    length=stage.length,
                )
            if self.step % self.args.eval_every == 0:
                exact, right = self.edit_exactness()
                self.report.log(
                    step=self.step, val_loss=self.validate(32), edit_exact=exact, edit_tokens=right
                )
            now = time.monotonic()
            if now - saved > self.args.save_minutes * 60 and self.rank == 0:
                self.checkpoint()
                saved = now
            if now - exported > self.args.export_minutes * 60 and self.args.snapshot and self.rank == 0:
                export_model(self.model, self.tokenizer, self.args.snapshot)
                exported = now
            started, self.elapsed = time.monotonic(), self.elapsed + time.monotonic() - started
        if self.rank == 0:
            self.checkpoint()
        if not stopping:
            self.finish()

    def grow(self, layers: int) -> None:
        """Continue with a deeper model that starts from the shallow one."""
        before = self.validate(16)
        tensors = grow(
            export_state(self.model, self.optimizers), layers // self.model.config.num_hidden_layers
        )
        self._build(layers)
        import_state(self.model, self.optimizers, tensors)
        self.report.log(step=self.step, grown_to=layers, val_before=before, val_after=self.validate(16))

    def finish(self) -> None:
        """Measure on all held-out files and export with the model card."""
        self.probe = edit_probe(self.args.stdlib, self.tokenizer, self.args.final_probe, seed=1)
        exact, right = self.edit_exactness()
        facts = {
            "val_loss": self.validate(len(self.held_out) // 1024, 1024),
            "edit_prompts": len(self.probe),
            "edit_exact": exact,
            "edit_tokens_right": right,
            "train_tokens": self.tokens,
            "steps": self.step,
            "minutes": round(self.elapsed / 60, 1),
            "ended_by": "tokens" if self.args.tokens else "minutes",
            "stages": self.args.stages,
            "decay_from": self.args.decay_from,
            "seed": self.args.seed,
        }
        self.report.log(**facts)
        if self.rank == 0:
            export_model(
                self.model, self.tokenizer, self.args.out, {**facts, "corpus": manifest(self.args.stdlib)}
            )
