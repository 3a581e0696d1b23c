"""Memory is estimated before it is used: the policy's three answers at the last byte, and the peak."""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from speculon import LLM, SamplingParams
from speculon.core.config import EngineConfig, SpeculationConfig
from speculon.core.errors import ConfigError, MemoryExceeded
from speculon.core.types import Reason
from speculon.runtimes.torch import budget
from speculon.runtimes.torch.budget import MemoryBudget
from speculon.runtimes.torch.drafters.draft_model import model_drafter
from speculon.runtimes.torch.needs import LayerSpec, Needs
from tests.engines import torch_runtime
from tests.tiny.conftest import tiny_target
from tests.tiny.drafting import DRAFT, NoisyModel, use_draft
from tests.tiny.folders import make_folder
from tests.tiny.scripted import make_engine, store_of

HELD, FREE = 1 << 29, 1 << 33
PARAMS = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = list(range(20, 40))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine as it is would give another estimate in every engine."""
    monkeypatch.setattr(budget, "held_memory", lambda device: HELD)
    monkeypatch.setattr(budget, "free_memory", lambda device: FREE)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Draft checkpoints that were loaded."""
    load, paths = model_drafter.load_target, []

    def noted(path: str, **settings: Any) -> Any:
        paths.append(path)
        return load(path, **settings)

    monkeypatch.setattr(model_drafter, "load_target", noted)
    return paths


def start(folder: Path, **speculation: Any) -> LLM:
    return LLM(
        str(folder),
        num_blocks=64,
        speculation={"policy": "fixed", "method": "draft_model", "draft": str(folder), **speculation},
    )


@cache
def estimate_of(folder: Path) -> int:
    return start(folder).engine.runtime.estimate.total


def at_limit(folder: Path, policy: str, missing: int, **speculation: Any) -> LLM:
    """With a limit that many bytes under the estimate."""
    limit = (estimate_of(folder) - missing) / 2**30
    return start(folder, memory_policy=policy, memory_limit_gb=limit, **speculation)


@pytest.mark.parametrize("policy", ["allow", "fallback", "fail"])
def test_a_limit_that_is_just_enough_is_enough(policy: str, folder: Path) -> None:
    llm = at_limit(folder, policy, missing=0)
    assert llm.engine.runtime.estimate.fits and llm.engine.runtime.estimate.action == "use"


def test_fallback_loads_nothing_and_goes_on_plainly_or_with_lookups(folder: Path, loaded: list[str]) -> None:
    plain = start(folder, method="off", draft=None).generate(PROMPT, PARAMS)[0]
    estimate_of(folder)
    loaded.clear()
    llm = at_limit(folder, "fallback", missing=1)
    output = llm.generate(PROMPT, PARAMS)[0]
    assert output.speculation.rounds == 0 and set(output.reasons) == {Reason.MEMORY}
    assert output.token_ids == plain.token_ids
    assert len(store_of(llm.engine).layers) == len(llm.engine.runtime.target.layers), (
        "no page holds a layer of the draft"
    )
    cascade = at_limit(folder, "fallback", missing=1, method="auto")
    output = cascade.generate(PROMPT, PARAMS.model_copy(update={"max_tokens": 80}))[0]
    assert set(output.speculation.by_source) == {"suffix"}
    assert loaded == []


def test_fail_says_the_numbers_and_loads_nothing(folder: Path, loaded: list[str]) -> None:
    estimate_of(folder)
    loaded.clear()
    with pytest.raises(MemoryExceeded) as raised:
        at_limit(folder, "fail", missing=1)
    estimate = raised.value.memory
    assert loaded == [] and estimate.total == estimate.limit + 1 and estimate.action == "refuse"
    assert sum(getattr(estimate, part) for part in budget.PARTS) == estimate.total and estimate.held == HELD
    for number in (estimate.total, estimate.limit, estimate.drafters, estimate.pages):
        assert str(number) in str(raised.value)


def test_under_pressure_drafts_give_their_pages_back_and_take_them_again() -> None:
    """Two texts fill the pool while all drafts are wrong; when one of them makes room, the other drafts
    again.
    """
    use_draft(NoisyModel(tiny_target("llama"), 1.0))
    engine = make_engine(
        tiny_target("llama"), num_blocks=40, block_size=1, prefix_cache=False, speculation=DRAFT
    )
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    engine.add_request(PROMPT[:12], params, {"method": "draft_model", "num_speculative_tokens": 4}, "drafts")
    engine.add_request(PROMPT[:12], params, {"method": "off"}, "plain")
    refused, drafted = [0], [0]
    while engine.has_work:
        for seq in engine.scheduler.running:
            if seq.request.id == "drafts":
                refused.append(seq.stats.reasons[Reason.NO_PAGES])
                drafted.append(seq.stats.drafted_at.total())
        engine.step()
        engine.check_integrity()
    full = next(i for i, count in enumerate(refused) if count)
    assert drafted[full] > 0 and drafted[-1] > drafted[full], "it never drafted again"
    assert engine.runtime.space.available == engine.runtime.space.num_blocks


