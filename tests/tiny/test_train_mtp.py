"""Training MTP modules: its rows are those of the proposer, and what it writes drafts better."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from speculon.cli import app
from speculon.core.config import EngineConfig, SamplingParams
from speculon.core.errors import InvalidParameter, ModelError, UnsupportedModel, WrongPair
from speculon.decoding.text.tokenizer import Tokenizer
from speculon.drafters.choose import with_drafts
from speculon.drafters.families import family_of
from speculon.drafters.mtp.tensors import find_mtp
from speculon.drafters.pairing import check_fit
from speculon.loading.headers import read_checkpoint
from speculon.loading.reading import load_tokenizer
from speculon.train import mtp as training
from speculon.train.data import Rows
from speculon.train.losses import StepDrafter
from speculon.train.mtp import MtpDrafter, MtpTraining
from speculon.train.regenerate import evaluate
from speculon.train.run import documents_of, train
from speculon.train.settings import MtpSettings
from speculon.train.teacher import Batch, Teacher
from tests.tiny.loss_reference import kl_reference
from tests.tiny.mtp_forms import FORMS, target_of, watch_mtp, written
from tests.tiny.scripted import drain, make_engine
from tests.tiny.training import QUICK, Interrupted, Silent, make_mtp_world, make_world, settings

K = 4  # drafts of a round: more than any of the forms has modules
PROMPT = [5, 17, 80, 9, 33, 60, 21, 4, 77]
NO_ROWS: Any = None  # modules do not depend on the data


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_mtp_world(tmp_path_factory.mktemp("mtp") / "world", "mimo")


def network(folder: Path, **given: Any) -> tuple[MtpTraining, Teacher, MtpDrafter]:
    """The modules, with some change to every weight."""
    method = MtpTraining(MtpSettings(**{"ttt": K, **given}))
    teacher = Teacher(str(folder), (), "fp32", "cpu")
    method.check(teacher)
    drafter = method.drafter(teacher, NO_ROWS)
    chance = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=chance) * 0.05)
    return method, teacher, drafter


def batch_of(teacher: Teacher, ids: list[int]) -> Batch:
    tokens = torch.tensor([ids])
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0))
    states = teacher.states(tokens)
    return teacher.batch(tokens, weights, states, teacher.best(states[..., -teacher.width :]))


# the rows of training are those of the engine


def off_by(form: str, folder: Path) -> float:
    """The largest difference between rows and logits in training, and those of the proposer with what was
    written to `folder`.
    """
    method, teacher, drafter = network(written(form).folder)
    method.write(drafter, teacher, "somewhere", folder)
    watch = watch_mtp()
    speculation = {**method.speculation(folder), "policy": "fixed"}
    engine = make_engine(target_of(form), speculation=speculation, fuse=False)
    engine.add_request(PROMPT, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), None, "r")
    ids = [*PROMPT, *drain(engine)["r", 0].tokens]
    differences = []
    with torch.no_grad():
        steps = list(drafter.states(batch_of(teacher, ids)))
        for rows in watch.rows:  # of committed tokens
            first = rows.start - rows.module - 1
            found = steps[rows.module][0, first : first + len(rows.states)]
            differences += [found - rows.states[: len(found)]] if len(found) else []
        for made in watch.rounds:  # drafts, right or wrong
            whole = [*ids[: made.length], *made.drafts, *PROMPT][: made.length + K]
            states = drafter.states(batch_of(teacher, whole))
            for k, (after, logits) in enumerate(zip(states, made.logits, strict=False)):
                differences.append(after[0, made.length - 2] @ drafter.head_of(k).T - logits)
    assert len(watch.rounds) > 5 and len(watch.rows) > 5
    return max(float(each.abs().max()) for each in differences)


@pytest.mark.parametrize("form", FORMS)
def test_training_computes_what_the_proposer_does(form: str, tmp_path: Path) -> None:
    assert off_by(form, tmp_path) < 1e-4


def before_the_norm(patch: pytest.MonkeyPatch) -> None:
    """Modules read the target's states as they are before its final norm."""

    def states(self: Teacher, ids: Tensor) -> Tensor:
        norm, self.base.norm = self.base.norm, torch.nn.Identity()
        found = right(self, ids)
        self.base.norm = norm
        return found

    right = Teacher.states
    patch.setattr(Teacher, "states", states)


