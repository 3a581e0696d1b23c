"""Block drafters: training computes what a block does, and the losses are the formulas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from speculon.core.errors import InvalidParameter
from speculon.drafters.dflash.network import RecurrentMarkovHead
from speculon.train import dflash, trainer
from speculon.train.data import Rows
from speculon.train.dflash import Blocks, DFlashDrafter, DFlashTraining, DSparkTraining, draw_blocks
from speculon.train.run import train
from speculon.train.settings import FlashSettings, SparkSettings
from speculon.train.teacher import Batch, Dataset, Teacher, tap_ids
from tests.tiny.block_reference import block_states, flash_loss, spark_loss
from tests.tiny.training import Interrupted, Silent, make_world, settings

SHAPE: dict[str, Any] = {"block": 4, "layers": 2, "anchors": 6}
FORMS = [
    pytest.param("dflash", {}, id="dflash"),
    pytest.param("dflash", {"loss": "ce", "gamma": 1.5, "block": 2}, id="dflash, cross entropy"),
    pytest.param("dflash", {"kv_heads": 1, "intermediate": 24, "taps": "0,1"}, id="dflash, other shape"),
    pytest.param("dspark", {"markov_rank": 5}, id="dspark"),
    pytest.param("dspark", {"markov_rank": 3, "confidence": 0}, id="dspark without confidence"),
    pytest.param("dspark", {"markov_rank": 5, "markov_head": "gated"}, id="dspark, gated"),
    pytest.param("dspark", {"markov_rank": 5, "markov_head": "rnn", "loss": "kl"}, id="dspark, rnn, kl"),
]


def method_of(name: str, form: dict[str, Any]) -> DFlashTraining | DSparkTraining:
    given = {**SHAPE, **form}
    if name == "dflash":
        return DFlashTraining(FlashSettings(**given))
    return DSparkTraining(SparkSettings(**given))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("blocks"))


def teacher_of(world: Path, method: DFlashTraining | DSparkTraining) -> Teacher:
    return Teacher(str(world / "target"), method.taps, "fp32", "cpu")


def some_rows(teacher: Teacher, length: int = 24) -> Rows:
    """Three rows, some of whose tokens are not learned."""
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(3, teacher.vocab_size, (3, length), generator=chance)
    weights = torch.rand(3, length, generator=chance)
    weights[0, 5:8] = weights[1, 15:] = 0
    return Rows(ids.int().numpy(), weights.numpy())


def made(world: Path, name: str, form: dict[str, Any]) -> tuple[Any, Teacher, DFlashDrafter, Batch]:
    """A drafter whose every parameter matters, and a batch."""
    method = method_of(name, form)
    teacher = teacher_of(world, method)
    method.check(teacher)
    rows = some_rows(teacher)
    torch.manual_seed(0)
    drafter = method.drafter(teacher, rows)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return method, teacher, drafter, Dataset(teacher, rows, world / "none", 0).batch([0, 1, 2], draw=3)


def reference_states(
    drafter: DFlashDrafter, teacher: Teacher, batch: Batch, anchors: Tensor, folder: Path
) -> dict[tuple[int, int], Tensor]:
    """States [S, H] by row and anchor, of the config that was written."""
    config = json.loads((folder / "config.json").read_text())
    mask = config.get("dflash_config", config)["mask_token_id"]
    tensors = dict(drafter.named_parameters())
    return {
        (row, anchor): block_states(
            tensors, config, mask, int(batch.ids[row, anchor]), batch.taps[row, :anchor], teacher.embed
        )
        for row in range(len(anchors))
        for anchor in anchors[row].tolist()
    }


def drawn(drafter: DFlashDrafter, batch: Batch) -> Blocks:
    return draw_blocks(batch.weights, drafter.anchors, drafter.config.max_drafts, batch.draw)


def compare_with_the_formulas(world: Path, name: str, form: dict[str, Any], folder: Path) -> None:
    """States, loss and gradients of one batch."""
    method, teacher, drafter, batch = made(world, name, form)
    method.write(drafter, teacher, "somewhere", folder)
    anchors = drawn(drafter, batch).anchors
    states = reference_states(drafter, teacher, batch, anchors, folder)
    found = drafter.block_states(batch.ids, batch.taps, anchors)
    for (row, anchor), expected in states.items():
        place = anchors[row].tolist().index(anchor)
        torch.testing.assert_close(
            found[row, place], expected[-drafter.config.max_drafts :], rtol=1e-3, atol=1e-4
        )
    head, gamma = teacher.head.weight, method.settings.decay_length
    tensors = dict(drafter.named_parameters())
    if name == "dflash":
        expected = flash_loss(states, batch, head, gamma, method.settings.loss == "kl")
    else:
        soft = method.settings.loss == "kl"
        expected = spark_loss(states, batch, head, tensors, gamma, soft, method.settings.confidence)
    loss = drafter.loss(batch)
    torch.testing.assert_close(loss, expected, rtol=1e-3, atol=1e-4)
    slow = torch.autograd.grad(expected, list(tensors.values()), allow_unused=True)
    fast = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    for parameter, one, other in zip(tensors, fast, slow, strict=True):
        assert one is not None and other is not None, parameter
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda m, n=parameter: f"{n}: {m}")


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_training_computes_the_formulas(world: Path, tmp_path: Path, name: str, form: dict[str, Any]) -> None:
    compare_with_the_formulas(world, name, form, tmp_path)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_causal_mask_in_the_block_is_found(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def causal(q: Tensor, k: Tensor, v: Tensor, own_k: Tensor, own_v: Tensor, anchors: Tensor) -> Tensor:
        rows = range(q.shape[2])
        each = [
            attend(q[:, :, i : i + 1], k, v, own_k[:, :, : i + 1], own_v[:, :, : i + 1], anchors)
            for i in rows
        ]
        return torch.cat(each, 2)

    attend = dflash.attend
    monkeypatch.setattr(dflash, "attend", causal)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_the_formulas(world, name, {}, tmp_path)


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_label_shifted_by_one_is_found(
    world: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(blocks: Blocks, values: Tensor) -> Tensor:
        return of(blocks, values if values.ndim < 3 else values.roll(-1, 1))  # p alone

    of = Blocks.of
    monkeypatch.setattr(Blocks, "of", shifted)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_the_formulas(world, name, {}, tmp_path)


def test_a_block_that_sees_its_anchors_taps_is_found(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not exist when the block is drafted."""
    seen = dflash.attend
    monkeypatch.setattr(dflash, "attend", lambda *given: seen(*given[:-1], given[-1] + 1))
    with pytest.raises((AssertionError, RuntimeError)):
        compare_with_the_formulas(world, "dflash", {}, tmp_path)


