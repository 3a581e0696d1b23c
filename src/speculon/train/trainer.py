"""The trainer of a run: batches, optimizer, learning rate, checkpoints, log, measurements; whatever is
trained.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from speculon.errors import ConfigError
from speculon.train.dataset import Dataset
from speculon.train.progress import Advance
from speculon.train.record import whole_lines
from speculon.train.settings import TrainSettings
from speculon.train.teacher import Batch

FREE = frozenset(
    {"out", "work", "steps", "minutes", "cache_gb", "save_minutes", "eval_prompts", "eval_tokens"}
)
ROWS = "rows_hash"  # known last: the target may have to write them
FIRST, LAST = 20, 50  # losses that are kept for the record: of the first steps and of the last ones
# drafter-scale AdamW at 1e-4 is usual for 4096 wide heads
REFERENCE_WIDTH, REFERENCE_LR, MOST_LR = 4096, 1e-4, 2e-3


class Drafter(Protocol):
    """What is trained: a module whose steps guess one token further each."""

    def loss(self, batch: Batch) -> Tensor: ...
    def guesses(self, batch: Batch) -> Tensor: ...  # bool [steps, M], at the positions that count


class Trainer:
    """One run of one drafter. What it needs to go on lies in `settings.folder`."""

    def __init__(self, settings: TrainSettings, drafter: Any, dataset: Dataset, held: Dataset | None):
        self.settings, self.drafter, self.dataset, self.held = settings, drafter, dataset, held
        self.optimizers = OPTIMIZERS[settings.optimizer](drafter, settings, dataset.teacher.width)
        self.step, self.elapsed = 0, 0.0
        self.losses: list[float] = []
        self.measured: dict[str, Any] = {}
        self.folder = settings.folder
        self.checkpoint = self.folder / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self._resume()

    @property
    def progress(self) -> float:
        """Share of the run that is done."""
        minutes = self.settings.minutes
        return self.step / self.settings.steps if minutes is None else self.elapsed / 60 / minutes

    def run(self, advance: Advance) -> bool:
        """Trains to the end; False where somebody asked it to stop before. Either way all is saved."""
        saved, file = time.monotonic(), self.folder / "log.jsonl"
        whole_lines(file)
        with asked_to_stop() as asked, file.open("a", encoding="utf-8") as log:
            while self.progress < 1 and not asked:
                began = time.monotonic()
                entry = self._step()
                if self.held is not None and self.step % self.settings.eval_every == 0:
                    entry |= self.measure()
                self.elapsed += time.monotonic() - began
                log.write(json.dumps(entry) + "\n")
                log.flush()
                advance(self.progress, entry)
                if time.monotonic() - saved > 60 * self.settings.save_minutes:
                    self.save()
                    saved = time.monotonic()
            if self.held is not None and self.progress >= 1:
                log.write(json.dumps({"step": self.step} | self.measure()) + "\n")
        self.save()
        return self.progress >= 1

    def _step(self) -> dict[str, Any]:
        settings = self.settings
        rate = schedule(self.progress, settings.warmup)
        chosen = self.dataset.rows.chosen(settings.seed, self.step, settings.rows)
        batch = self.dataset.batch(chosen)
        with self.dataset.teacher.autocast():
            loss = self.drafter.loss(batch)
        loss.backward()
        nn.utils.clip_grad_norm_(self.drafter.parameters(), settings.clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * rate
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.losses = [*self.losses[:FIRST], *self.losses[FIRST:][1 - LAST :], loss.item()]
        return {
            "step": self.step,
            "loss": self.losses[-1],
            "rate": round(rate, 6),
            "batch": self.dataset.rows.hash(chosen),
        }

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """On held-out rows, where something counts: share of right guesses at each step, and of steps with
        all before right.
        """
        assert self.held is not None
        right: list[Tensor] = []
        for first in range(0, len(self.held.rows), self.settings.rows):
            batch = self.held.batch(range(len(self.held.rows))[first : first + self.settings.rows])
            with self.dataset.teacher.autocast():
                right.append(self.drafter.guesses(batch).cpu())  # [steps, M]
        all_right = torch.cat(right, -1)
        if not all_right.numel():
            return {}
        chain = all_right.cumprod(0).float().mean(-1)
        self.measured = {
            "accuracy": [round(value, 4) for value in all_right.float().mean(-1).tolist()],
            "accuracy_full": [round(value, 4) for value in chain.tolist()],
            "expected_accepted": round(chain.sum().item(), 3),
        }
        return self.measured

    def save(self) -> None:
        """Replaces the checkpoint at once, so that a killed run finds the old one or the new one."""
        tensors = {
            f"model/{name}": value.detach().contiguous() for name, value in self.drafter.named_parameters()
        }
        for name, parameter in self.drafter.named_parameters():
            for optimizer in self.optimizers:
                tensors |= {
                    f"optim/{key}/{name}": torch.as_tensor(v)
                    for key, v in optimizer.state.get(parameter, {}).items()
                }
        facts = {"step": self.step, "elapsed": self.elapsed, "losses": self.losses, "measured": self.measured}
        temporary = self.checkpoint.with_suffix(".tmp")
        save_file(tensors, temporary, {"facts": json.dumps(facts)})
        temporary.replace(self.checkpoint)

    def _resume(self) -> None:
        parameters = dict(self.drafter.named_parameters())
        owner = {p: o for o in self.optimizers for group in o.param_groups for p in group["params"]}
        with safe_open(self.checkpoint, "pt") as file, torch.no_grad():
            for name in file.keys():
                kind, _, rest = name.partition("/")
                if kind == "model":
                    parameters[rest].copy_(file.get_tensor(name))
                else:
                    key, _, of = rest.partition("/")
                    owner[parameters[of]].state[parameters[of]][key] = file.get_tensor(name).to(
                        parameters[of].device
                    )
            facts = json.loads(file.metadata()["facts"])
        self.step, self.elapsed, self.losses, self.measured = (
            facts[k] for k in ("step", "elapsed", "losses", "measured")
        )


def same_run(settings: TrainSettings, identity: Mapping[str, Any]) -> None:
    """Raises ConfigError where the work folder holds a run of other settings or data; `identity` is what else
    it is known by.

    Asked once before anything is written there, and again when its rows are known.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    file = settings.folder / "run.json"
    now = {
        name: value for name, value in settings.model_dump(mode="json").items() if name not in FREE
    } | dict(identity)
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in {**now, **before} if before else ():
        if before.get(name) != now.get(name) and not (
            name == ROWS and None in (before.get(name), now.get(name))
        ):
            was = f"{name} = {before.get(name)!r}, now {now.get(name)!r}"
            raise ConfigError(
                f"{settings.folder} holds a run with {was}: name another work folder, or delete it"
            )
    if before.keys() != before.keys() | now.keys():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)


