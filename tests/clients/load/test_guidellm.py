"""guidellm: a load generator, which asks for usage in every chunk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROMPTS = [
    {"prompt": "def add(a, b):", "output_tokens_count": 16},
    {"prompt": "class Stack:", "output_tokens_count": 12},
    {"prompt": "import os", "output_tokens_count": 7},
]


def run(base_url: str, folder: Path, route: str) -> dict[str, list[dict[str, Any]]]:
    """The requests of a run, by how they ended."""
    data, out = folder / "prompts.jsonl", folder / "report.json"
    data.write_text("".join(json.dumps(one) + "\n" for one in PROMPTS))
    target = base_url.removesuffix("/v1")
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-console"]
    command += ["--backend", f"kind=openai_http,target={target},request_format={route}"]
    command += ["--data", f"kind=json_file,path={data}", "--output", f"kind=json,path={out}"]
    command += ["--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=3"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "cache")}
    done = subprocess.run(command, cwd=folder, env=os.environ | offline, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    requests: dict[str, list[dict[str, Any]]] = json.loads(out.read_text())["benchmarks"][0]["requests"]
    return requests


@pytest.mark.parametrize(
    ("url", "route"), [("base_url", "/v1/completions"), ("smollm2_url", "/v1/chat/completions")]
)
def test_every_request_has_its_tokens(
    request: pytest.FixtureRequest, tmp_path: Path, url: str, route: str
) -> None:
    requests = run(request.getfixturevalue(url), tmp_path, route)
    assert not requests["errored"] and not requests["incomplete"]
    assert sorted(one["output_tokens"] for one in requests["successful"]) == [7, 12, 16]
    for one in requests["successful"]:
        options = json.loads(one["request_args"])["body"]["stream_options"]
        assert options == {"include_usage": True, "continuous_usage_stats": True}
        assert one["prompt_tokens"] > 0 and one["output"]
