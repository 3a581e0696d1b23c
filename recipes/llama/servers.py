"""Both servers: started with the same settings, sent the same requests, stopped while others are measured."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any, NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

from recipes.llama.figures import OFF, THEIRS
from recipes.serving.server import HOST, chunks

START_SECONDS, ANSWER_SECONDS, END_SECONDS = 600, 600, 60
# llama-server's speculative types that cost little. The first has its defaults: matches of 12 tokens, 48
# drafts; the others match fewer tokens, and draft fewer, as suits answers of a hundred tokens.
TYPES = {
    "ngram-simple": "",
    "ngram-simple:3:8": "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8",
    "ngram-mod:16:32": "--spec-ngram-mod-n-match 16 --spec-ngram-mod-n-max 32 --spec-ngram-mod-n-min 4",
}
DRAFT_TYPES = {"draft-simple:4": "--spec-draft-n-max 4"}
REMEMBERS = "ngram-mod"  # it keeps the n-grams of all requests


def their_flags(mode: str, args: Namespace) -> list[Any]:
    cache = args.kv_cache_type
    flags = [args.server, "--offline", "--no-ui", "--threads-batch", args.threads]
    flags += ["--parallel", args.sequences, "--ctx-size", args.sequences * args.context, "--no-kv-unified"]
    flags += ["--cache-type-k", cache, "--cache-type-v", cache, "--flash-attn", args.flash_attention]
    flags += ["--no-cache-prompt", "--cache-ram", 0, "--slot-prompt-similarity", 0]
    if mode != OFF:
        flags += ["--spec-type", mode.partition(":")[0], *{**TYPES, **DRAFT_TYPES}[mode].split()]
    if mode in DRAFT_TYPES:
        flags += ["--spec-draft-model", args.draft]
        flags += ["--spec-draft-type-k", cache, "--spec-draft-type-v", cache]
    return flags


def our_flags(mode: str, args: Namespace) -> list[Any]:
    flags = [sys.executable, "-m", "speculon.cli", "serve", "--runtime", "llama", "--method", mode]
    flags += ["--max-num-seqs", args.sequences, "--max-context", args.context]
    flags += ["--kv-memory-gb", args.kv_memory_gb, "--kv-cache-type", args.kv_cache_type]
    flags += ["--flash-attention", args.flash_attention, "--no-generation-config"]
    flags += ["--no-prefix-cache", "--suffix-pools", 0]
    return flags + (["--draft", args.draft] if args.draft and mode != OFF else [])


class Served:
    """A server in a mode, stopped by the kernel (SIGSTOP, children included) except while it writes.

    If this program dies, the kernel sends SIGHUP to stopped groups of processes, and they end.
    """

    def __init__(self, engine: str, mode: str, args: Namespace):
        self.engine, self.mode, self.remembers = engine, mode, mode.startswith(REMEMBERS)
        self._args, self._log = args, Path(args.out, f"{engine}-{mode.replace(':', '-')}.log")
        self._log.unlink(missing_ok=True)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Starts it, or starts it again."""
        self.close()
        args = self._args
        with socket.create_server((HOST, 0)) as probe:
            self._port = probe.getsockname()[1]
        command = (their_flags if self.engine == THEIRS else our_flags)(self.mode, args)
        command += ["--model", args.model, "--host", HOST, "--port", self._port, "--threads", args.threads]
        command += [] if args.gpu_layers is None else ["--gpu-layers", args.gpu_layers]
        command += ["--no-repack"] if args.no_repack else []
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                list(map(str, command)),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": str(args.threads)},
                process_group=0,
            )
        until = time.monotonic() + START_SECONDS
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"{self.engine} {self.mode} does not start: see {self._log}")
            time.sleep(0.1)
        self._signal(signal.SIGSTOP)

    def write(self, prompts: list[list[int]], max_tokens: int) -> list[Text]:
        """The texts of all prompts, which are requested at once."""
        self._signal(signal.SIGCONT)
        try:
            streams = asyncio.run(
                arrivals(self._port, [body(self.engine, prompt, max_tokens) for prompt in prompts])
            )
        finally:
            self._signal(signal.SIGSTOP)
        return [read_stream(self.engine, stream) for stream in streams]

    def close(self) -> None:
        if self._process is None:
            return
        self._signal(signal.SIGCONT)
        self._process.terminate()
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _ready(self) -> bool:
        path = "health" if self.engine == THEIRS else "ready"
        try:
            with urlopen(f"http://{HOST}:{self._port}/{path}", timeout=10):
                return True
        except (URLError, OSError):
            return False

    def _signal(self, number: int) -> None:
        if self._process and self._process.poll() is None:
            os.killpg(self._process.pid, number)


def body(engine: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """A greedy request. Of llama-server's samplers it uses the one that costs least."""
    own: dict[str, Any] = {"speculation": {"stats": True}}
    if engine == THEIRS:
        own = {"cache_prompt": False, "samplers": ["top_k"], "top_k": 1}
    same = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
    return {**same, "stream_options": {"include_usage": True}, **own}


Stream = list[tuple[float, bytes]]  # seconds since the requests were sent, and the JSON that arrived then


async def arrivals(port: int, bodies: list[dict[str, Any]]) -> list[Stream]:
    """Nothing is parsed before the last chunk: that would take time from the server."""
    began = time.perf_counter()

    async def one(body: dict[str, Any]) -> Stream:
        async with asyncio.timeout(ANSWER_SECONDS):
            found = chunks(port, "/v1/completions", body)
            return [(time.perf_counter() - began, chunk) async for chunk in found]

    return await asyncio.gather(*map(one, bodies))


class Text(NamedTuple):
    text: str
    tokens: int  # without the stop token
    seconds: float  # from the request to the last chunk
    first: float  # from the request to the first chunk with text
    drafted: int
    accepted: int


def read_stream(engine: str, stream: Stream) -> Text:
    text, first, tokens, counts, finish = "", None, 0, dict[str, Any](), None
    for seconds, raw in stream:
        chunk = json.loads(raw)
        if "error" in chunk:
            raise RuntimeError(f"{engine}: {chunk['error']}")
        for choice in chunk["choices"]:
            first = seconds if choice["text"] and first is None else first
            text, finish = text + choice["text"], choice["finish_reason"] or finish
        tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        counts = chunk.get("speculation") or chunk.get("timings") or counts  # ours, theirs
    if finish is None:
        raise RuntimeError(f"{engine}: a stream ended before its text did")
    if engine == THEIRS and finish == "stop":
        tokens -= 1  # it counts the stop token, and ours does not
    drafted = counts.get("drafted", counts.get("draft_n", 0))
    accepted = counts.get("accepted", counts.get("draft_n_accepted", 0))
    last = stream[-1][0]
    # bytes of a character that max_tokens cuts are U+FFFD in our text and missing in theirs
    return Text(text.rstrip("\ufffd"), tokens, last, last if first is None else first, drafted, accepted)
