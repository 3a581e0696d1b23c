"""Drafters in the hub's cache folder, and the table of those that are published for a target."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from speculon import LLM, SamplingParams, SpeculationConfig
from speculon.checkpoints.headers import read_checkpoint
from speculon.checkpoints.hub import cached_models, hub_id
from speculon.core.config import EngineConfig
from speculon.core.errors import InvalidParameter
from speculon.runtimes.torch.drafters.choose import fits, with_drafts
from speculon.runtimes.torch.drafters.known import KNOWN, published_for
from speculon.runtimes.torch.drafters.pairing import Search, search
from tests.tiny.checkpoint import write_checkpoint
from tests.tiny.conftest import build
from tests.tiny.heads import write_eagle3

FACTS = SimpleNamespace(
    hidden_size=32, vocab_size=320, num_hidden_layers=8, architectures=["Qwen3ForCausalLM"]
)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = write_checkpoint(tmp_path_factory.mktemp("alone") / "Target-8B")
    config = build("qwen3", num_hidden_layers=8, vocab_size=320, max_position_embeddings=512, eos_token_id=2)
    config.save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))

    def fetch(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was to be fetched")

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    return folder


def place(cache: Path, name: str, commit: str = "a1", main: bool = True) -> Path:
    """Where the hub's library puts a version of a model; the folder is not there yet."""
    repo = cache / f"models--{name.replace('/', '--')}"
    snapshot = repo / "snapshots" / commit
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    if main:
        (repo / "refs").mkdir(exist_ok=True)
        (repo / "refs" / "main").write_text(commit)
    return snapshot


def head(cache: Path, name: str, form: str = "specforge", **more: Any) -> Path:
    return write_eagle3(place(cache, name), FACTS, form, **more)


def found(target: Path, **known: Any) -> Search:
    return search("auto", read_checkpoint(target), known.get("known", {}))


# the cache


def test_a_snapshot_has_the_name_of_its_model(cache: Path) -> None:
    older, newer = (place(cache, "org/a.b-c", commit, main=commit == "a1") for commit in ("a1", "b2"))
    for path in (older, newer):
        path.mkdir()
        (path / "config.json").write_text("{}")
    assert cached_models() == {"org/a.b-c": older}, "that of the main branch"
    (older.parents[1] / "refs" / "main").unlink()
    assert cached_models()["org/a.b-c"] in (older, newer)
    assert hub_id(newer) == hub_id(newer / "model.gguf") == "org/a.b-c"
    assert hub_id(place(cache, "gpt2")) == "gpt2"
    assert hub_id(cache) is hub_id("org/a") is hub_id("/models/a") is None


def test_a_head_in_the_cache_is_found_and_the_folder_names_it(target: Path, cache: Path) -> None:
    assert found(target).drafts == {}
    path = head(cache, "org/head")
    result = found(target)
    assert result.drafts == {"eagle3": str(path)}
    (line,) = result.lines
    assert line.startswith("org/head (in the hub's cache): EAGLE-3 head") and line.endswith("taken as eagle3")
    config = EngineConfig(model=str(target), speculation={"draft": "auto"})
    assert with_drafts(config).speculation.draft == {"eagle3": str(path)}
    named = with_drafts(EngineConfig(model=str(target), speculation={"draft": f"auto:{target.parent}"}))
    assert named.speculation.draft == {}, "a named folder is searched alone"
    assert with_drafts(EngineConfig(model=str(target))).speculation.draft is None
    assert [(fit.path, fit.method, fit.refusal) for fit in fits(config, [])] == [(str(path), "eagle3", None)]


def test_what_does_not_fit_is_left_out(target: Path, cache: Path) -> None:
    narrow = SimpleNamespace(**{**vars(FACTS), "hidden_size": 16})
    write_eagle3(place(cache, "org/narrow"), narrow, "specforge")
    result = found(target, known={"Target-8B": ["org/narrow"]})
    assert result.drafts == {} and "width 16, the target's are 32" in result.lines[0]
    assert fits(EngineConfig(model=str(target)), []) == []


def test_a_nearer_one_is_preferred(target: Path, cache: Path, tmp_path: Path) -> None:
    head(cache, "org/head")
    here = tmp_path / "home" / "Target-8B"
    shutil.copytree(target, here)
    near = write_eagle3(here.parent / "near", FACTS, "specforge")
    result = found(here, known={"Target-8B": ["org/head"]})
    assert result.drafts["eagle3"] == str(near)
    assert any(line.startswith("org/head") and f"but {near} is preferred" in line for line in result.lines)


def test_other_versions_of_the_target_are_no_drafters(target: Path, cache: Path) -> None:
    first, second = place(cache, "org/Target-8B"), place(cache, "org/Target-8B", "b2", main=False)
    for path in (first, second):
        shutil.copytree(target, path)
    assert found(first) == Search({}, ())
    assert found(second).drafts == {} and "the target has" in found(second).lines[0]


