"""The latest lines of the log, in memory."""

from __future__ import annotations

import logging
from collections import deque

from speculon.core.errors import InvalidParameter
from speculon.operations.admin.schemas import LogLine

MOST_LINES = 1000
MOST_CHARACTERS = 2000  # of a line


class LogRing(logging.Handler):
    """Keeps the latest records of the logger `speculon`; their texts are those of the log itself."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: deque[LogLine] = deque(maxlen=MOST_LINES)
        self._count = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            text = record.getMessage()[:MOST_CHARACTERS]
        except Exception:
            return self.handleError(record)
        self._count += 1
        line = {"time": record.created, "level": record.levelname, "logger": record.name, "text": text}
        self._lines.append(LogLine(number=self._count, **line))

    def latest(self, lines: int) -> list[LogLine]:
        """The oldest first. Raises `InvalidParameter`."""
        if not 1 <= lines <= MOST_LINES:
            raise InvalidParameter("lines", lines, f"from 1 to {MOST_LINES}")
        return list(self._lines)[-lines:]

    def since(self, number: int) -> list[LogLine]:
        """The lines after this number, the oldest first."""
        return [line for line in self._lines.copy() if line.number > number]
