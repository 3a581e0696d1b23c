"""What calls of a model cost on a device: time, launches, and how near they are to the memory's speed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, supported_activities

from speculon.core.config import EngineConfig, SamplingParams
from speculon.engine.engine import Engine
from speculon.measure.bench.measure import recording
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.drafters.eagle3.config import Eagle3Config
from speculon.runtimes.torch.drafters.eagle3.network import Eagle3Network
from speculon.runtimes.torch.drafters.layers import freeze, make_rotary
from speculon.runtimes.torch.drafters.runner import choose_run
from speculon.runtimes.torch.kv.store import PageStore, SpanView, View
from speculon.runtimes.torch.model.target import Runner, Target
from speculon.runtimes.torch.needs import LayerSpec
from speculon.runtimes.torch.runtime import TorchRuntime

WARM, CALLS, PROFILED = 5, 30, 3
PAGE = 16  # tokens
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")


@dataclass(frozen=True, slots=True)
class CallCost:
    """Of one call, to the end of the device's work."""

    ms: float  # median
    busy_ms: float | None  # in which the device computes or copies; None where the profiler saw none of it
    launches: float  # by the host

    @classmethod
    def of(cls, call: Callable[[], object], device: torch.device) -> CallCost:
        times = [timed(call, device) for _ in range(WARM + CALLS)][WARM:]
        activities = {ProfilerActivity.CPU, ProfilerActivity.CUDA} & supported_activities()
        with profile(activities=sorted(activities, key=str)) as seen:
            for _ in range(PROFILED):
                timed(call, device)
        events = seen.events() or []
        work = [(e.time_range.start, e.time_range.end) for e in events if e.device_type is DeviceType.CUDA]
        launches = sum(e.name.startswith(LAUNCHES) for e in events) / PROFILED
        return cls(median(times), covered(work) / PROFILED / 1e3 if work else None, launches)

    @property
    def gaps_ms(self) -> float | None:
        return None if self.busy_ms is None else self.ms - self.busy_ms


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Its ms, with the work of the device that it began."""
    synchronise(device)
    start = perf_counter()
    call()
    synchronise(device)
    return (perf_counter() - start) * 1e3


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def covered(intervals: Iterable[tuple[float, float]]) -> float:
    """How much of the line some intervals cover together."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length


# the memory


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second, read and written; `num_bytes` should be more than any cache holds."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    there = torch.empty_like(source)
    times = [timed(lambda: there.copy_(source), device) for _ in range(WARM + CALLS)][WARM:]
    return 2 * num_bytes / median(times) * 1e3


def weights_read(target: Target) -> int:
    """Bytes of weights that one forward reads. Of an embedding that is not the head it reads few rows."""
    return target.weight_bytes - (0 if target.tied_head else target.embedding.nbytes)


# the target


def forward_cost(target: Target, sequences: int, rows: int, context: int) -> CallCost:
    """Of a forward over so many sequences, the last `rows` of each computed and scored."""
    device, total = target.device, sequences * rows
    view, positions = full_pages(target.layers, device, sequences, rows, context)
    ids, scored = torch.arange(total, device=device) % target.vocab_size, torch.arange(total, device=device)
    batch = Batch([], ids[None], positions[None], scored)
    return CallCost.of(lambda: target.forward(batch, view), device)


def full_pages(
    layers: tuple[LayerSpec, ...], device: torch.device, sequences: int, rows: int, context: int
) -> tuple[View, Tensor]:
    """Pages in which every sequence has a context of so many tokens, and the positions of its last rows."""
    store = PageStore(layers, sequences, context, device)
    for pool in (*store.k, *store.v):
        pool.normal_()
    spans = [
        SpanView(i * rows, (i + 1) * rows, slice(i * context, (i + 1) * context), context)
        for i in range(sequences)
    ]
    return store.view_of(spans), torch.arange(context - rows, context, device=device).repeat(sequences)


def step_ms(target: Target, sequences: int, context: int, tokens: int) -> tuple[float, float]:
    """Medians of a plain decoding step of the engine, and of the forward in it."""
    room = context + tokens + 1
    config = EngineConfig(
        max_num_seqs=sequences,
        max_batch_tokens=min(8192, sequences * (context + 1)),  # so that all decode together soon
        num_blocks=sequences * -(-room // PAGE) + 1,
        block_size=PAGE,
        prefix_cache=False,
        warmup=False,
        speculation={"method": "off", "policy": "fixed"},
    )
    engine = Engine(TorchRuntime(target, None, config), None, config)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    for i in range(sequences):
        prompt = [(i + j) % target.vocab_size for j in range(context)]
        engine.add_request(prompt, params)
    with recording(engine) as steps:
        while engine.has_work:
            engine.step()
    engine.close()
    whole = [step for step in steps if step.decoding and step.spans == sequences][WARM:]
    return median(step.step_ms for step in whole), median(step.forward_ms for step in whole)


# a drafter


def random_head(target: Target, draft_vocab: int) -> Eagle3Network:
    """An EAGLE-3 head of one layer of the target's shape, with random weights."""
    shape = target.model.config
    config = Eagle3Config(
        hidden=shape.hidden_size,
        target_hidden=shape.hidden_size,
        taps=3,
        layers=1,
        heads=shape.num_attention_heads,
        kv_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        intermediate=shape.intermediate_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab,
        eps=shape.rms_norm_eps,
        rope=dict(shape.rope_parameters),
        windows=(None,),
        names={"lm_head.weight": "lm_head.weight"},
        norm_before_residual=True,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
    )
    with target.device:
        head = Eagle3Network(config).to(target.dtype).requires_grad_(False)
        head.rotary = make_rotary(config)
    freeze(head)
    head.embed, head.ids = target.embedding.detach(), torch.arange(draft_vocab, device=target.device)
    return head


def run_head(head: Eagle3Network, target: Target, captured: bool) -> Runner:
    return choose_run(head, head_layers(head, target), target, captured)


def head_layers(head: Eagle3Network, target: Target) -> tuple[LayerSpec, ...]:
    config = head.config
    return (LayerSpec("attention", config.kv_heads, config.head_dim, config.head_dim, target.dtype),)


def head_cost(head: Eagle3Network, runner: Runner, target: Target, sequences: int, context: int) -> CallCost:
    """Of a call for one draft of each sequence: the network, and the logits of its vocabulary."""
    view, positions = full_pages(head_layers(head, target), target.device, sequences, 1, context)
    ids = torch.arange(sequences, device=target.device) % target.vocab_size
    states = torch.randn(sequences, head.config.hidden, device=target.device).to(target.dtype)

    @torch.inference_mode()
    def call() -> Tensor:
        return head.logits(runner.run(ids, states, positions, view), target.vocab_size)

    return CallCost.of(call, target.device)