def one_token_on(patch: pytest.MonkeyPatch) -> None:
    right = MtpDrafter.states
    patch.setattr(
        MtpDrafter, "states", lambda self, batch: right(self, replace(batch, ids=batch.ids.roll(-1, 1)))
    )


def swapped(patch: pytest.MonkeyPatch) -> None:
    """The embedding in the place of the hidden state."""
    load = training.load_modules
    patch.setattr(
        training,
        "load_modules",
        lambda config, target: load(replace(config, hidden_first=not config.hidden_first), target),
    )


def without_own_rows(patch: pytest.MonkeyPatch) -> None:
    """Later steps attend to the first step alone, and to their own row."""

    def mask(self: MtpDrafter, rows: int, again: int, *rest: Any) -> Tensor:
        seen = right(self, rows, again, *rest)
        seen[..., rows : again * rows] = False
        return seen

    right = MtpDrafter._mask
    patch.setattr(MtpDrafter, "_mask", mask)


PLANTED = [
    *((plant, "mimo") for plant in (before_the_norm, one_token_on, swapped, without_own_rows)),
    *((plant, "deepseek, two modules") for plant in (before_the_norm, one_token_on, without_own_rows)),
]


@pytest.mark.parametrize(("plant", "form"), PLANTED)
def test_other_rows_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    assert off_by(form, tmp_path) > 1e-2


def loss_is_off_by(goal: str) -> float:
    """How far the loss is from its formula, over all rows of all steps."""
    _, teacher, drafter = network(written("mimo").folder, loss=goal, decay=0.6)
    batch = batch_of(teacher, list(range(3, 40)))
    expected, ids = torch.zeros(()), batch.ids[0]
    for k, states in enumerate(drafter.states(batch)):
        logits = states[0] @ teacher.head.weight.T
        rows = [i for i in range(len(logits)) if goal == "kl" or i + 2 + k < len(ids)]
        weights = torch.stack([batch.weights[0, i + 1 + k] for i in rows])
        if goal == "kl":
            p = torch.stack([batch.p[0, i + 1 + k] for i in rows])
            each = kl_reference(logits[rows], p, weights)
        else:
            log_q = logits.log_softmax(-1)
            surprise = torch.stack([-log_q[i, ids[i + 2 + k]] for i in rows])
            each = (surprise * weights).sum() / weights.sum()
        expected = expected + 0.6**k * each
    return float((drafter.loss(batch) - expected).abs().detach())


