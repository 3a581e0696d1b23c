"""What a server has learned is there after a restart, and what was deleted is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.server.outside import REAL, started
from tests.server.test_pools import check_kept
from tests.tiny.checkpoint import write_checkpoint

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]


def test_answers_outlive_the_server_and_can_be_deleted_for_good(tmp_path: Path) -> None:
    """The second server is killed: deletion does not wait for its end."""
    model, folder = write_checkpoint(tmp_path / "model"), tmp_path / "state"
    arguments = (
        *("--model", str(model), "--served-model-name", "demo", "--threads", "1", "--state", str(folder)),
        *("--policy", "goodput", "--no-warmup", "--method", "suffix"),
    )

    @contextmanager
    def serve(name: str) -> Iterator[str]:
        with started(tmp_path / name, *arguments, program=REAL) as server:
            yield server.ready()
            if name == "first":
                assert server.end() == 0, server.stderr

    check_kept(folder, serve)
    (pools,) = folder.glob("pools-*")
    assert len(pools.read_text().splitlines()) == 3
