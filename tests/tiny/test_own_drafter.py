"""The drafter with a checkpoint that docs/proposers.md shows drafts as its formula says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculon.core.errors import ModelError
from speculon.core.types import Draft
from speculon.decoding.sequence import Sequence
from speculon.runtimes.torch.drafters.table import register
from tests.documents import ROOT, blocks
from tests.tiny.heads import deep_model, deep_target
from tests.tiny.scripted import drain, make_engine, texts_of
from tests.tiny.test_eagle3 import plain, requests_of, whole

SHOWN = next(body for body in blocks(ROOT / "docs" / "proposers.md", "python") if "StateDrafter" in body)
SETTINGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "prompts in chunks": {"max_batch_tokens": 7},
    "few pages": {"num_blocks": 40, "max_num_seqs": 8},
}
K = 3
Rounds = list[tuple[str, int, tuple[int, ...]]]  # request, tokens so far, drafts


@cache
def weight() -> Tensor:  # [D, 2 D]
    width = deep_model().config.hidden_size
    return torch.randn(width, 2 * width, generator=torch.Generator().manual_seed(1)) * 0.4


@cache
def checkpoint(folder: Path) -> Path:
    save_file({"weight": weight()}, folder / "model.safetensors")
    return folder


def drafted(source: str, folder: Path, **settings: Any) -> Rounds:
    """What the drafter of this source drafts for greedy requests, whose texts must be the plain ones."""
    names: dict[str, Any] = {}
    exec(compile(source, "docs/proposers.md", "exec"), names)
    rounds: Rounds = []

    class Watched(names["StateCell"]):  # type: ignore[misc]
        def propose(self, seqs: list[Sequence], ks: list[int]) -> list[Draft]:
            drafts = super().propose(seqs, ks)
            made = zip(seqs, drafts, strict=True)
            rounds.extend((seq.request.id, len(seq.tokens), draft.tokens) for seq, draft in made)
            return drafts

    register("state_cell", Watched.build)
    engine = make_engine(deep_target(), speculation={"draft": {"state_cell": str(folder)}}, **settings)
    for request in requests_of("greedy"):
        asked = {"method": "state_cell", "num_speculative_tokens": K}
        engine.add_request(request.prompt, request.params, asked, request.id)
    assert texts_of(drain(engine)) == plain("greedy")
    return rounds


@cache
def states_after_last_layer(request: str) -> Tensor:  # [n, D]
    """What the stock model's last layer leaves of each token; its own `hidden_states` have passed a norm."""
    kept: list[Tensor] = []
    layer: Any = deep_model().get_decoder().layers[-1]
    hook = layer.register_forward_hook(lambda module, arguments, out: kept.append(out))
    with torch.inference_mode():
        deep_model()(torch.tensor([whole("greedy")[request, 0]]))
    hook.remove()
    return kept[0].view(-1, weight().shape[0])


@torch.inference_mode()
def expected(request: str, length: int, count: int) -> tuple[int, ...]:
    last, state = whole("greedy")[request, 0][length - 1], states_after_last_layer(request)[length - 2]
    embedding, head = deep_model().get_input_embeddings().weight, deep_model().get_output_embeddings()
    drafts: list[int] = []
    for _ in range(count):
        state = torch.tanh(weight() @ torch.cat([embedding[last], state]))
        last = int(head(state).argmax())
        drafts.append(last)
    return tuple(drafts)


def wrong(rounds: Rounds) -> Rounds:
    return [(name, n, tokens) for name, n, tokens in rounds if tokens != expected(name, n, len(tokens))]


@pytest.mark.parametrize("setting", SETTINGS)
def test_its_drafts_are_those_of_the_formula(setting: str, tmp_path: Path) -> None:
    rounds = drafted(SHOWN, checkpoint(tmp_path), **SETTINGS[setting])
    assert wrong(rounds) == []
    drafts = {tokens for _, _, tokens in rounds}
    assert {name for name, _, _ in rounds} == {one.id for one in requests_of("greedy")}
    assert len(drafts) > 10 and max(map(len, drafts)) == K


@pytest.mark.parametrize(
    ("right", "planted"),
    [
        ("taps=(last,)", "taps=(last - 1,)"),
        ("states[i] = state", "pass"),
        ("(drafts[i] or seqs[i].tokens)[-1]", "seqs[i].tokens[-1]"),
    ],
    ids=["another layer", "a state that stays", "a token that stays"],
)
def test_a_planted_error_changes_its_drafts_and_no_text(right: str, planted: str, tmp_path: Path) -> None:
    assert SHOWN.count(right) == 1
    assert wrong(drafted(SHOWN.replace(right, planted), checkpoint(tmp_path)))


def test_a_checkpoint_that_is_missing_or_of_another_width_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="none/model.safetensors: no such file"):
        drafted(SHOWN, tmp_path / "none")
    save_file({"weight": weight()[:, :-1].contiguous()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"weight is \[32, 63\], not \[32, 64\]"):
        drafted(SHOWN, tmp_path)
