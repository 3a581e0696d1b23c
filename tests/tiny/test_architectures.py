"""Every architecture over pages equals its stock eager forward; planted errors are found, others refused."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, T5Config, T5ForConditionalGeneration, masking_utils
from transformers.modeling_utils import AttentionInterface

from speculon.core.errors import UnsupportedModel
from speculon.runtimes.torch.batch import Batch
from speculon.runtimes.torch.kv.store import PageStore, SpanView
from speculon.runtimes.torch.loading.load import context_limit, wrap_model
from speculon.runtimes.torch.loading.load_check import CheckedRows, run_pieces
from speculon.runtimes.torch.loading.probe import visible
from speculon.runtimes.torch.model import attention, grouping
from speculon.runtimes.torch.model.grouping import MaskCache
from speculon.runtimes.torch.model.target import Target
from speculon.runtimes.torch.needs import LayerSpec
from tests.tiny.conftest import CONTEXT, TINY, VOCAB, WINDOW, build, tiny_model, tiny_target

TOLERANCE = 1e-4  # of the largest logit; ours measure 1e-6
LENGTHS = (23, 14, 9, 3, 80)
BLOCK = 4
# (sequence, start, end) of each span of each forward: fresh prompts, continued chunks, single rows, drafts of
# several rows.
STEPS = [
    [(0, 0, 9), (1, 0, 9), (2, 0, 1)],
    [(4, 0, 40)],
    [(1, 9, 10), (0, 9, 17), (2, 1, 8), (3, 0, 3)],
    [(2, 8, 9), (0, 17, 22), (1, 10, 14), (4, 40, 80)],
    [(0, 22, 23)],
]

sequences = [torch.randint(3, VOCAB, (n,), generator=torch.Generator().manual_seed(n)) for n in LENGTHS]


def tables(scattered: bool) -> list[list[int]]:
    """Pages for every sequence: in order and consecutive, or shuffled over the pool."""
    counts = [-(-n // BLOCK) for n in LENGTHS]
    pages = (
        torch.randperm(sum(counts), generator=torch.Generator().manual_seed(1)).tolist()
        if scattered
        else list(range(sum(counts)))
    )
    return [[pages.pop(0) for _ in range(count)] for count in counts]


def difference(
    name: str,
    *,
    scattered: bool = True,
    fused: bool | None = None,
    layers: tuple[LayerSpec, ...] | None = None,
    run: Callable[..., list[Tensor]] = run_pieces,
) -> float:
    """The largest error of any logit of any row, relative to the largest logit."""
    target, stock = tiny_target(name, fused=fused), tiny_model(name)
    store = PageStore(layers or target.layers, 48, BLOCK, "cpu")
    for pool in (*store.k, *store.v):
        pool.fill_(torch.nan)  # what nobody wrote must not be seen, not even with weight zero
    pages = tables(scattered)
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for step in STEPS:
        pieces = [(sequences[i], pages[i], start, end) for i, start, end in step]
        wrong = [((sequence + 7) % VOCAB, table, start, end) for sequence, table, start, end in pieces]
        # a rejected draft leaves its keys behind; the next forward writes over them
        run(target, store, wrong)
        for (i, *_), logits in zip(step, run(target, store, pieces), strict=True):
            rows[i].append(logits)
    with torch.inference_mode():
        truth = [stock(sequence[None]).logits[0] for sequence in sequences]
    assert [sum(map(len, x)) for x in rows] == list(LENGTHS)
    scale = max(float(t.abs().max()) for t in truth)
    errors = [
        float((torch.cat(ours) - t).abs().nan_to_num(torch.inf).max())
        for ours, t in zip(rows, truth, strict=True)
    ]
    return max(errors) / scale


@pytest.mark.parametrize(
    ("scattered", "fused"),
    [
        pytest.param(True, True, id="scattered, fused"),
        pytest.param(False, True, id="consecutive, fused"),
        pytest.param(True, False, id="scattered, stock"),
    ],
)
@pytest.mark.parametrize("name", TINY)
def test_ragged_spans_equal_the_stock_forward(name: str, scattered: bool, fused: bool) -> None:
    assert difference(name, scattered=scattered, fused=fused) < TOLERANCE


@contextmanager
def attention_changed(change: Callable[..., Any]) -> Iterator[None]:
    """`change(attend, module, q, k, v, mask, **kwargs)` takes the place of the attention function."""
    original = attention.attend
    AttentionInterface.register(attention.NAME, lambda *args, **kwargs: change(original, *args, **kwargs))
    try:
        yield
    finally:
        AttentionInterface.register(attention.NAME, original)


def without(argument: str) -> Callable[..., Any]:
    return lambda attend, *args, **kwargs: attend(*args, **{**kwargs, argument: None})


def scaled(attend: Callable[..., Any], *args: Any, scaling: float | None = None, **kwargs: Any) -> Any:
    scaling = args[1].shape[-1] ** -0.5 if scaling is None else scaling
    return attend(*args, scaling=scaling * 1.1, **kwargs)


def regrouped(
    attend: Callable[..., Any], module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Query head h uses key-value head h % Hkv instead of h // group."""
    heads = torch.arange(q.shape[1]).view(-1, k.shape[1]).T.flatten()
    out, _ = attend(module, q[:, heads], k, v, *args, **kwargs)
    return out[:, :, heads.argsort()], None


