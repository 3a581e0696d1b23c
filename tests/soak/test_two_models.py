"""Two real models in one server, each with its drafter: at once, beside a crash, and within one memory."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from safetensors.torch import load_file, save_file

from tests.server.outside import PATIENCE, REAL, Outside, started
from tests.server.test_life import Reader, check_clean
from tests.tiny.conftest import build
from tests.tiny.folders import CONTEXT, make_folder

pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="looks processes up in /proc"),
]

OPTIONS = ("--draft", "auto", "--policy", "fixed", "--threads", "1", "--no-warmup", "--max-num-seqs", "8")
ROOM_FOR_TWO = ("--memory-gb", "2.9")
SPECULATION = {"method": "draft_model", "num_speculative_tokens": 1, "stats": True}
LONG = {"max_tokens": 900, "ignore_eos": True, "temperature": 0, "speculation": SPECULATION}


def make_pair(folder: Path, mirrored: bool) -> Path:
    """A target, with a smaller model of the same tokenizer beside it; mirrored, its texts are others."""
    target = make_folder(folder / folder.name)
    tensors = load_file(target / "model.safetensors")
    if mirrored:
        tensors["lm_head.weight"] = tensors["lm_head.weight"].flip(0).contiguous()
        save_file(tensors, target / "model.safetensors", {"format": "pt"})
    settings = {"num_hidden_layers": 1, "max_position_embeddings": CONTEXT, "eos_token_id": 2}
    vocab_size = len(tensors["lm_head.weight"])
    build("llama", seed=3, vocab_size=vocab_size, **settings).save_pretrained(folder / "small")
    for file in target.glob("*token*"):
        shutil.copy(file, folder / "small")
    return target


def complete(url: str, model: str, **body: Any) -> dict[str, Any]:
    payload = {"model": model, "prompt": "def add(", "max_tokens": 24, "temperature": 0, **body}
    response = httpx.post(url + "/v1/completions", json=payload, timeout=90, trust_env=False)
    assert response.status_code == 200, response.text
    return dict(response.json())


def text_of(url: str, model: str) -> str:
    return str(complete(url, model, ignore_eos=True)["choices"][0]["text"])


def states(url: str) -> dict[str, str]:
    cards = httpx.get(url + "/v1/models", timeout=30, trust_env=False).json()["data"]
    return {card["id"]: card["state"] for card in cards}


def written(reader: Reader) -> str:
    return "".join(choice["text"] for line in reader.lines for choice in line.get("choices", ()))


def test_two_models_at_once_a_crash_and_one_memory(tmp_path: Path) -> None:
    left, right = make_pair(tmp_path / "left", False), make_pair(tmp_path / "right", True)
    third = tmp_path / "alone" / "third"
    shutil.copytree(left, third)
    models = [part for path in (left, right, third) for part in ("--model", str(path))]
    with started(tmp_path / "server", *models, *OPTIONS, *ROOM_FOR_TWO, program=REAL) as server:
        url = server.ready()
        texts = {name: text_of(url, name) for name in ("left", "right")}
        assert texts["left"] != texts["right"], "two models"
        whole = complete(url, "right", **LONG)
        assert whole["speculation"]["drafted"] > 0, "the drafter beside it"
        assert states(url) == {"left": "loaded", "right": "loaded", "third": "unloaded"}
        card = httpx.get(url + "/v1/models/right", timeout=30, trust_env=False).json()
        assert card["drafters"] == {"draft_model": str(tmp_path / "right" / "small")}

        undisturbed = complete(url, "left", **LONG)["choices"][0]["text"]
        resumed, other = check_a_crash(server, url)
        for reader in (resumed, other):
            assert (reader.done, reader.fault, reader.finish) == (True, "", "length"), server.stderr
        assert written(resumed) == undisturbed
        assert written(other) == whole["choices"][0]["text"]
        assert text_of(url, "left") == texts["left"], "loaded again"

        assert text_of(url, "third") == texts["left"], "the same weights"
        assert states(url) == {"left": "loaded", "right": "unloaded", "third": "loaded"}
        assert len(server.children()) == 2
        assert text_of(url, "right") == texts["right"]
        assert states(url) == {"left": "unloaded", "right": "loaded", "third": "loaded"}
        check_clean(server)


def check_a_crash(server: Outside, url: str) -> tuple[Reader, Reader]:
    """Kills the process of `left` below two greedy streams; returns both at their end."""
    resumed = Reader(url, model="left", prompt="def add(", **LONG)
    other = Reader(url, model="right", prompt="def add(", **LONG)
    server.wait_for(lambda: resumed.begun() and other.begun())
    os.kill(server.children()[0], signal.SIGKILL)  # the first that was started
    resumed.join(2 * PATIENCE), other.join(PATIENCE)
    assert server.stderr.count("it is started again (restart 1 of") == 1, "while it wrote"
    return resumed, other