def test_allow_loads_all_the_same(folder: Path) -> None:
    llm = at_limit(folder, "allow", missing=1)
    assert not llm.engine.runtime.estimate.fits and llm.engine.runtime.estimate.action == "use"
    assert llm.generate(PROMPT, PARAMS)[0].speculation.rounds > 0


def test_additional_memory_counts(folder: Path) -> None:
    with pytest.raises(MemoryExceeded):
        at_limit(folder, "fail", missing=0, additional_memory_gb=2**-30)


def test_what_was_loaded_is_judged_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate that was too low lets the draft load; the engine then lets go of it."""
    estimate_of(folder)
    monkeypatch.setattr(model_drafter, "model_needs", lambda *_: Needs(bytes_fixed=1))
    llm = at_limit(folder, "fallback", missing=1)
    assert llm.generate(PROMPT, PARAMS)[0].reasons == {Reason.MEMORY: 11}
    with pytest.raises(MemoryExceeded):
        at_limit(folder, "fail", missing=1)


# pages

LAYER = LayerSpec("attention", 2, 8, 8, torch.float32)  # 128 bytes a token


def pages(drafters: list[Needs], **settings: Any) -> int:
    target = Needs(layers=(LAYER,) * 4)
    return MemoryBudget(
        EngineConfig(**{"block_size": 16, "speculation": {"suffix_pools": 0}, **settings}),
        target,
        1024,
        torch.device("cpu"),
    ).pages(drafters)


def test_the_drafters_layers_and_weights_shrink_the_pool() -> None:
    page = 16 * 4 * 128
    assert pages([], kv_memory_gb=(10 * page) / 2**30) == 10
    assert pages([Needs(layers=(LAYER,))], kv_memory_gb=(10 * page) / 2**30) == 8
    free = int(FREE * budget.SHARE_OF_FREE)
    assert pages([], max_num_seqs=4096) == min(free // page, 4096 * 64)
    heavy = Needs(bytes_fixed=FREE - 100 * page)
    assert pages([heavy], max_num_seqs=4096) == int(100 * page * budget.SHARE_OF_FREE) // page


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_blocks": 1 << 40}, "num_blocks = 1099511627776: the KV pages need"),
        (
            {"kv_memory_gb": 1e-9},
            "kv_memory_gb: 1 bytes are left for KV pages, and one page takes 8192 bytes",
        ),
        (
            {"kv_memory_gb": 1e3, "max_num_seqs": 4096, "block_size": 1024},
            "kv_memory_gb = 1000.0: the KV pages need",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_numbers(
    settings: dict[str, Any], words: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(budget, "free_memory", lambda device: 1 << 20)
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        pages([], **settings)


# earlier answers


def test_earlier_answers_are_part_of_the_estimate(folder: Path) -> None:
    """At their fullest, whoever drafts: a request may ask for them at any time."""
    engines = (start(folder, suffix_pools=n, suffix_pool_tokens=2**16).engine for n in (0, 64))
    least, most = (torch_runtime(engine).estimate for engine in engines)
    answers = SpeculationConfig(suffix_pools=64, suffix_pool_tokens=2**16).remembered_bytes
    assert (least.remembered, most.remembered, most.total - least.total) == (0, answers, answers)
    limit = (most.total - 1) / 2**30
    over = start(folder, suffix_pools=64, suffix_pool_tokens=2**16, memory_limit_gb=limit)
    assert over.generate(PROMPT, PARAMS)[0].reasons == {Reason.MEMORY: 11}, "the drafter gives way"
    assert (
        start(folder, suffix_pools=0, memory_limit_gb=limit).generate(PROMPT, PARAMS)[0].speculation
        is not None
    )


def test_pages_leave_room_for_earlier_answers() -> None:
    page, answers = 16 * 4 * 128, {"suffix_pools": 1000, "suffix_pool_tokens": 2**18}
    room = FREE - SpeculationConfig(**answers).remembered_bytes
    assert pages([], max_num_seqs=4096, speculation=answers) == int(room * budget.SHARE_OF_FREE) // page
    with pytest.raises(ConfigError, match=f"the KV pages need .* {room} are free"):
        pages([], num_blocks=room // page + 1, speculation=answers)
    assert pages([], num_blocks=room // page, speculation=answers) == room // page


def test_more_earlier_answers_than_the_machine_holds_are_refused_with_the_numbers() -> None:
    answers = {"suffix_pools": 4096, "suffix_pool_tokens": 2**20}
    needed = SpeculationConfig(**answers).remembered_bytes
    with pytest.raises(
        ConfigError, match=f"suffix_pool_tokens = 1048576: 4096 pools of them need {needed} bytes, {FREE} are"
    ):
        pages([], speculation=answers)


# the estimate against the peak of a process

CHILD = """
import json, sys
from pathlib import Path
from speculon import LLM, SamplingParams
target, draft = sys.argv[1:]
llm = LLM(target, num_blocks=512, max_num_seqs=8, max_batch_tokens=256, threads=1,
          speculation={"policy": "fixed", "method": "draft_model", "draft": draft, "suffix_pools": 0})
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
prompts = [[3 + (i * 7 + j) % 300 for j in range(1000)] for i in range(9)]
llm.generate(prompts, params)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(json.dumps({**llm.engine.runtime.estimate.to_dict(), "peak": int(status["VmHWM"].split()[0]) * 1024}))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
@pytest.mark.soak
def test_the_peak_of_a_process_is_what_was_estimated(folder: Path, tmp_path: Path) -> None:
    """The pool is used to its last page, and the draft weighs as much as a good part of the rest."""
    from tests.tiny.folders import heavy_draft

    target = heavy_draft(folder, tmp_path / "target", layers=3)  # a draft model is smaller than its target
    draft = heavy_draft(folder, tmp_path / "draft")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(target), str(draft)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["peak"] == pytest.approx(found["estimate"], rel=0.1), found
    assert found["held"] + found["drafters"] < found["measured"] <= found["peak"], "once it was loaded"
    for part in ("drafters", "pages"):  # the estimate without this part
        assert found["peak"] != pytest.approx(found["estimate"] - found[part], rel=0.1), (
            f"{part} are too light to matter"
        )