class ShiftedMasks(MaskCache):
    def slice(
        self, n: int, length: int, window: int | None, group: int, *others: Any, **padding: int
    ) -> Tensor:
        return super().slice(n, length, window, group, *others, **padding).roll(group, 0)


def shifted_positions(target: Target, store: PageStore, pieces: list[CheckedRows]) -> list[Tensor]:
    """Continued spans are one position too far."""
    forward = target.forward
    late = torch.cat([torch.full((end - start,), int(start > 0)) for _, _, start, end in pieces])
    try:
        target.forward = lambda batch, view: forward(
            dataclasses.replace(batch, position_ids=batch.position_ids + late), view
        )  # type: ignore[method-assign]
        return run_pieces(target, store, pieces)
    finally:
        del target.forward


def foreign_page(target: Target, store: PageStore, pieces: list[CheckedRows]) -> list[Tensor]:
    """A sequence continued at a page's start reads the page before from where nobody wrote."""

    def misread(sequence: Tensor, table: list[int], start: int, end: int) -> CheckedRows:
        table = list(table)
        if start and start % BLOCK == 0:
            table[start // BLOCK - 1] = store.num_blocks - 1
        return sequence, table, start, end

    return run_pieces(target, store, [misread(*piece) for piece in pieces])


WINDOWED = ["mistral", "gemma2", "gemma3", "gpt_oss"]
DIFFERENT = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "gpt2"]  # in how they attend
VISIBLE = 20 * TOLERANCE


@pytest.mark.parametrize("window", [WINDOW - 1, WINDOW + 1, None])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_wrong_window_is_found(name: str, window: int | None) -> None:
    layers = tuple(
        dataclasses.replace(spec, window=spec.window and window) for spec in tiny_target(name).layers
    )
    assert difference(name, layers=layers) > VISIBLE


@pytest.mark.parametrize(
    ("name", "change"),
    [("gpt_oss", without("s_aux")), ("gemma2", without("softcap"))]
    + [(name, scaled) for name in DIFFERENT]
    + [(name, regrouped) for name in ("llama", "gpt_oss")],
)
def test_a_wrong_attention_argument_is_found(name: str, change: Callable[..., Any]) -> None:
    with attention_changed(change):
        assert difference(name, fused=False) > VISIBLE


@pytest.mark.parametrize("run", [shifted_positions, foreign_page])
@pytest.mark.parametrize("name", DIFFERENT)
def test_a_wrong_position_or_page_is_found(name: str, run: Callable[..., list[Tensor]]) -> None:
    assert difference(name, run=run) > VISIBLE


@pytest.mark.parametrize("name", DIFFERENT)
def test_a_mask_off_by_one_row_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouping, "MASKS", ShiftedMasks())
    assert difference(name) > VISIBLE


def test_the_load_check_finds_a_planted_error() -> None:
    with (
        attention_changed(scaled),
        pytest.raises(UnsupportedModel, match=r"differ from the stock model by 0\.\d+ .* allowed is 0.0001"),
    ):
        wrap_model(tiny_model("llama"))