BROKEN = {
    "no JSON": lambda snapshot: (snapshot.mkdir(), (snapshot / "config.json").write_text("{")),
    "no weights": lambda snapshot: (snapshot.mkdir(), (snapshot / "config.json").write_text("{}")),
    "a file": lambda snapshot: snapshot.write_text("a"),
    "a lost blob": lambda snapshot: (
        write_eagle3(snapshot, FACTS, "specforge"),
        [(path.unlink(), path.symlink_to("../../blobs/gone")) for path in snapshot.glob("*.safetensors")],
    ),
    "no snapshots": lambda snapshot: snapshot.parent.rmdir(),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_entry_costs_itself_alone(broken: str, target: Path, cache: Path) -> None:
    BROKEN[broken](place(cache, "org/broken"))
    path = head(cache, "org/head")
    result = found(target, known={"Target-8B": ["org/broken"]})
    assert result.drafts == {"eagle3": str(path)}
    assert any(line.startswith("org/broken") for line in result.lines)


def test_a_cache_that_is_no_folder_has_nothing(target: Path, cache: Path) -> None:
    cache.rmdir()
    assert cached_models() == {}
    cache.write_text("a file")
    assert cached_models() == {} and found(target).drafts == {}


def test_an_engine_drafts_with_it(target: Path, cache: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    plain = LLM(str(target), warmup=False, speculation={"method": "off"}).generate("def add(", params)[0]
    path = head(cache, "org/head")
    settings = {"policy": "fixed", "draft": "auto", "known_drafters": {"Target-8B": ["org/head"]}}
    llm = LLM(str(target), warmup=False, speculation=settings)
    done = llm.generate("def add(", params, speculation={"method": "eagle3"})[0]
    assert done.token_ids == plain.token_ids
    assert set(done.speculation.by_source) == {"eagle3"}
    assert llm.engine.facts().drafters == {"eagle3": str(path)}
    row = llm.engine.capabilities()["known_drafters"]
    assert row.status == "on" and row.reason.endswith("from the hub's cache: org/head")
    shutil.rmtree(path)
    row = llm.engine.capabilities()["known_drafters"]
    assert row.status == "off" and row.reason == "published, and not in the hub's cache: org/head"


# the table


def test_the_table_is_preferred_to_what_merely_fits(target: Path, cache: Path) -> None:
    published, smaller = head(cache, "org/z"), head(cache, "org/a", "speculators", draft_vocab=64)
    assert found(target).drafts == {"eagle3": str(smaller)}, "planted: without the table"
    assert found(target, known={"org/TARGET-8b": ["org/z"]}).drafts == {"eagle3": str(published)}
    assert found(target, known={"org/Target-70B": ["org/z"]}).drafts == {"eagle3": str(smaller)}


def test_one_that_is_not_in_the_cache_is_named(target: Path, cache: Path) -> None:
    result = found(target, known={"Target-8B": ["org/absent"]})
    assert result == Search({}, ("org/absent: published for this target, and not in the hub's cache",))


def test_names_of_targets(cache: Path) -> None:
    eagle3, *_ = KNOWN["Qwen/Qwen3-8B"]
    for path in (place(cache, "Qwen/Qwen3-8B"), "/models/Qwen3-8B", "qwen3-8b", Path("some/Qwen3-8B/")):
        assert published_for(path, {})[0] == eagle3
    assert published_for(place(cache, "mine/Qwen3-8B"), {}) == (), "another's model of the same name"
    assert published_for("", {}) == published_for("Qwen3-8", {}) == ()
    own = published_for("/models/Qwen3-8B", {"Qwen/Qwen3-8B": ("me/head", eagle3)})
    assert own == ("me/head", *KNOWN["Qwen/Qwen3-8B"])


def test_the_table_that_comes_with_it_is_right_as_a_setting() -> None:
    assert SpeculationConfig(known_drafters=dict(KNOWN)).known_drafters == KNOWN
    drafters = {drafter for drafters in KNOWN.values() for drafter in drafters}
    assert not drafters & KNOWN.keys() and all(KNOWN.values())


@pytest.mark.parametrize(
    ("target", "drafter"),
    [("a/target", "head"), ("a/target", "a/target"), ("a/target", "../head/x"), (" ", "a/head")],
)
def test_a_broken_table_is_refused_by_name(target: str, drafter: str) -> None:
    refusal = (
        f"known_drafters.*'{target}' -> '{drafter}': a drafter must be another model's hub id, as org/name"
    )
    with pytest.raises(InvalidParameter, match=refusal):
        SpeculationConfig(known_drafters={target: [drafter]})
