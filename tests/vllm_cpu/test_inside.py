"""The plug-in inside vLLM: greedy texts are vLLM's own, drafts are accepted, bad settings end the start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.documents import ROOT

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: make vllm-test"),
    pytest.mark.timeout(900),
]

OURS = {"method": "custom_class", "model": "speculon.speculation.vllm.Proposer", "num_speculative_tokens": 8}
LOOKUP = {"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 5}
ALWAYS = '[speculation]\npolicy = "fixed"\nnum_speculative_tokens = 8\n'
SOURCE = "class Shape:\n    def __init__(self, name, sides):\n        self.name = name\n"
PROMPTS = [
    *(f"# part {i}\n{SOURCE}        self.number = {i}\n\n\n{SOURCE}" for i in range(6)),
    *(f"import os\n\n\ndef read_{name}(path):\n    with open(path) as file:\n" for name in ("all", "some")),
]


def run(settings: str, **how: Any) -> subprocess.CompletedProcess[str]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "speculon.toml").write_text(settings, encoding="utf-8")
        environment = {
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}",
            "PROMETHEUS_MULTIPROC_DIR": folder,
            "SPECULON_CONFIG": f"{folder}/speculon.toml",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tests.vllm_cpu.write", json.dumps({"prompts": PROMPTS, **how})]
        return subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=800
        )


def written(settings: str = "", **how: Any) -> dict[str, Any]:
    done = run(settings, **how)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))


@cache
def plain() -> list[list[int]]:
    return written(drafts=None)["texts"]


@pytest.mark.parametrize(
    ("settings", "more", "accepted"),
    [
        pytest.param("", {}, 1, id="as it comes"),
        pytest.param(ALWAYS, {}, 10, id="in each round"),
        pytest.param(ALWAYS, {"num_gpu_blocks_override": 18, "block_size": 32}, 10, id="preempted"),
        pytest.param(ALWAYS, {"max_num_batched_tokens": 64}, 10, id="prompts in chunks"),
        pytest.param(ALWAYS, {"tensor_parallel_size": 2}, 10, id="tensor parallel"),
    ],
)
def test_greedy_texts_are_those_of_vllm_alone(settings: str, more: dict[str, Any], accepted: int) -> None:
    found = written(settings, drafts=OURS, **more)
    assert found["texts"] == plain()
    counters = found["counters"]
    drafted = counters["speculon_vllm_draft_tokens_total suffix"]
    assert drafted >= counters["speculon_vllm_accepted_tokens_total suffix"] >= accepted


@pytest.mark.parametrize("drafts", [OURS, LOOKUP], ids=["ours", "ngram"])
def test_pipeline_stages_do_not_start_with_any_proposer(drafts: dict[str, Any]) -> None:
    """A fault of vLLM 0.32: where this fails, its stages may work, and docs/vllm.md has to say so."""
    done = run(ALWAYS, drafts=drafts, pipeline_parallel_size=2)
    assert done.returncode != 0
    assert "object has no attribute 'drafter'" in done.stderr


def test_bad_settings_end_the_start() -> None:
    done = run("[speculation]\nnum_speculative_tokens = 9\n", drafts=OURS)
    assert done.returncode != 0
    assert "must be at most 8, with which vLLM was started" in done.stderr