def test_a_prompt_chunk_without_scored_rows_still_fills_its_pages() -> None:
    target, sequence = tiny_target("gemma2"), sequences[1]
    chunk, rest = PageStore(target.layers, 8, BLOCK, "cpu"), list(range(4))
    scored = PageStore(target.layers, 8, BLOCK, "cpu")
    run_pieces(target, scored, [(sequence, rest, 0, 9)])
    span = chunk.view_of([SpanView(0, 9, chunk.where(rest, 9), 9)])
    out = target.forward(
        Batch([], sequence[None, :9], torch.arange(9)[None], torch.empty(0, dtype=torch.long)), span
    )
    assert out.logits.shape == (0, VOCAB)
    assert all(torch.equal(a[:9], b[:9]) for a, b in zip(chunk.k + chunk.v, scored.k + scored.v, strict=True))


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3": (
        "gemma3_text",
        {"use_bidirectional_attention": True, "sliding_window": WINDOW},
        "both directions|neither causal",
    ),
    "bert": ("bert", {"is_decoder": False}, "both directions|takes no"),
    "bloom": ("bloom", {"n_head": 4, "n_layer": 2}, "takes no `position_ids`"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_name(case: str) -> None:
    model_type, settings, reason = REFUSED[case]
    base = {"vocab_size": VOCAB} if model_type == "bloom" else None
    model = (
        build(model_type, **settings)
        if base is None
        else AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings))
    )
    with pytest.raises(UnsupportedModel, match=reason):
        wrap_model(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    with pytest.raises(UnsupportedModel, match="T5ForConditionalGeneration is an encoder-decoder"):
        wrap_model(T5ForConditionalGeneration(config))


def test_a_class_that_keeps_its_own_attention_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    monkeypatch.setattr(type(model), "_can_set_attn_implementation", classmethod(lambda cls: False))
    with pytest.raises(UnsupportedModel, match="keeps its own attention"):
        wrap_model(model)


def test_an_unsupported_tensor_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    layer = type(model.model.layers[1].self_attn)
    inner = layer.forward
    monkeypatch.setattr(
        layer,
        "forward",
        lambda self, *args, **kwargs: inner(self, *args, **kwargs, position_bias=torch.ones(4)),
    )
    with pytest.raises(UnsupportedModel, match="`position_bias`"):
        wrap_model(model)


ZERO = torch.zeros(1, dtype=torch.long)
STRANGE = {
    "chunks off by one": (masking_utils.chunked_causal_mask_function(9, ZERO), 8),
    "large chunks off by one": (masking_utils.chunked_causal_mask_function(1001, ZERO), 1000),
    "shifted chunks": (lambda b, h, q, k: (k <= q) & ((k + 1) // 8 == (q + 1) // 8), 8),
    "both directions": (masking_utils.bidirectional_mask_function, None),
    "window both ways": (masking_utils.sliding_window_bidirectional_mask_function(5), 5),
    "image blocks": (
        masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.blockwise_overlay(ZERO[None])
        ),
        None,
    ),
    "window off by one": (masking_utils.sliding_window_causal_mask_function(9), 8),
    "large window off by one": (masking_utils.sliding_window_causal_mask_function(1001), 1000),
    "a sink of four": (lambda b, h, q, k: (k <= q) & ((k > q - 100) | (k < 4)), 100),
    "a hole far away": (lambda b, h, q, k: (k <= q) & ((q < 2048) | (k != 1024)), None),
}


@pytest.mark.parametrize("case", STRANGE)
def test_a_strange_mask_is_refused(case: str) -> None:
    with pytest.raises(UnsupportedModel, match="neither causal nor a window|no function of two positions"):
        visible(*STRANGE[case], 4096, case)


def test_plain_masks_are_recognised() -> None:
    assert visible(masking_utils.causal_mask_function, None, 4096, "") == (None, None)
    assert visible(masking_utils.sliding_window_causal_mask_function(7), 7, 4096, "") == (7, None)
    for size in (8, 1000):
        mask = masking_utils.chunked_causal_mask_function(size, ZERO)
        assert visible(mask, size, 4096, "") == (None, size)
    # never reached
    for function in (
        masking_utils.sliding_window_causal_mask_function(4096),
        masking_utils.chunked_causal_mask_function(4096, ZERO),
    ):
        assert visible(function, 4096, 4096, "") == (None, None)


def test_rope_that_changes_with_length_limits_the_context() -> None:
    longrope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32}
    longrope |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    limit, notes = context_limit(build("phi3", rope_parameters=longrope, original_max_position_embeddings=32))
    assert limit == 32
    assert "longrope" in notes[0]
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert context_limit(build("llama", rope_parameters=dynamic))[0] == CONTEXT
