"""What one engine has learned serves the next one like it, and changes no token of a text."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from speculon import LLM, SamplingParams, SpeculativeDecoder
from speculon.core.errors import ConfigError, StateInUse
from speculon.core.types import Reason
from speculon.engine import state as state_module
from speculon.runtimes.torch.loading import load as loading
from tests.tiny.conftest import build
from tests.tiny.folders import make_folder

PROMPT = list(range(20, 40))
PARAMS = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("state") / "model")


def start(folder: Path, state: Path | None, **speculation: Any) -> LLM:
    return LLM(
        str(folder),
        num_blocks=64,
        state=state,
        warmup=False,
        speculation={"policy": "fixed", "method": "suffix", **speculation},
    )


def calls(llm: LLM, text: list[int] | None = None, **speculation: Any) -> int:
    (output,) = llm.generate([PROMPT], PARAMS, speculation=speculation or None)
    assert text is None or output.token_ids == text
    return output.outputs[0].stats.target_calls


def test_the_next_engine_drafts_from_what_the_last_one_wrote(folder: Path, tmp_path: Path) -> None:
    text = start(folder, None, method="off").generate([PROMPT], PARAMS)[0].token_ids
    first = start(folder, tmp_path)
    cold = calls(first, text, pool="me")
    first.close()
    second = start(folder, tmp_path)
    assert (
        second.engine.counters.restored == {"pools": 1, "policies": 1} and second.engine.counters.pools == 1
    )
    assert calls(second, text, pool="you") == cold > 2 * calls(second, text, pool="me")
    assert second.forget_pools("me") == 1 and second.forget_pools("me") == 0
    # while the second one lives: what is deleted is gone from the folder at once
    third = start(folder, shutil.copytree(tmp_path, tmp_path / "copy"))
    assert calls(third, text, pool="me") == cold and third.forget_pools() == 2, "mine, and the other one"
    third.close()
    second.close()
    assert calls(start(folder, None), text) == cold, "without the folder nothing is known"


def test_the_next_engine_knows_what_steps_cost(folder: Path, tmp_path: Path) -> None:
    def cold(llm: LLM) -> int:
        (output,) = llm.generate([PROMPT], PARAMS, speculation={"pool": ""})
        return output.reasons.get(Reason.COLD, 0)

    first = start(folder, tmp_path, policy="goodput")
    assert cold(first) > 0
    first.close()
    second = start(folder, tmp_path, policy="goodput")
    assert second.engine.counters.restored["policies"] == 2 and cold(second) == 0
    second.close()
    other = start(folder, tmp_path, policy="goodput", draft={"draft_model": str(folder)})
    assert cold(other) > 0, "with another drafter nothing is known yet"
    other.close()


def test_another_model_gets_nothing(folder: Path, tmp_path: Path) -> None:
    first = start(folder, tmp_path / "state")
    cold = calls(first)
    first.close()
    with start(make_folder(tmp_path / "other"), tmp_path / "state") as other:
        assert calls(other) == cold
    with start(folder, tmp_path / "state") as again:
        assert calls(again) < cold


def test_two_engines_never_write_one_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "LOCK_SECONDS", 0.1)
    with start(folder, tmp_path):
        with pytest.raises(StateInUse, match=f"state = '{tmp_path}': process {os.getpid()} on .* writes"):
            start(folder, tmp_path)
        with start(make_folder(tmp_path.with_name("other") / "model"), tmp_path):
            pass  # another model has files of its own there
    start(folder, tmp_path).close()


def test_a_folder_in_use_is_refused_before_the_model_loads(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where another process holds it, which the error names; the folder is free once that has ended."""
    monkeypatch.setattr(state_module, "LOCK_SECONDS", 0.1)
    code = "import sys, pathlib\nfrom speculon.engine.state import hold\n"
    code += "lock = hold(pathlib.Path(sys.argv[1]), sys.argv[2])\nprint(flush=True)\ninput()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(folder)], **pipes) as holder:  # type: ignore[call-overload]
        holder.stdout.readline()
        with monkeypatch.context() as patch:
            patch.setattr(loading, "load_target", lambda *_, **__: pytest.fail("it loads"))
            with pytest.raises(StateInUse, match=f"process {holder.pid} on"):
                start(folder, tmp_path)
        holder.kill()
        holder.wait()
        start(folder, tmp_path).close()


def test_a_decoder_keeps_no_state(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state = .*: is kept by LLM and by the server"):
        SpeculativeDecoder(build("llama"), state=tmp_path)


def test_a_folder_that_cannot_be_is_refused_before_the_model_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    monkeypatch.setattr(loading, "load_target", lambda *_, **__: loads.append("target"))
    with pytest.raises(ConfigError, match="state = '/proc/speculon'"):
        start(folder, Path("/proc/speculon"))
    assert loads == []
