"""Training: fast losses match their references, the engine runs what was trained, bad input is refused."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from typer.testing import CliRunner

from speculon.checkpoints.reading import quiet
from speculon.cli import app
from speculon.cli.train import length
from speculon.core.errors import ConfigError, DataError, InvalidParameter
from speculon.runtimes.torch.drafters.families import read_eagle3_config
from speculon.train import losses
from speculon.train.data import DocumentRows
from speculon.train.draft_model import DraftModelTraining
from speculon.train.eagle3 import Eagle3Head, Eagle3Training
from speculon.train.run import train
from speculon.train.settings import DraftSettings, HeadSettings
from speculon.train.teacher import Dataset, Teacher
from tests.rounding import assert_near
from tests.tiny.conftest import tiny_model
from tests.tiny.eagle_reference import forward, fuse
from tests.tiny.loss_reference import attention_reference, kl_reference
from tests.tiny.training import QUICK, Silent, make_world, settings

FORMS = [
    pytest.param({}, id="usual"),
    pytest.param({"fc_norm": True, "norm_before_fc": False}, id="norm per tap"),
    pytest.param(
        {"norm_before_fc": False, "norm_before_residual": False, "norm_output": False}, id="no norms"
    ),
    pytest.param({"layers": 2, "kv_heads": 1, "intermediate": 24}, id="two layers"),
    pytest.param({"draft_vocab": 64, "taps": "-1,0"}, id="small vocabulary, two taps"),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_world(tmp_path_factory.mktemp("train"))


@pytest.fixture
def teacher(world: Path) -> Teacher:
    return Teacher(str(world / "target"), None, "fp32", "cpu")


def rows_of(teacher: Teacher, count: int = 3, length: int = 20) -> DocumentRows:
    chance = torch.Generator().manual_seed(1)
    ids = torch.randint(3, teacher.vocab_size, (count, length), generator=chance)
    return DocumentRows(ids.int().numpy(), torch.rand(count, length, generator=chance).numpy())


def best_of(teacher: Teacher, states: Tensor) -> Tensor:
    return teacher.best(states[..., -teacher.width :])


def head_of(
    teacher: Teacher, rows: DocumentRows, form: dict[str, Any], steps: int = 3
) -> tuple[Eagle3Training, Eagle3Head]:
    """A head whose every parameter matters."""
    method = Eagle3Training(HeadSettings(ttt=steps, **form))
    torch.manual_seed(0)
    head = method.drafter(teacher, rows)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return method, head


def gradients(form: Any, *tensors: Tensor) -> list[Tensor]:
    """What `form` yields, and its gradient by each tensor."""
    fresh = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = form(*fresh)
    (
        out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    ).sum().backward() if out.ndim else out.backward()
    return [out.detach(), *(tensor.grad for tensor in fresh if tensor.grad is not None)]


@pytest.mark.parametrize(("steps", "rows"), [(1, 7), (4, 300)])
def test_attention_matches_its_reference(steps: int, rows: int) -> None:
    torch.manual_seed(steps)
    q, *both = (torch.randn(2, heads, rows, 8, dtype=torch.float64) for heads in (4, *[2] * (2 * steps)))
    found, expected = (
        gradients(lambda q, *kv, form=form: form(q, list(kv[:steps]), list(kv[steps:])), q, *both)
        for form in (losses.attention, attention_reference)
    )
    assert len(found) == 2 + 2 * steps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_loss_matches_its_reference() -> None:
    torch.manual_seed(0)
    hidden, head, p, weights = (
        torch.randn(40, 16),
        torch.randn(30, 16),
        torch.randn(40, 30).softmax(-1),
        torch.rand(40),
    )
    entropy = -(p * p.log()).sum(-1)
    found = gradients(lambda h, w: losses.kl(h, w, p, entropy, weights), hidden, head)
    expected = gradients(lambda h, w: kl_reference(h @ w.T, p, weights), hidden, head)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    same = kl_reference(p.log(), p, weights)
    assert abs(float(same)) < 1e-5


@pytest.mark.parametrize("form", FORMS)
def test_training_computes_what_a_chain_of_drafts_does(
    form: dict[str, Any], teacher: Teacher, tmp_path: Path
) -> None:
    """Row i of step k equals the head run row by row: i + 1 of the target's states, then k of its own."""
    rows = rows_of(teacher)
    teacher.taps = HeadSettings(**form).tap_ids or teacher.taps
    method, head = head_of(teacher, rows, form)
    method.write(head, teacher, "somewhere", tmp_path)
    config = read_eagle3_config(tmp_path)  # what the config says of the form
    tensors = {name: value.detach() for name, value in head.named_parameters()}
    batch = Dataset(teacher, rows, tmp_path / "states", 0).batch([0, 1, 2])
    with torch.no_grad():
        steps = [head.lm_head(hidden) for hidden in head.hiddens(batch.ids, batch.taps)]  # 3 of [B, N, Vd]
        for row in range(3):
            ids, states = batch.ids[row].tolist(), fuse(tensors, config, batch.taps[row])
            for i in (0, 5, 16):
                tokens, u = ids[1 : i + 2], states[: i + 1]
                for k, found in enumerate(steps):
                    back, logits = forward(tensors, config, tokens, u, teacher.embed, None)
                    torch.testing.assert_close(found[row, i], logits[-1], rtol=1e-3, atol=1e-4)
                    tokens, u = (
                        [*tokens, ids[i + 2 + k]] if i + 2 + k < len(ids) else tokens,
                        torch.cat([u, back[-1:]]),
                    )


