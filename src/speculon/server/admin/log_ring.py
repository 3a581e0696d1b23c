"""The latest lines of the log, in memory."""

from __future__ import annotations

import logging
from collections import deque

from speculon.logs import LogFormatter

LINES = 1000


class LogRing(logging.Handler):
    """Keeps the latest `LINES` lines, as the log on stderr has them: no text of a request."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(message)s"))
        self._lines: deque[tuple[int, str]] = deque(maxlen=LINES)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        self._count += 1
        self._lines.append((self._count, self.format(record)))

    def since(self, number: int) -> list[tuple[int, str]]:
        """(number, line) of the lines after this number, oldest first."""
        return [line for line in self._lines.copy() if line[0] > number]