def test_a_recurrent_head_that_forgets_is_found(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(head: RecurrentMarkovHead, tokens: Tensor, hidden: Tensor) -> Tensor:
        rows = range(tokens.shape[-1])
        return torch.cat([latents(head, tokens[..., i : i + 1], hidden[..., i : i + 1, :]) for i in rows], -2)

    latents = dflash.markov_latents
    monkeypatch.setattr(dflash, "markov_latents", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        compare_with_the_formulas(world, "dspark", {"markov_head": "rnn"}, tmp_path)


def test_chunks_of_anchors_change_nothing(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, drafter, batch = made(world, "dflash", {"anchors": 20})
    anchors = drawn(drafter, batch).anchors
    whole = drafter.block_states(batch.ids, batch.taps, anchors)
    monkeypatch.setattr(dflash, "CHUNK", 3)
    torch.testing.assert_close(drafter.block_states(batch.ids, batch.taps, anchors), whole)


def test_anchors_are_drawn_where_the_next_token_is_learned() -> None:
    weights = torch.ones(2, 40)
    weights[0, :20] = weights[1, 30:] = 0
    blocks = draw_blocks(weights, 12, 4, draw=5)
    assert blocks.anchors.shape == (2, 12) and blocks.at.shape == (2, 12, 4)
    first, second = blocks.anchors
    assert torch.equal(first, first.sort().values) and len(first.unique()) == 12
    assert first.min() >= 20 and first.max() < 36
    assert second.min() > 0 and second.max() < 30
    assert torch.equal(blocks.weights[1] > 0, blocks.at[1] < 30)  # nothing after a token that is not learned
    again = draw_blocks(weights, 12, 4, draw=5)
    assert torch.equal(again.anchors, blocks.anchors)
    assert not torch.equal(draw_blocks(weights, 12, 4, draw=6).anchors, blocks.anchors)
    gap = torch.ones(1, 10)
    gap[0, 4] = 0
    few = draw_blocks(gap, 99, 3, draw=0)
    assert few.anchors.tolist() == [list(range(7))]
    assert (few.weights[0] > 0).sum(-1).tolist() == [3, 3, 2, 1, 0, 3, 3]


def test_taps_are_evenly_spread() -> None:
    """The layers of published drafters."""
    assert tap_ids(5, 36) == (1, 9, 17, 25, 33)
    assert tap_ids(5, 64) == (1, 16, 31, 46, 61)
    assert tap_ids(5, 24) == (1, 6, 11, 16, 21)
    assert tap_ids(1, 36) == (18,)
    assert tap_ids(5, 2) == (1,)


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_steps_lower_the_loss_of_a_batch(world: Path, name: str, form: dict[str, Any]) -> None:
    _, _, drafter, batch = made(world, name, form)
    before = drafter.loss(batch)
    before.backward()
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1e-3)
    optimizer.step()
    assert drafter.loss(batch) < before


@pytest.mark.soak
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_drafter_learns_and_drafts_in_the_engine(world: Path, name: str) -> None:
    own = {"regenerate": 60, "regenerate_tokens": 32, "eval_prompts": 6, "eval_data": (world / "texts",)}
    given = settings(world, name, steps=200, eval_every=100, optimizer="muon", lr=5e-3, muon_lr=2e-2, **own)
    method = method_of(name, {"anchors": 40, "taps": "0,1"})
    done = train(method, given, Silent())
    assert done.record is not None
    record = json.loads((given.out / "training.json").read_text())
    assert record["loss_at_last"] < 0.8 * record["loss_at_first"]
    held, drafts = record["held_out"], 3 if name == "dflash" else 4
    assert len(held["accuracy"]) == drafts
    assert held["accuracy"][0] == held["accuracy_full"][0] >= held["accuracy_full"][1]
    tried = record["evaluation"]
    assert (tried["drafts_per_round"], len(tried["acceptance_per_position"])) == (drafts, drafts)
    assert tried["tokens_per_target_call"] > 1.05
    config = json.loads((given.out / "config.json").read_text())
    teacher = teacher_of(world, method)
    fresh = method.drafter(teacher, some_rows(teacher))
    tensors = load_file(given.out / "model.safetensors")
    fresh.load_state_dict({key: value.float() for key, value in tensors.items()}, strict=True)
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    assert not {"embed_tokens.weight", "lm_head.weight"} & tensors.keys()
    assert (config["block_size"], config["num_target_layers"]) == (4, 2)
    if name == "dflash":
        assert config["architectures"] == ["DFlashDraftModel"]
        assert config["dflash_config"] == {
            "mask_token_id": fresh.config.mask_token_id,
            "target_layer_ids": [0, 1],
        }
    else:
        assert config["architectures"] == ["Qwen3DSparkModel"]
        assert config["target_layer_ids"] == [0, 1] and config["markov_rank"] == 256
        assert tensors["confidence_head.proj.weight"].shape == (1, teacher.width + 256)


def last_tensors(world: Path, name: str, method: str, stop: int | None) -> dict[str, Tensor]:
    """The checkpoint after twelve steps, in one session or in two."""
    given = settings(world, name, eval_rows=0, save_minutes=1e-9)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            train(method_of(method, {}), given, Interrupted(stop))
    train(method_of(method, {}), given, Silent())
    with safe_open(given.folder / "checkpoint.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_a_resumed_run_ends_at_the_same_weights(world: Path, name: str) -> None:
    whole = last_tensors(world, f"{name} whole", name, None)
    resumed = last_tensors(world, f"{name} resumed", name, 5)
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-5, atol=1e-7)


def test_anchors_that_a_resumed_run_draws_anew_are_found(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = last_tensors(world, "sober", "dflash", None)
    calls = iter(range(1000))
    monkeypatch.setattr(trainer, "seed_of", lambda seed, step: next(calls) + 100)
    resumed = last_tensors(world, "astray", "dflash", 5)
    assert not torch.allclose(resumed["model/fc.weight"], whole["model/fc.weight"], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("form", "changes", "words"),
    [
        pytest.param({"taps": "-1,0"}, {}, "taps = -1: the format of block drafters", id="embeddings"),
        pytest.param({"mask_token": 10**6}, {}, "mask_token = 1000000: the target has", id="mask"),
        pytest.param({"heads": 3}, {}, "heads = 3: a multiple of kv_heads", id="heads"),
        pytest.param({"block": 16}, {"length": 32}, "length = 32: more than twice the 16", id="short row"),
    ],
)
def test_forms_that_do_not_fit_the_target_are_refused(
    world: Path, form: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParameter, match=words):
        train(method_of("dflash", form), settings(world, "refused", **changes), Silent())