def loss_is_off_by(teacher: Teacher, folder: Path) -> float:
    """How far the loss of a head is from the sum over its steps, and over their rows, of the divergence."""
    rows = rows_of(teacher)
    _, head = head_of(teacher, rows, {"decay": 0.6})
    batch = Dataset(teacher, rows, folder / "states", 0).batch([0, 1, 2])
    with torch.no_grad():
        expected = torch.zeros(())
        for k, states in enumerate(head.hiddens(batch.ids, batch.taps)):
            at = [i + 1 + k for i in range(states.shape[1])]  # which predict token i + 2 + k
            p, weights = batch.p[:, at].flatten(0, 1), batch.weights[:, at].flatten()
            expected += 0.6**k * kl_reference(head.lm_head(states).flatten(0, 1), p, weights)
        return float((head.loss(batch) - expected).abs())


def test_the_loss_of_a_head_is_the_sum_over_its_steps(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loss_is_off_by(teacher, tmp_path) < 1e-3
    right = Eagle3Head._positions
    monkeypatch.setattr(
        Eagle3Head, "_positions", lambda self, step, batch: right(self, max(step - 1, 0), batch)
    )
    assert loss_is_off_by(teacher, tmp_path) > 1e-2


def test_a_step_without_its_own_rows_is_found(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forgetful(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        return attention_reference(q, keys[:1], values[:1])

    monkeypatch.setattr("speculon.train.eagle3.attention", forgetful)
    with pytest.raises(AssertionError, match="not close"):
        test_training_computes_what_a_chain_of_drafts_does({}, teacher, tmp_path)


def test_taps_and_logits_are_the_targets(teacher: Teacher) -> None:
    teacher.taps = (-1, 0)
    ids = torch.from_numpy(rows_of(teacher).ids).long()
    states = teacher.states(ids)
    with torch.no_grad():
        out = teacher.model(ids, output_hidden_states=True)
    expected = torch.cat([out.hidden_states[0], out.hidden_states[1], out.hidden_states[-1]], -1)
    assert_near(states, expected, len(teacher.layers))
    batch = teacher.batch(ids, torch.ones(ids.shape), states, best_of(teacher, states))
    assert_near(batch.p.log(), out.logits.log_softmax(-1), len(teacher.layers))
    entropy = torch.distributions.Categorical(logits=out.logits).entropy()
    assert_near(batch.entropy, entropy, len(teacher.layers))
    assert torch.equal(batch.best, out.logits.argmax(-1))


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "deepseek_v3", "gpt2"])
def test_architectures_of_every_kind_can_be_a_teacher(name: str, tmp_path: Path) -> None:
    with quiet():
        tiny_model(name).save_pretrained(tmp_path)
    teacher = Teacher(str(tmp_path), None, "fp32", "cpu")
    rows = rows_of(teacher)
    ids = torch.from_numpy(rows.ids).long()
    with torch.no_grad():
        out = teacher.model(ids, output_hidden_states=True)
    states = teacher.states(ids)
    assert_near(teacher.logits(states[..., -teacher.width :]), out.logits, len(teacher.layers))
    for tap, found in zip(teacher.taps, states.split(teacher.width, -1), strict=False):
        if tap + 1 < len(teacher.layers):  # the last of them has been normed
            assert_near(found, out.hidden_states[tap + 1], len(teacher.layers))
    for method in (Eagle3Training(HeadSettings(ttt=2)), DraftModelTraining(DraftSettings(layers=2))):
        drafter = method.drafter(teacher, rows)
        drafter.loss(Dataset(teacher, rows, tmp_path / "none", 0).batch([0, 1])).backward()
        assert all(parameter.grad is not None for parameter in drafter.parameters())


def test_a_small_vocabulary_learns_only_draftable_tokens(teacher: Teacher) -> None:
    ids = torch.from_numpy(rows_of(teacher).ids).long()
    states = teacher.states(ids)
    best = best_of(teacher, states)
    whole = teacher.batch(ids, torch.ones(ids.shape), states, best)
    teacher.used = whole.best.unique()[::2]
    part = teacher.batch(ids, torch.ones(ids.shape), states, best)
    assert torch.equal(part.weights > 0, torch.isin(whole.best, teacher.used))
    expected = whole.p[..., teacher.used] / whole.p[..., teacher.used].sum(-1, keepdim=True)
    learned = part.weights > 0
    assert_near(part.p[learned].log(), expected[learned].log(), len(teacher.layers))
    assert not part.p[~learned].any()


def test_states_are_cached_within_the_limit_and_reused(
    teacher: Teacher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = rows_of(teacher)
    row_bytes = 20 * 4 * teacher.width * 4  # tokens x (three taps and the last state) x fp32
    fresh = Dataset(teacher, rows, tmp_path / "none", 0).batch([0, 1, 2])
    kept = Dataset(teacher, rows, tmp_path / "states", 2 * row_bytes)
    kept.batch([1, 2])
    assert (tmp_path / "states").stat().st_size == 2 * row_bytes
    again = Dataset(teacher, rows, tmp_path / "states", 2 * row_bytes)
    seen: list[int] = []
    monkeypatch.setattr(
        teacher, "states", lambda ids, states=teacher.states: seen.append(len(ids)) or states(ids)
    )
    batch = again.batch([0, 1, 2])
    assert seen == [2]  # row 0, which nobody had asked for, and row 2, which had no room
    assert_near(batch.taps, fresh.taps, len(teacher.layers))
    assert_near(batch.p.log(), fresh.p.log(), len(teacher.layers))
    (tmp_path / "states").unlink()  # to make room
    made_again = Dataset(teacher, rows, tmp_path / "states", 2 * row_bytes).batch([0, 1, 2])
    assert_near(made_again.taps, fresh.taps, len(teacher.layers))
    monkeypatch.setattr(
        "speculon.train.teacher.shutil.disk_usage", lambda folder: SimpleNamespace(free=1.2 * row_bytes)
    )
    assert Dataset(teacher, rows, tmp_path / "full disk", 1e9).room == 1


@pytest.mark.soak
def test_a_head_learns_and_drafts_in_the_engine(world: Path) -> None:
    own = {"regenerate": 60, "regenerate_tokens": 32, "eval_prompts": 6, "eval_data": (world / "texts",)}
    given = settings(world, "head", steps=100, eval_every=100, optimizer="muon", lr=5e-3, muon_lr=2e-2, **own)
    done = train(Eagle3Training(HeadSettings(ttt=3)), given, Silent())
    assert done.record is not None
    record = json.loads((given.out / "training.json").read_text())
    assert record == json.loads(json.dumps(done.record))
    assert record["loss_at_last"] < 0.5 * record["loss_at_first"]
    tried, held = record["evaluation"], record["held_out"]
    assert tried["tokens_per_target_call"] > 1.1
    assert tried["acceptance_per_position"][0] > 0.1  # of 400 tokens
    assert len(tried["acceptance_per_position"]) == 3
    assert (
        held["accuracy"][0]
        == held["accuracy_full"][0]
        >= held["accuracy_full"][1]
        >= held["accuracy_full"][2]
    )
    assert record["data"]["hash"] == json.loads((given.folder / "run.json").read_text())["rows_hash"]
    config = read_eagle3_config(given.out)
    assert (config.format, config.taps, config.norm_output, config.speculative_tokens) == (
        "speculators",
        3,
        True,
        3,
    )
    assert config.tap_layouts(2)[0] == (-1, 0, 1)


@pytest.mark.parametrize(
    ("given", "steps", "ended_by"),
    [
        pytest.param({"steps": 12, "minutes": 1e-6}, 1, "minutes = 1e-06", id="minutes first"),
        pytest.param({"steps": 2, "minutes": 1e3}, 2, "steps = 2", id="steps first"),
    ],
)
def test_the_first_limit_ends_a_run(
    world: Path, tmp_path: Path, given: dict[str, Any], steps: int, ended_by: str
) -> None:
    own = settings(world, "limited", work=tmp_path / "work", eval_rows=0, **given)
    done = train(Eagle3Training(HeadSettings(ttt=1)), own, Silent())
    assert done.record is not None and done.step == steps
    assert re.fullmatch(rf"{steps} steps in [\d.]+ minutes; ended by {ended_by}", length(done.record))


def test_without_a_limit_a_run_has_2000_steps(world: Path) -> None:
    assert settings(world, "usual", steps=None).limits == {"steps": 2000}


def test_a_head_with_a_draft_vocabulary_has_d2t(world: Path) -> None:
    given = settings(world, "few", steps=2)
    train(Eagle3Training(HeadSettings(ttt=2, draft_vocab=32)), given, Silent())
    tensors = load_file(given.out / "model.safetensors")
    used = torch.arange(32) + tensors["d2t"]
    assert torch.equal(used, tensors["t2d"].nonzero().ravel())
    teacher = Teacher(given.target, None, "fp32", "cpu")
    assert tensors["lm_head.weight"].shape == (32, teacher.width)
    assert not {"embed_tokens.weight", "embed"} & tensors.keys()
    assert read_eagle3_config(given.out).draft_vocab_size == 32


def test_answers_are_regenerated_once(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = settings(world, "own", steps=1, regenerate=40, regenerate_tokens=8)
    train(Eagle3Training(HeadSettings(ttt=1)), given, Silent())
    file = given.folder / "regenerated.jsonl"
    lines = file.read_text()
    assert len(lines.splitlines()) == 40
    assert all(len(r["tokens"]) <= r["prompt_tokens"] + 8 for r in map(json.loads, lines.splitlines()))
    file.write_text(lines[: len(lines) // 2])  # a killed run, in the middle of a line
    train(Eagle3Training(HeadSettings(ttt=1)), given, Silent())
    assert file.read_text() == lines
    monkeypatch.setattr("speculon.train.regenerate.LLM", None)
    train(Eagle3Training(HeadSettings(ttt=1)), given, Silent())


@pytest.mark.parametrize("form", ["messages", "prompt"])
def test_prompts_alone_are_answered_by_the_target(world: Path, tmp_path: Path, form: str) -> None:
    texts = [f"def f{number}(items):" for number in range(60)]
    records = [
        {"prompt": text} if form == "prompt" else {"messages": [{"role": "user", "content": text}]}
        for text in texts
    ]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    own: dict[str, Any] = {"data": (file,), "work": tmp_path / "work", "steps": 2, "eval_prompts": 1}
    given = settings(world, f"answers to {form}", regenerate=30, regenerate_tokens=16, **own)
    done = train(Eagle3Training(HeadSettings(ttt=1)), given, Silent())
    assert done.record is not None and done.record["data"]["answer_tokens"] > 100
    assert done.record["evaluation"]["emitted"] > 0
    with pytest.raises(DataError, match="--regenerate"):
        train(Eagle3Training(HeadSettings(ttt=1)), given.model_copy(update={"regenerate": 0}), Silent())


@pytest.mark.parametrize(
    ("changes", "form", "words"),
    [
        pytest.param(
            {"length": 2048},
            {},
            "length = 2048: must be at most the target's context, 1024",
            id="beyond the context",
        ),
        pytest.param(
            {"length": 16}, {"ttt": 8}, "must be more than twice 8, the tokens of a draft", id="row too short"
        ),
        pytest.param(
            {},
            {"taps": "0,2"},
            "taps = 2: must be from -1 to 1, since the target has 2 layers",
            id="tap out of range",
        ),
        pytest.param({}, {"draft_vocab": 10**6}, "draft_vocab = 1000000: must be at most", id="vocabulary"),
        pytest.param({}, {"heads": 3}, "heads = 3: must be a multiple of kv_heads, 2", id="heads"),
        pytest.param(
            {"regenerate": 10**6, "regenerate_tokens": 8},
            {"heads": 3},
            "heads = 3",
            id="before regeneration",
        ),
    ],
)
def test_settings_that_do_not_fit_the_target_are_refused(
    world: Path, changes: dict[str, Any], form: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidParameter, match=words):
        train(Eagle3Training(HeadSettings(**form)), settings(world, "refused", **changes), Silent())


def test_the_target_is_not_written_over(world: Path) -> None:
    before = (world / "target" / "config.json").read_bytes()
    with pytest.raises(InvalidParameter, match="the target's own folder, which would be overwritten"):
        train(Eagle3Training(HeadSettings(ttt=2)), settings(world, "target", steps=1), Silent())
    assert (world / "target" / "config.json").read_bytes() == before


def test_another_run_in_the_same_folder_is_refused_by_name(
    world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(Eagle3Training(HeadSettings(ttt=2)), settings(world, "taken", steps=1), Silent())
    with pytest.raises(ConfigError, match=r"holds a run with ttt = 2, now 3"):
        train(Eagle3Training(HeadSettings(ttt=3)), settings(world, "taken", steps=1), Silent())
    with pytest.raises(ConfigError, match=r"holds a run with seed = 0, now 1"):
        train(Eagle3Training(HeadSettings(ttt=2)), settings(world, "taken", steps=1, seed=1), Silent())
    with monkeypatch.context() as patch, pytest.raises(ConfigError, match="target_hash"):
        patch.setattr(Teacher, "fingerprint", "another")
        train(Eagle3Training(HeadSettings(ttt=2)), settings(world, "taken", steps=1), Silent())
    (world / "texts" / "more.py").write_text("one more\n")
    try:
        with pytest.raises(ConfigError, match=r"rows_hash"):
            train(Eagle3Training(HeadSettings(ttt=2)), settings(world, "taken", steps=1), Silent())
    finally:
        (world / "texts" / "more.py").unlink()


def test_answers_of_another_run_are_not_used(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it was stopped while the target still wrote them."""
    own = {"steps": 1, "regenerate": 40, "regenerate_tokens": 8}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("speculon.train.run.regenerate", Mock(side_effect=KeyboardInterrupt))
        train(Eagle3Training(HeadSettings(ttt=1)), settings(world, "stopped", **own), Silent())
    with pytest.raises(ConfigError, match=r"holds a run with seed = 0, now 1"):
        train(Eagle3Training(HeadSettings(ttt=1)), settings(world, "stopped", **own, seed=1), Silent())
    assert train(Eagle3Training(HeadSettings(ttt=1)), settings(world, "stopped", **own), Silent()).step == 1


def test_the_command_line_reports_errors_and_results(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: str) -> tuple[int, Any]:
        done = CliRunner().invoke(app, ["train", *words, "--json"])
        return done.exit_code, json.loads(done.stdout)

    given = {
        **QUICK,
        "target": world / "target",
        "data": world / "texts",
        "out": world / "by command",
        "steps": 2,
    }
    options = [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert run("eagle3", "--out", "x") == (
        2,
        {"error": {"type": "InvalidParameter", "message": "target = None: Field required"}},
    )
    code, refused = run("draft", *options, "--layers", "0")
    assert (code, refused["error"]["message"]) == (
        2,
        "layers = 0: Input should be greater than or equal to 1",
    )
    code, refused = run("eagle3", *options, "--data", str(world / "none"))
    assert (code, refused["error"]["type"]) == (2, "DataError")
    with monkeypatch.context() as patch:
        patch.setattr("speculon.train.run.regenerate", Mock(side_effect=KeyboardInterrupt))
        stopped = CliRunner().invoke(
            app, ["train", "eagle3", *options, "--ttt", "2", "--regenerate", "4", "--regenerate-tokens", "8"]
        )
        assert (stopped.exit_code, "the same command resumes" in stopped.stderr) == (130, True)
    shutil.rmtree(world / "by command.work")
    code, record = run("eagle3", *options, "--ttt", "2")
    assert (code, record["steps"], record["method"], record["form"]["ttt"]) == (0, 2, "eagle3", 2)
