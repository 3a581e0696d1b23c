"""lm-eval: choices by their log-probabilities, over `/v1/completions`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from ..conftest import by_server

HERE = Path(__file__).resolve().parent
MODEL = "smollm2"
COPY = "from speculon.checkpoints.reading import load_tokenizer as load; load({!r}).save_pretrained({!r})"


@pytest.fixture(scope="module")
def samples(smollm2_url: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the harness recorded of each question."""
    out = tmp_path_factory.mktemp("harness")
    tokenizer = out / "tokenizer"  # that the harness counts tokens with
    by_server(COPY.format(MODEL, str(tokenizer)))
    model = f"base_url={smollm2_url}/completions,model={MODEL},tokenizer={tokenizer},num_concurrent=2"
    command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "choices", "--include_path", ".", "--output_path", str(out), "--log_samples"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out / "cache")}
    done = subprocess.run(command, cwd=HERE, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (file,) = out.glob("*/samples_choices_*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_choices_are_judged(samples: list[dict[str, Any]]) -> None:
    assert [sample["acc"] for sample in samples] == [1.0, 1.0, 1.0]


def test_its_log_probabilities_are_those_of_the_server(
    samples: list[dict[str, Any]], smollm2_url: str
) -> None:
    for sample in samples:
        arguments = sample["arguments"].values()
        for argument, ((found, _),) in zip(arguments, sample["resps"], strict=True):
            context, choice = argument["arg_0"], argument["arg_1"]
            assert float(found) == pytest.approx(log_probability(smollm2_url, context, choice), abs=1e-3)


def log_probability(base_url: str, context: str, choice: str) -> float:
    """Of a choice after its context, in the tokens that the harness sends: those of both behind its own."""
    ids = tokens(base_url, context)
    prompt = [*ids, *tokens(base_url, context + choice)[len(ids) :]]
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 0, "logprobs": 0, "echo": True}
    (answer,) = post(base_url + "/completions", body)["choices"]
    return sum(answer["logprobs"]["token_logprobs"][len(ids) :])


def tokens(base_url: str, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    found: list[int] = post(base_url.removesuffix("/v1") + "/tokenize", body)["tokens"]
    return found


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as response:
        return json.load(response)
