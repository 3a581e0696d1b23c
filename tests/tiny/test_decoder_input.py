"""Input of the decoder of model objects: unchanged models, prompts, parameters and settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from speculon import LLM, SamplingParams, SpeculativeDecoder
from speculon.core.errors import (
    ConfigError,
    InvalidParameter,
    ModelError,
    TooLong,
)
from speculon.core.types import Draft
from speculon.runtimes.torch.model.fuse import replace_norms
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import VOCAB, build, tiny_model
from tests.tiny.scripted import Letters, assert_nothing_held, spell
from tests.tiny.test_decoder import (
    GREEDY,
    PROMPT,
    SEEDED,
    K,
    account,
    by_steps,
    make,
    plain,
)

# the models


def state(model: PreTrainedModel) -> dict[str, Any]:
    """All that must not change: modules, weights (by storage and content), attention, mode and logits."""
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = model(ids).logits
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "weights": {
            name: (w.data_ptr(), w.double().sum().item())
            for name, w in model.state_dict(keep_vars=True).items()
        },
        "attention": model.config._attn_implementation,
        "training": model.training,
        "config": model.config.to_dict(),
        "logits": logits.tolist(),
    }


def test_neither_model_is_modified() -> None:
    target, draft = build("llama", 0), build("llama", 1)
    target.train()
    before = state(target), state(draft)
    decoder = SpeculativeDecoder(target, draft, method="draft_model", policy="fixed", block_size=4)
    assert by_steps(decoder, GREEDY) == decoder.generate(PROMPT, GREEDY).token_ids
    assert (state(target), state(draft)) == before
    shared = {w.data_ptr() for w in target.parameters()}
    assert {w.data_ptr() for w in decoder.engine.runtime.target.model.parameters()} <= shared, (
        "no copy of the weights"
    )


def norms_replaced(model: PreTrainedModel) -> None:
    replace_norms(SimpleNamespace(model=model, mixers=(), dtype=torch.float32))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "change",
    [norms_replaced, lambda m: m.set_attn_implementation("sdpa"), lambda m: m.lm_head.weight.data.mul_(1.1)],
)
def test_a_modified_model_is_seen(change: Callable[[PreTrainedModel], Any]) -> None:
    model = build("llama", 0)
    before = state(model)
    change(model)
    assert state(model) != before


def test_a_draft_with_more_ids_is_padded_and_one_with_fewer_is_refused() -> None:
    target = tiny_model("llama")
    larger = build("llama", 1, vocab_size=VOCAB + 32)
    padded = SpeculativeDecoder(target, larger, method="draft_model", policy="fixed", block_size=4)
    assert by_steps(padded, SEEDED) == plain(SEEDED) and padded.stats.drafted > 0
    with pytest.raises(ModelError, match=f"its vocabulary has {VOCAB - 1} ids, the target's {VOCAB}"):
        SpeculativeDecoder(target, build("llama", 1, vocab_size=VOCAB - 1), method="draft_model")


def test_a_draft_on_another_device_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="draft LlamaForCausalLM is on meta, the target on cpu"):
        SpeculativeDecoder(tiny_model("llama"), build("llama", 1).to("meta"), method="draft_model")


def test_a_draft_may_be_a_path_for_the_decoder_and_an_object_for_llm(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(folder)
    decoder = SpeculativeDecoder(model, str(folder), method="draft_model", policy="fixed", block_size=4)
    decoder.generate([5, 6, 7], GREEDY)
    assert decoder.acceptance_rate == 1.0
    llm = LLM(str(folder), speculation={"method": "draft_model", "policy": "fixed", "draft": model})
    done = llm.generate([[5, 6, 7]], GREEDY)[0].speculation
    assert done and done.acceptance_rate == 1.0, "and LLM takes an object"
    with pytest.raises(ModelError, match="the target's 4096"):
        SpeculativeDecoder(build("llama", 0, vocab_size=4096), str(folder), method="draft_model")


# what goes in


def test_a_list_a_tensor_a_row_and_a_string_are_the_same_prompt() -> None:
    decoder = make(tokenizer=Letters())
    forms = [PROMPT, tuple(PROMPT), torch.tensor(PROMPT), torch.tensor([PROMPT]), spell(PROMPT)]
    outs = [decoder.generate(form, GREEDY) for form in forms]
    assert {tuple(out.token_ids) for out in outs} == {tuple(plain(GREEDY))}
    assert {out.text for out in outs} == {spell(plain(GREEDY))}
    assert {decoder.step(form, GREEDY).emitted_tokens for form in forms} == {tuple(plain(GREEDY)[: K + 1])}
    assert decoder.verify(PROMPT, torch.tensor(plain(GREEDY)[:2]), GREEDY).accepted == 2


def test_with_a_tokenizer_stop_strings_end_the_sequence() -> None:
    decoder, truth = make(tokenizer=Letters()), spell(plain(GREEDY))
    stopping = GREEDY.model_copy(update={"stop": (truth[6:8],)})
    out = decoder.generate(PROMPT, stopping)
    assert out.text == truth[: truth.index(truth[6:8])] and out.outputs[0].stop == truth[6:8]
    assert spell(by_steps(decoder, stopping)).startswith(out.text) and len(by_steps(decoder, stopping)) < 30


def test_without_a_tokenizer_the_text_is_empty_and_max_tokens_may_be_set_alone() -> None:
    out = make().generate(PROMPT, GREEDY, max_tokens=3)
    assert (out.text, out.token_ids, out.finish_reason) == ("", plain(GREEDY)[:3], "length")
    assert len(make().generate(PROMPT, max_tokens=2).token_ids) <= 2


CALLS: list[Any] = [
    pytest.param(
        lambda d: d.step("text"), InvalidParameter, "ids = 'text': must be the token ids", id="text"
    ),
    pytest.param(
        lambda d: d.step(torch.ones(2, 3).long()), InvalidParameter, "token ids of one text", id="two rows"
    ),
    pytest.param(
        lambda d: d.step([5, 6], prompt_len=0),
        InvalidParameter,
        "prompt_len = 0: must be from 1 to the number of ids, 2",
        id="prompt_len 0",
    ),
    pytest.param(
        lambda d: d.step([5] * 40, GREEDY, prompt_len=5),
        TooLong,
        r"5 \+ 35 written > 35 tokens",
        id="written",
    ),
    pytest.param(
        lambda d: d.step([5], SamplingParams(n=2)),
        InvalidParameter,
        "n = 2: must be 1, because a round carries one text",
        id="n",
    ),
    pytest.param(lambda d: d.draft([5], 65), InvalidParameter, "num_speculative_tokens = 65", id="k"),
    pytest.param(
        lambda d: d.verify([5], [VOCAB]),
        InvalidParameter,
        "drafts = 96: token ids must be from 0",
        id="draft id",
    ),
    pytest.param(
        lambda d: d.verify([5], [1] * 65),
        InvalidParameter,
        "drafts = 65: a round may have at most 64",
        id="drafts",
    ),
    pytest.param(
        lambda d: d.verify([5], Draft((1,), ("x",), torch.ones(1, 3))),
        InvalidParameter,
        r"must have shape \(1, 96\)",
        id="q",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), CALLS)
def test_a_bad_call_is_refused_by_name_and_leaves_nothing(
    call: Any, error: type[Exception], message: str
) -> None:
    decoder = make()
    before = account(decoder)
    with pytest.raises(error, match=message):
        call(decoder)
    assert account(decoder) == before
    assert_nothing_held(decoder.engine)


@pytest.mark.parametrize(
    ("model", "draft", "settings", "error", "message"),
    [
        pytest.param("demo", None, {}, ConfigError, "model = str: .*use LLM for a path", id="a path"),
        pytest.param(
            None, None, {"dtype": "bfloat16"}, ConfigError, "dtype = 'bfloat16': the model object", id="dtype"
        ),
        pytest.param(
            None,
            None,
            {"method": "draft_model"},
            ConfigError,
            "'draft_model': this method needs draft",
            id="no draft",
        ),
        pytest.param(None, 3, {}, ConfigError, "draft", id="no model"),
        pytest.param(
            None, None, {"blocksize": 4}, ConfigError, "blocksize = 4: unknown field", id="unknown field"
        ),
        pytest.param(None, None, {"draft_depth": 3}, ConfigError, "drafts are chains here", id="trees"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(
    model: Any, draft: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SpeculativeDecoder(model or tiny_model("llama"), draft, **settings)
