"""What a run says: a progress bar on a terminal, lines elsewhere, and a JSON log."""

import json
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn


class Report:
    """The voice of one worker; all but the first are quiet."""

    def __init__(self, log: Path, quiet: bool) -> None:
        self.log_path, self.quiet = log, quiet
        self.losses: list[float] = []
        self.tokens, self.since = 0, time.monotonic()
        self.bar: Progress | None = None
        console = Console(soft_wrap=True)
        self.console = console
        if console.is_terminal and not quiet:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeElapsedColumn(),
            )
            self.bar = Progress(*columns, console=console)
            self.task = self.bar.add_task("loss ...", total=1.0)
            self.bar.start()

    def say(self, text: str) -> None:
        """One line for the reader."""
        if not self.quiet:
            self.console.print(text, highlight=False)

    def step(self, progress: float, loss: float, tokens: int) -> None:
        """Note one training step."""
        self.losses.append(loss)
        self.tokens += tokens
        if self.bar:
            self.bar.update(self.task, completed=progress, description=f"loss {loss:.3f}")

    def interval(self, **values: float) -> None:
        """Log mean loss and tokens per second since the last call, with `values`."""
        now = time.monotonic()
        loss, speed = sum(self.losses) / len(self.losses), round(self.tokens / (now - self.since))
        self.log(**values, loss=loss, tokens_per_second=speed)
        self.losses, self.tokens, self.since = [], 0, now

    def log(self, **values: object) -> None:
        """One line for the reader and one for the log file."""
        if self.quiet:
            return
        with self.log_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(values) + "\n")
        self.say("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items()))