@pytest.mark.parametrize("goal", ["kl", "ce"])
def test_the_loss_is_the_sum_over_steps(goal: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert loss_is_off_by(goal) < 1e-3
    right = StepDrafter._positions
    monkeypatch.setattr(
        StepDrafter, "_positions", lambda self, step, batch: right(self, max(step - 1, 0), batch)
    )
    assert loss_is_off_by(goal) > 1e-2


def test_both_attention_functions_are_equal() -> None:
    _, teacher, drafter = network(written("windows").folder)
    batch = batch_of(teacher, list(range(3, 40)))
    assert drafter.attention == "sdpa"
    fast = list(drafter.states(batch))
    drafter.use_attention("eager")
    for one, other in zip(fast, drafter.states(batch), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("form", "precision"), [("deepseek, two modules", "fp32"), ("glm", "bf16"), ("qwen3_next", "bf16")]
)
def test_every_weight_of_every_module_learns(form: str, precision: str) -> None:
    teacher = Teacher(str(written(form).folder), (), precision, "cpu")
    drafter = MtpTraining(MtpSettings()).drafter(teacher, NO_ROWS)
    with teacher.autocast():
        loss = drafter.loss(batch_of(teacher, list(range(3, 60))))
    loss.backward()
    for name, parameter in drafter.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert parameter.dtype is torch.float32
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


# what is written


@pytest.mark.parametrize("form", ["deepseek, two modules", "deepseek, own head", "glm", "qwen3_5", "mimo"])
def test_the_folder_has_the_names_and_dtypes_of_the_checkpoint(form: str, tmp_path: Path) -> None:
    """Without copies of the target's embedding and head."""
    at = written(form)
    method, teacher, drafter = network(at.folder)
    method.write(drafter, teacher, "somewhere", tmp_path)
    stored, made = load_file(at.folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    own = find_mtp(at.folder)
    assert own is not None
    names = {stored for module in own.modules for stored in module.values()}
    copies = {name for name in names if name.endswith("embed_tokens.weight")}
    copies |= {name for name in names if name.endswith("shared_head.head.weight") and not at.form.own_head}
    assert made.keys() == names - copies
    for name, value in made.items():
        assert (value.shape, value.dtype) == (stored[name].shape, stored[name].dtype), name
        frozen = name.endswith(("shared_head.head.weight", "e_score_correction_bias"))
        assert torch.equal(value, stored[name]) == frozen, name


def test_a_folder_of_modules_is_a_drafter_for_their_target(tmp_path: Path) -> None:
    at = written("deepseek, two modules")
    folder = tmp_path / "near" / "modules"
    method, teacher, drafter = network(at.folder)
    method.write(drafter, teacher, "somewhere", folder)
    family = family_of(folder)
    assert (family.method, family.refusal) == ("mtp", None)
    assert family.summary.startswith("MTP, 2 modules named as DeepSeek's")
    assert check_fit(family, read_checkpoint(at.folder)) == ()
    with pytest.raises(WrongPair, match="for deepseek_v3 of 2 layers and width 32, the target is q"):
        check_fit(family, read_checkpoint(written("mimo").folder))
    named = with_drafts(EngineConfig(model=str(at.folder), speculation={"draft": str(folder)}))
    assert named.speculation.drafts == {"mtp": str(folder)}
    near = {"draft": f"auto:{tmp_path / 'near'}"}
    assert with_drafts(EngineConfig(model=str(at.folder), speculation=near)).speculation.drafts == {
        "mtp": str(folder)
    }
    other = str(written("mimo").folder)
    assert with_drafts(EngineConfig(model=other, speculation=near)).speculation.drafts == {"mtp": other}
    shown = CliRunner().invoke(app, ["inspect", str(folder), "--target", str(at.folder), "--json"])
    assert (json.loads(shown.stdout)["method"], json.loads(shown.stdout)["fits"]) == ("mtp", True)


def test_an_incomplete_module_is_named(tmp_path: Path) -> None:
    method, teacher, drafter = network(written("mimo").folder)
    method.write(drafter, teacher, "somewhere", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors.pop("model.mtp_layers.0.final_layernorm.weight")
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"tensor model\.mtp_layers\.0\.final_layernorm\.weight is missing"):
        family_of(tmp_path)


# runs


@pytest.mark.soak
def test_modules_learn_and_draft_better_in_the_engine(world: Path) -> None:
    own = {"regenerate": 40, "regenerate_tokens": 32, "eval_prompts": 4, "eval_data": (world / "texts",)}
    rates = {"optimizer": "muon", "lr": 5e-3, "muon_lr": 2e-2}
    given = settings(world, "better", steps=100, eval_every=100, **rates, **own)
    done = train(MtpTraining(MtpSettings()), given, Silent())
    assert done.record is not None
    record = json.loads((given.out / "training.json").read_text())
    assert record["loss_at_last"] < 0.5 * record["loss_at_first"]
    assert len(record["held_out"]["accuracy"]) == 3
    teacher = Teacher(given.target, (), "fp32", "cpu")
    held = documents_of(given, Tokenizer(load_tokenizer(given.target)), teacher)[1]
    before = evaluate({"method": "mtp", "num_speculative_tokens": 3}, given, held, Silent())
    after = record["evaluation"]
    assert after["tokens_per_target_call"] > before["tokens_per_target_call"] + 0.2
    assert after["emitted"] == before["emitted"]


def checkpoint_after(world: Path, name: str, stop: int | None) -> dict[str, Tensor]:
    """The checkpoint after twelve steps, in one session or in two."""
    given = settings(world, name, eval_rows=0, save_minutes=1e-9)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt):
            train(MtpTraining(MtpSettings()), given, Interrupted(stop))
    train(MtpTraining(MtpSettings()), given, Silent())
    with safe_open(given.folder / "checkpoint.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}


def test_a_resumed_run_ends_at_the_same_weights(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, resumed = (checkpoint_after(world, name, stop) for name, stop in (("whole", None), ("resumed", 5)))
    assert whole.keys() == resumed.keys()
    for key, value in whole.items():
        torch.testing.assert_close(resumed[key], value, rtol=1e-5, atol=1e-7)
    files = [load_file(world / name / "model.safetensors") for name in ("whole", "resumed")]
    for key, value in files[0].items():
        torch.testing.assert_close(files[1][key], value, rtol=1e-5, atol=1e-7)
    right = Rows.chosen
    monkeypatch.setattr(Rows, "chosen", lambda self, seed, step, count: right(self, seed, step + 1, count))
    astray = checkpoint_after(world, "astray", 5)
    key = "model/parts.0.proj.weight"
    assert not torch.allclose(astray[key], whole[key], rtol=1e-5, atol=1e-7)


def test_a_target_that_lost_its_modules_starts_from_others(world: Path) -> None:
    """As a target that transformers saved: it drops the modules."""
    bare = world / "bare"
    shutil.copytree(world / "target", bare / "target")
    file = bare / "target" / "model.safetensors"
    tensors = {name: value for name, value in load_file(file).items() if "mtp_layers" not in name}
    save_file(tensors, file, {"format": "pt"})
    given = settings(bare, "out", data=(world / "texts",), steps=2, eval_rows=0, eval_prompts=1)
    with pytest.raises(ModelError, match=r"no MTP modules to train; start \(--start\) names"):
        train(MtpTraining(MtpSettings()), given, Silent())
    done = train(MtpTraining(MtpSettings(start=world / "target")), given, Silent())
    assert done.record is not None and done.record["evaluation"]["drafts_per_round"] == 3
    again = settings(bare, "again", data=(world / "texts",), steps=1, eval_rows=0)
    train(MtpTraining(MtpSettings(start=given.out)), again, Silent())
    files = [load_file(run.out / "model.safetensors") for run in (given, again)]
    assert files[0].keys() == files[1].keys()


def test_modules_that_do_not_fit_are_refused_by_name(world: Path, tmp_path: Path) -> None:
    def refused(error: type[Exception], words: str, target: Path, **given: Any) -> None:
        with pytest.raises(error, match=words):
            run = settings(world, "refused", target=str(target))
            train(MtpTraining(MtpSettings(**given)), run, Silent())

    two = written("deepseek, two modules").folder
    refused(InvalidParameter, "ttt = 1: there are 2 MTP modules", two, ttt=1)
    refused(ModelError, "MTP module 0", world / "target", start=written("deepseek").folder)
    refused(ModelError, "no such folder", world / "target", start=tmp_path / "none")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param({"head": torch.nn.Linear(32, 96)}, "module 0 needs a matrix", id="bias"),
        pytest.param({"cap": 30.0}, "its logits are capped", id="capped"),
    ],
)
def test_other_logits_are_refused(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = Teacher(str(written("mimo").folder), (), "fp32", "cpu")
    if "cap" in change:
        teacher.config.final_logit_softcapping = change["cap"]
    else:
        monkeypatch.setattr(teacher.model, "lm_head", change["head"])
    with pytest.raises(UnsupportedModel, match=words):
        MtpTraining(MtpSettings()).check(teacher)


def test_a_target_without_modules_is_refused_before_its_data_are_read(tmp_path: Path) -> None:
    world = make_world(tmp_path / "llama")
    given = settings(world, "none", data=(world / "no such file",))
    with pytest.raises(ModelError, match="llama/target: no MTP modules to train"):
        train(MtpTraining(MtpSettings()), given, Silent())


def test_the_command_line_trains_and_drafts(world: Path) -> None:
    def run(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    target, out = str(world / "target"), str(world / "by command")
    given = {**QUICK, "target": target, "data": world / "texts", "out": out, "steps": 2, "ttt": 2}
    record = run("train", "mtp", *(w for k, v in given.items() for w in ("--" + k.replace("_", "-"), str(v))))
    assert (record["method"], record["steps"], record["form"]["ttt"]) == ("mtp", 2, 2)
    words = ("-p", "def value", "--temperature", "0", "--max-tokens", "6")
    made = run("generate", "--model", target, "--method", "mtp", "--draft", out, *words)
    assert "mtp" in json.dumps(made)