# a pool smaller than a context


@pytest.mark.parametrize(("blocks", "notes"), [(2, 1), (4, 0)])
def test_a_pool_that_holds_less_than_the_context_is_reported(
    folder: Path, caplog: pytest.LogCaptureFixture, blocks: int, notes: int
) -> None:
    llm = LLM(str(folder), num_blocks=blocks, max_context=64, warmup=False)
    note = "only 32 tokens fit into the 2 KV pages, of a context of 64"
    assert caplog.messages == [note] * notes
    assert llm.engine.facts().note == note * notes


def test_a_pool_that_holds_no_request_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="num_blocks: 1 pages of 1 tokens are too few for any request, .* at least 2"
    ):
        LLM(str(folder), num_blocks=1, block_size=1)
    llm = LLM(str(folder), num_blocks=2, block_size=1, warmup=False)
    (output,) = llm.generate([[5]], SamplingParams(temperature=0, max_tokens=1))
    assert len(output.token_ids) == 1


# the memory of a deleted LLM


def remains(folder: Path, state: Path, keep: Callable[[object], object] = id) -> list[str]:
    """What is left of an LLM that wrote some texts and was deleted; `keep` is called with its model."""
    llm = LLM(str(folder), num_blocks=64, state=state, speculation={"method": "auto"})
    formed = SamplingParams(temperature=0, max_tokens=8, structured={"regex": "[a-z]{4}"})
    llm.generate([PROMPT, PROMPT], [PARAMS, formed])
    for _ in llm.stream(PROMPT, PARAMS):
        break
    store = store_of(llm.engine)
    model = torch_runtime(llm.engine).target.model
    parts = {"engine": llm.engine, "store": store, "pages": store.k[0], "model": model}
    parts |= dict(model.named_parameters())
    found = {name: weakref.ref(part) for name, part in parts.items()}
    keep(model)
    del llm, store, parts, model
    gc.collect()
    return [name for name, part in found.items() if part() is not None]


def test_a_deleted_llm_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    assert remains(folder, tmp_path) == []


def test_a_model_that_something_keeps_is_found(folder: Path, tmp_path: Path) -> None:
    """The twin."""
    kept: list[object] = []
    assert "model" in remains(folder, tmp_path, kept.append)


FREED = """
import ctypes, gc
from pathlib import Path
from speculon import LLM, SamplingParams
def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096
llm = LLM("demo", threads=1, num_blocks=64, warmup=False)
llm.generate(["def add(a, b):"], SamplingParams(temperature=0, max_tokens=8))
weights, before = llm.engine.runtime.target.num_bytes, held()
del llm
gc.collect()
ctypes.CDLL("libc.so.6").malloc_trim(0)
print(before - held(), weights)
"""


@pytest.mark.soak
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_memory_of_a_deleted_llm_returns_to_the_system() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    freed, weights = map(int, done.stdout.split())
    assert freed > 0.9 * weights, (freed, weights)