def schedule(progress: float, warmup: float) -> float:
    """Share of the peak rate: rises in a line, then falls along a cosine to a hundredth."""
    if progress < warmup:
        return max(progress, 1e-3) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


def grouped(parameters: list[nn.Parameter], rate: float, decay: float) -> list[dict[str, Any]]:
    matrices, others = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    made = [
        {"params": matrices, "weight_decay": decay, "peak": rate},
        {"params": others, "weight_decay": 0.0, "peak": rate},
    ]
    return [group for group in made if group["params"]]


def adamw(drafter: nn.Module, settings: TrainSettings, width: int) -> list[torch.optim.Optimizer]:
    rate = settings.lr or min(MOST_LR, REFERENCE_LR * REFERENCE_WIDTH / width)
    groups = grouped([p for p in drafter.parameters() if p.requires_grad], rate, settings.weight_decay)
    return [torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]


def muon(drafter: nn.Module, settings: TrainSettings, width: int) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the layers, AdamW for embeddings, scores and norms."""
    if not hasattr(torch.optim, "Muon"):
        raise ConfigError(f"optimizer = 'muon': PyTorch has it from 2.9 on, this is {torch.__version__}")
    named = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    inner = [
        p
        for name, p in named.items()
        if p.ndim == 2 and not any(word in name for word in ("lm_head", "embed"))
    ]
    ours = {id(p) for p in inner}
    rate = settings.lr or min(MOST_LR, REFERENCE_LR * REFERENCE_WIDTH / width)
    rest = grouped([p for p in named.values() if id(p) not in ours], rate, settings.weight_decay)
    matrices = [{"params": inner, "peak": settings.muon_lr, "weight_decay": settings.weight_decay}]
    return [
        torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, betas=(0.9, 0.95), fused=True),
    ]


OPTIMIZERS: Mapping[str, Callable[[nn.Module, TrainSettings, int], list[torch.optim.Optimizer]]] = {
    "adamw": adamw,
    "muon": muon,
}


@contextmanager
def asked_to_stop() -> Iterator[list[int]]:
    """A list that is empty until SIGINT or SIGTERM comes; the second one is obeyed at once."""
    asked: list[int] = []

    def note(number: int, frame: object) -> None:
        asked.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, note)
    except ValueError:
        pass  # not in the main thread: whoever runs it there ends it there
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
