"""The training loop: batches, learning rate, checkpoints, log and measurements, for any drafter."""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from speculon.core.errors import ConfigError
from speculon.runtimes.torch.loading.load import pick_dtype
from speculon.train.record import ReportStep, whole_lines
from speculon.train.settings import TrainSettings
from speculon.train.teacher import Dataset

FREE = {"out", "work", "steps", "minutes", "cache_gb", "save_minutes", "eval_prompts", "eval_tokens"}
ROWS = "rows_hash"  # known last: the target may write the rows first
FIRST, LAST = 20, 50  # losses kept for the record: those of the first steps and of the last
# AdamW at 1e-4 is usual for heads of width 4096
REFERENCE_WIDTH, REFERENCE_LR, MAX_LR = 4096, 1e-4, 2e-3
OUTER = ("lm_head", "embed")  # matrices that Muon does not suit


class Trainer:
    """One training run. Its checkpoint and log are in `settings.folder`.

    The drafter is a module with `loss(batch)`, and `correct(batch)`: bool [steps, M], at weighted positions.
    """

    def __init__(self, settings: TrainSettings, drafter: Any, dataset: Dataset, held: Dataset | None):
        self.settings, self.drafter, self.dataset, self.held = settings, drafter, dataset, held
        self.optimizers = optimizers_of(drafter, settings, dataset.teacher.width)
        self.step, self.elapsed = 0, 0.0
        self.losses: list[float] = []
        self.measured: dict[str, Any] = {}
        self.folder = settings.folder
        self.checkpoint = self.folder / "checkpoint.safetensors"
        if self.checkpoint.exists():
            self._resume()

    @property
    def progress(self) -> float:
        """Share of the run that is done, of the limit that ends it first."""
        return max(self._shares.values())

    @property
    def nearest_limit(self) -> str:
        """`steps` or `minutes`: which of them ends the run first, as far as it is known by now."""
        return max(self._shares, key=self._shares.__getitem__)

    @property
    def _shares(self) -> dict[str, float]:
        done = {"steps": self.step, "minutes": self.elapsed / 60}
        return {name: done[name] / most for name, most in self.settings.limits.items()}

    def run(self, advance: ReportStep) -> bool:
        """Trains and saves; False where a signal stopped it before the end."""
        saved, file = time.monotonic(), self.folder / "log.jsonl"
        whole_lines(file)
        with stop_signals() as received, file.open("a", encoding="utf-8") as log:
            while self.progress < 1 and not received:
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
        """On held-out rows: accuracy of each step, and the share with all steps up to it correct."""
        assert self.held is not None
        correct: list[Tensor] = []
        for first in range(0, len(self.held.rows), self.settings.rows):
            batch = self.held.batch(range(len(self.held.rows))[first : first + self.settings.rows])
            with self.dataset.teacher.autocast():
                correct.append(self.drafter.correct(batch).cpu())  # [steps, M]
        steps = torch.cat(correct, -1)
        if not steps.numel():
            return {}
        chain = steps.cumprod(0).float().mean(-1)
        self.measured = {
            "accuracy": [round(value, 4) for value in steps.float().mean(-1).tolist()],
            "accuracy_full": [round(value, 4) for value in chain.tolist()],
            "expected_accepted": round(chain.sum().item(), 3),
        }
        return self.measured

    def save(self) -> None:
        """Replaces the checkpoint atomically, so that a killed run finds the old one or the new one."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self.drafter.named_parameters():
            tensors[f"model/{name}"] = parameter.detach().contiguous()
            for optimizer in self.optimizers:
                for key, value in optimizer.state.get(parameter, {}).items():
                    tensors[f"optim/{key}/{name}"] = torch.as_tensor(value)
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
                    parameter = parameters[of]
                    owner[parameter].state[parameter][key] = file.get_tensor(name).to(parameter.device)
            facts = json.loads(file.metadata()["facts"])
        self.step, self.elapsed = facts["step"], facts["elapsed"]
        self.losses, self.measured = facts["losses"], facts["measured"]


def refuse_other_run(settings: TrainSettings, identity: Mapping[str, Any]) -> None:
    """Raises ConfigError where the work folder holds a run with other settings or another `identity`.

    Called before anything is written there, and again when the hash of the rows is known.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    file = settings.folder / "run.json"
    now = {**settings.model_dump(mode="json", exclude=FREE), **identity}
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for name in {**now, **before} if before else ():
        was, value = before.get(name), now.get(name)
        unknown_yet = name == ROWS and None in (was, value)
        if was != value and not unknown_yet:
            other = f"{name} = {was!r}, now {value!r}"
            raise ConfigError(
                f"{settings.folder} holds a run with {other}: name another work folder, or delete this one"
            )
    if before.keys() != before.keys() | now.keys():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        temporary.replace(file)


def schedule(progress: float, warmup: float) -> float:
    """Share of the peak rate: a linear warm-up, then a cosine down to a hundredth."""
    if progress < warmup:
        return max(progress, 1e-3) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, (progress - warmup) / (1 - warmup))))


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """A list that gets the first SIGINT or SIGTERM; the second one has its usual effect."""
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        received.append(number)
        signal.signal(number, before[number])

    before: dict[int, Any] = {}
    try:
        for each in (signal.SIGINT, signal.SIGTERM):
            before[each] = signal.signal(each, note)
    except ValueError:
        pass  # not in the main thread, which alone receives signals
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def optimizers_of(module: nn.Module, settings: TrainSettings, width: int) -> list[torch.optim.Optimizer]:
    """AdamW for everything; or Muon for the matrices inside the layers, and AdamW for the rest."""
    named = {name: p for name, p in module.named_parameters() if p.requires_grad}
    optimizers: list[torch.optim.Optimizer] = []
    if settings.optimizer == "muon":
        if not hasattr(torch.optim, "Muon"):
            raise ConfigError(f"optimizer = 'muon': PyTorch has it from 2.9 on, this is {torch.__version__}")
        suited = {n: p for n, p in named.items() if p.ndim == 2 and not any(word in n for word in OUTER)}
        inner = [named.pop(name) for name in suited]
        group = {"params": inner, "peak": settings.muon_lr, "weight_decay": settings.weight_decay}
        native = pick_dtype("auto", "bfloat16", inner[0].device) is torch.bfloat16
        muon = torch.optim.Muon if native else in_fp32(torch.optim.Muon)
        optimizers.append(muon([group], adjust_lr_fn="match_rms_adamw"))
    rate = settings.lr or min(MAX_LR, REFERENCE_LR * REFERENCE_WIDTH / width)
    matrices, vectors = ([p for p in named.values() if (p.ndim > 1) is wide] for wide in (True, False))
    groups = [
        {"params": some, "weight_decay": decay, "peak": rate}
        for some, decay in ((matrices, settings.weight_decay), (vectors, 0.0))
        if some
    ]
    return [*optimizers, torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)]


def in_fp32(optimizer: type[torch.optim.Optimizer]) -> Any:
    """Muon with fp32 products: in emulated bf16 they took 72 % of a training step (AMD EPYC, AVX2)."""

    class Fp32Optimizer(optimizer):  # type: ignore[valid-type, misc]
        def step(self, closure: Any = None) -> Any:
            with Fp32ForBf16():
                return super().step(closure)

    return Fp32Optimizer


class Fp32ForBf16(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (Tensor.float if func is Tensor.bfloat16 else func)(*args, **(kwargs or {}))
