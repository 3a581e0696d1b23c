"""llama.cpp's server, used over HTTP with token ids; it runs as a child and ends with its worker."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

from worker import Answer, Ask, Settings, serve

NGRAM = 3  # the one length of match that its ngram-simple looks for
START_SECONDS, ANSWER_SECONDS = 60, 600


class LlamaServer:
    packages = ()

    def __init__(self, settings: Settings):
        self.address = f"http://127.0.0.1:{free_port()}"
        assert settings.server is not None
        self.pool = ThreadPoolExecutor(settings.texts)
        self.child = subprocess.Popen(
            [settings.server, *flags(settings, self.address)], stdin=subprocess.DEVNULL, stdout=sys.stderr
        )
        try:
            self.wait()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        until = time.monotonic() + START_SECONDS
        while self.child.poll() is None and time.monotonic() < until:
            try:
                urlopen(f"{self.address}/health", timeout=5).close()
                return
            except (URLError, OSError):
                time.sleep(0.1)
        raise RuntimeError(
            f"no server after {START_SECONDS} s"
            if self.child.poll() is None
            else "the server ended; see its log"
        )

    def post(self, prompt: list[int], ask: Ask) -> dict[str, Any]:
        body = {
            "prompt": prompt,
            "n_predict": ask.max_tokens,
            "temperature": ask.temperature,
            "samplers": ["temperature"] if ask.temperature else ["top_k"],
            "top_k": 1,  # reached when greedy
            "cache_prompt": False,
            "return_tokens": True,
        }
        request = Request(
            f"{self.address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urlopen(request, timeout=ANSWER_SECONDS) as answer:
            return json.load(answer)

    def write(self, ask: Ask) -> Answer:
        found = list(self.pool.map(lambda prompt: self.post(prompt, ask), ask.prompts))
        drafted, accepted = (
            sum(one["timings"].get(name, 0) for one in found) for name in ("draft_n", "draft_n_accepted")
        )
        return Answer([one["tokens"] for one in found], drafted, accepted)

    def close(self) -> None:
        self.child.terminate()
        self.child.wait()


def flags(settings: Settings, address: str) -> list[str]:
    threads, port = str(settings.threads), address.rpartition(":")[2]
    cache = {"float32": "f32", "bfloat16": "f16"}[settings.dtype]  # f16 is its default
    common = ["--model", settings.target, "--host", "127.0.0.1", "--port", port, "--offline", "--no-ui"]
    common += ["--parallel", str(settings.texts), "--ctx-size", str(settings.texts * settings.context)]
    common += ["--threads", threads, "--threads-batch", threads]
    common += ["--cache-type-k", cache, "--cache-type-v", cache]
    common += ["--no-cache-prompt", "--cache-ram", "0", "--slot-prompt-similarity", "0"]
    if settings.method == "ngram":
        common += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", str(NGRAM)]
        common += ["--spec-ngram-simple-size-m", str(settings.k)]
    elif settings.method == "draft_model":
        common += ["--spec-type", "draft-simple", "--spec-draft-model", str(settings.draft)]
        common += ["--spec-draft-n-max", str(settings.k), "--spec-draft-threads", threads]
        common += ["--spec-draft-type-k", cache, "--spec-draft-type-v", cache]
    return common


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    serve(LlamaServer)
