"""Settings that an administrator changes: what is refused, what needs a load, and what a failure leaves."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from speculon.checkpoints.locate import locate
from speculon.cli.discover import find_models
from speculon.core.config import SpeculationConfig
from speculon.core.config.models import ModelSettingsFile
from speculon.core.errors import ConfigError, ModelError
from speculon.server.model import OF_REQUESTS
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.pool import ModelPool
from speculon.server.pool.pooled import PooledModel
from tests.server.administered import API, K, administered, ask, change, setting, written
from tests.server.inside import ScriptedLoader, ThreadEngine, cut

pytestmark = pytest.mark.timeout(60)


def test_a_change_is_written_and_in_force(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        seen = inside.client.get(f"{API}/models/a").json()
        assert setting(seen, "max_num_seqs")["source"] == "default" and written(tmp_path) == ""
        answer = change(inside, max_num_seqs=3, temperature=0.5)
        assert answer.status_code == 200, answer.text
        assert setting(answer.json(), "max_num_seqs")["value"] == 3
        assert setting(answer.json(), "max_num_seqs")["source"] == "model"
        file = tmp_path / "speculon-models.toml"
        assert f"{file}, line" in setting(answer.json(), "max_num_seqs")["origin"]
        assert inside.state.pool.models["a"].facts.max_num_seqs == 3
        assert inside.state.pool.models["a"].loads == 2
        assert change(inside, temperature=0.7).status_code == 200
        assert inside.state.pool.models["a"].loads == 2  # requests have it, and no process
        assert change(inside, max_num_seqs=None).status_code == 200
        ask(inside)
    assert "max_num_seqs" not in written(tmp_path) and "temperature = 0.7" in written(tmp_path)


def test_a_change_that_a_flag_contradicts_is_refused_by_its_field(tmp_path: Path) -> None:
    with administered(tmp_path, speculation={K: 4}) as inside:
        answer = change(inside, method="off")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "method"), answer.text
        assert f"{K} = 4 (flag): it has no effect with method = 'off'" in answer.json()["error"]["message"]
        assert written(tmp_path) == "" and change(inside, method="suffix").status_code == 200


def check_that_defaults_of_requests_need_no_load(folder: Path) -> None:
    loader = ScriptedLoader()
    with administered(folder, loader) as inside:
        model = inside.state.pool.models["a"]

        def sent(**body: Any) -> dict[str, Any]:
            """What the engine was given of a request's speculation."""
            ask(inside, **body)
            found = loader.engines["path-a"].inner.speculations[-1]
            if found is None:
                return {}
            defaults = {} if found.defaults is None else found.defaults.model_dump(include=OF_REQUESTS)
            own = found.model_dump(exclude_none=True, exclude={"tenant", "defaults"})
            return {**defaults, **own}

        def changed(**changes: Any) -> int:
            """Loads so far."""
            answer = change(inside, **changes)
            assert answer.status_code == 200, answer.text
            return model.loads

        assert not setting(inside.client.get(f"{API}/models/a").json(), K)["new_worker"] and sent() == {}
        assert changed(num_speculative_tokens=3, acceptance="matching") == 1
        unchanged = SpeculationConfig().model_dump(include=OF_REQUESTS)
        assert sent() == {**unchanged, K: 3, "acceptance": "matching"}
        (card,) = inside.client.get("/v1/models").json()["data"]
        assert card["speculation"] == {**unchanged, K: 3, "acceptance": "matching"}
        own = sent(speculation={K: 2})
        assert own == {**unchanged, K: 2, "acceptance": "matching"}, "a request's own comes first"
        assert changed(num_speculative_tokens=None, acceptance=None) == 1 and sent() == {}
        assert changed(method="ngram") == 1 and sent() == {**unchanged, "method": "ngram"}
        assert inside.client.get(f"{API}/models/a").json()["method"] == "ngram"
        assert changed(method="eagle3", draft={"eagle3": str(folder)}) == 2, "its drafter has to be loaded"
        assert changed(method="mtp") == 3 and sent() == {}, "its layers, too; the process has the rest"
        assert changed(num_speculative_tokens=5, max_num_seqs=4) == 4 and sent() == {}
        assert changed(num_speculative_tokens=None) == 4 and sent()[K] is None, "its process has another"


def test_defaults_of_requests_need_no_load(tmp_path: Path) -> None:
    check_that_defaults_of_requests_need_no_load(tmp_path)


@pytest.mark.parametrize("taken", [True, False], ids=["never loaded", "always loaded"])
def test_defaults_that_are_not_applied_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    """Two twins."""
    monkeypatch.setattr(PooledModel, "takes", lambda model, own: taken)
    with pytest.raises(AssertionError):
        check_that_defaults_of_requests_need_no_load(tmp_path)


REFUSED: dict[str, dict[str, Any]] = {
    "unknown": {"no_such_field": 1},
    "one of two is wrong": {"max_num_seqs": 4, "temperature": -1},
    "wrong type": {"max_num_seqs": "many"},
    "missing drafter": {"draft": "/no/such/drafter"},
    "unknown method": {"method": "no_such_method"},
    "set by a flag": {"block_size": 32},
    "the path": {"model": "other"},
    "runs code": {"trust_remote_code": True},
    "may run code": {"allow_pickle": True},
    "name of another model": {"aliases": ["b"]},
    "empty": {},
}


def test_a_refused_change_changes_nothing(tmp_path: Path) -> None:
    with administered(tmp_path, models=("a", "b"), block_size=16) as inside:
        for case, changes in REFUSED.items():
            assert change(inside, **changes).status_code == 400, case
            assert inside.state.pool.models["a"].loads == 1 and written(tmp_path) == "", case


def test_settings_that_do_not_load_are_not_kept(tmp_path: Path) -> None:
    loader = ScriptedLoader()
    with administered(tmp_path, loader) as inside:
        assert change(inside, max_num_seqs=5).status_code == 200
        before = written(tmp_path)
        loader.faults["path-a"] = [ModelError("too large")]
        answer = change(inside, max_num_seqs=7)
        assert answer.status_code == 503 and "too large" in answer.text
        assert "not changed" in answer.text and written(tmp_path) == before
        assert inside.state.pool.models["a"].facts.max_num_seqs == 5
        assert not inside.state.pool.models["a"].lost.is_set()
        ask(inside)


class HeldLoader(ScriptedLoader):
    """The second engine and the third load once their gates are open; the second fails."""

    def __init__(self) -> None:
        super().__init__()
        self.made, self.held = 0, [threading.Event(), threading.Event()]

    def engine(self, settings: dict[str, Any], on_stage: Any) -> ThreadEngine:
        made = super().engine(settings, on_stage)
        self.made += 1
        if self.made > 1:
            made.gate = self.held[self.made - 2]
        return made


def test_requests_wait_until_a_failed_change_is_undone(tmp_path: Path) -> None:
    loader = HeldLoader()
    with administered(tmp_path, loader) as inside, ThreadPoolExecutor(8) as threads:
        loader.faults["path-a"] = [ModelError("too large")]
        changing, waiting = threads.submit(change, inside, max_num_seqs=7), list[Any]()
        for number, gate in enumerate(loader.held):
            inside.eventually(lambda number=number: loader.made == number + 2)  # type: ignore[misc]
            waiting.append(threads.submit(ask, inside))
            time.sleep(0.2)  # time to be refused
            assert not any(one.done() for one in waiting)
            gate.set()
        assert changing.result().status_code == 503
        assert [one.result()["usage"]["completion_tokens"] for one in waiting] == [6, 6]
        assert not inside.state.pool.models["a"].lost.is_set()


def test_a_server_whose_only_model_does_not_come_back_ends(tmp_path: Path) -> None:
    loader = ScriptedLoader()
    with administered(tmp_path, loader) as inside:
        loader.faults["path-a"] = [ModelError("too large"), ModelError("gone")]
        assert change(inside, max_num_seqs=7).status_code == 503
        assert inside.state.pool.models["a"].lost.is_set()
        assert inside.post("completions", prompt="x").status_code == 503


def check_that_a_full_disk_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The settings load, and the file cannot be written."""
    update = ModelSettingsFile.update

    def full(file: ModelSettingsFile, *change: Any) -> Any:
        if file.path.parent == folder:
            raise ConfigError("no space left on device")
        return update(file, *change)

    monkeypatch.setattr(ModelSettingsFile, "update", full)
    with administered(folder) as inside:
        model = inside.state.pool.models["a"]
        was = model.facts.max_num_seqs
        answer = change(inside, max_num_seqs=7)
        assert answer.status_code >= 400 and "no space left" in answer.text
        assert (model.facts.max_num_seqs, model.loads) == (was, 3)
        ask(inside)


def test_a_file_that_cannot_be_written_brings_the_old_settings_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_that_a_full_disk_changes_nothing(tmp_path, monkeypatch)


def test_settings_that_stay_after_a_failed_write_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the second load keeps the new settings."""
    adopt, adopted = ModelPool._adopt, []

    def once(pool: ModelPool, model: Any, own: Any) -> None:
        adopted.append(own)
        adopt(pool, model, adopted[0])

    monkeypatch.setattr(ModelPool, "_adopt", once)
    with pytest.raises(AssertionError):
        check_that_a_full_disk_changes_nothing(tmp_path, monkeypatch)


def test_drafters_are_named_with_their_method_and_why_one_does_not_fit(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    caplog.set_level(logging.INFO, "speculon")
    with administered(tmp_path, paths={"demo": "demo"}, model="demo") as inside:
        found = {one["name"]: one for one in inside.client.get(f"{API}/drafters/demo").json()}
        query = {"checkpoint": str(broken)}
        (other,) = inside.client.get(f"{API}/drafters/demo", params=query).json()
    methods_of = {name: one["method"] for name, one in found.items()}
    assert methods_of == {"demo-dflash": "dflash", "demo-draft": "draft_model", "demo-eagle3": "eagle3"}
    assert all(one["refusal"] is None and not one["loaded"] for one in found.values())
    assert other["name"] == "broken" and other["refusal"]
    assert not [line for line in caplog.messages if line.startswith("draft ")]


def test_drafters_in_the_cache_of_the_hub_have_the_name_of_their_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "hub" / "models--org--some-head" / "snapshots" / "a1b2"
    shutil.copytree(Path("tests/models/demo-eagle3").resolve(), snapshot)
    with administered(tmp_path, paths={"demo": "demo"}, model="demo") as inside:
        before = {one["name"] for one in inside.client.get(f"{API}/drafters/demo").json()}
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        found = {one["name"]: one for one in inside.client.get(f"{API}/drafters/demo").json()}
    assert found.keys() - before == {"org/some-head"}
    one = found["org/some-head"]
    assert (one["method"], one["checkpoint"], one["refusal"]) == ("eagle3", str(snapshot), None)


def test_a_relative_folder_of_models_lists_each_drafter_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the model they are found by whole paths."""
    library = tmp_path / "library"
    library.mkdir()
    for name, path in (("coder", "demo"), ("little", "demo-draft"), ("head", "demo-eagle3")):
        (library / name).symlink_to(locate(path))
    monkeypatch.chdir(tmp_path)
    folder = Path("library")
    found = find_models([], folder)
    paths, drafters, serve = found.models, found.drafters, {"models_dir": folder}
    assert paths["coder"] == "library/coder"
    with administered(tmp_path, paths=paths, drafters=drafters, model="library/coder", serve=serve) as inside:
        listed = [one["name"] for one in inside.client.get(f"{API}/drafters/coder").json()]
        loaded = {"draft": {"eagle3": "library/head"}}
        assert change(inside, "coder", **loaded).status_code == 200
        inside.state.pool.models["coder"].drafters = loaded["draft"]
        shown = inside.client.get(f"{API}/drafters/coder").json()
    assert sorted(listed) == ["head", "little"]
    assert [one["name"] for one in shown] == ["head", "little"] and shown[0]["loaded"]


def test_a_file_with_a_fault_is_reported_before_a_model_is_unloaded(tmp_path: Path) -> None:
    with administered(tmp_path, models=("a", "b")) as inside:
        ask(inside)
        (tmp_path / "speculon-models.toml").write_text("[models.a\n")
        answer = inside.client.post(f"{API}/models/a/unload")
        assert answer.status_code == 500 and "speculon-models.toml" in answer.text
        assert inside.state.pool.models["a"].shown_state == "loaded"
        (tmp_path / "speculon-models.toml").unlink()
        assert inside.client.post(f"{API}/models/a/unload").json()["state"] == "unloaded"


def check_that_a_drafter_that_is_gone_is_left_out(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    head = folder / "head"
    head.mkdir()
    with administered(folder, models=("a", "b")) as inside:
        model = inside.state.pool.models["a"]
        assert change(inside, draft={"eagle3": str(head)}, num_speculative_tokens=3).status_code == 200
        assert model.config.speculation.draft == {"eagle3": str(head)}
        head.rmdir()
        assert inside.client.post(f"{API}/models/a/unload").status_code == 200
        ask(inside)
        assert model.config.speculation.draft is None and model.config.speculation.num_speculative_tokens == 3
        assert any("left out" in line and str(head) in line for line in caplog.messages)


def test_a_drafter_that_is_gone_is_left_out_at_the_next_load(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_that_a_drafter_that_is_gone_is_left_out(tmp_path, caplog)


def test_a_drafter_that_stays_is_seen(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin: the settings are those of the start."""
    monkeypatch.setattr(Catalogue, "healed", lambda catalogue, name, own: own)
    with pytest.raises(AssertionError):
        check_that_a_drafter_that_is_gone_is_left_out(tmp_path, caplog)


def test_a_model_whose_process_starts_again_is_shown_as_loading(tmp_path: Path) -> None:
    with administered(tmp_path, models=("a", "b")) as inside:
        ask(inside)
        engine = inside.state.pool.models["a"].engine
        assert isinstance(engine, ThreadEngine)
        engine.gate = threading.Event()

        def states() -> set[str]:
            first = inside.client.get(f"{API}/overview").json()["models"][0]
            card = inside.client.get("/v1/models/a").json()
            return {first["state"], card["state"], inside.client.get(f"{API}/models/a").json()["state"]}

        assert states() == {"loaded"}
        cut(engine)
        inside.eventually(lambda: states() == {"loading"})
        engine.gate.set()
        inside.eventually(lambda: states() == {"loaded"})


def test_a_change_waits_for_running_requests_and_loses_none(tmp_path: Path) -> None:
    loader = ScriptedLoader(step_seconds=0.01)
    with administered(tmp_path, loader) as inside, ThreadPoolExecutor(8) as threads:
        running = [threads.submit(ask, inside, max_tokens=150) for _ in range(4)]
        inside.eventually(lambda: inside.state.pool.open_requests == 4)
        changing = threads.submit(change, inside, max_num_seqs=9)
        inside.eventually(lambda: inside.state.pool.models["a"].state != "loaded")
        late = threads.submit(ask, inside)
        assert changing.result().status_code == 200
        assert all(one.result()["usage"]["completion_tokens"] == 150 for one in running)
        assert late.result()["usage"]["completion_tokens"] == 6


def test_two_changes_at_once_are_both_kept(tmp_path: Path) -> None:
    with administered(tmp_path) as inside, ThreadPoolExecutor(2) as threads:
        both = [
            threads.submit(change, inside, max_num_seqs=6),
            threads.submit(change, inside, block_size=32),
        ]
        assert [one.result().status_code for one in both] == [200, 200]
    assert "max_num_seqs = 6" in written(tmp_path) and "block_size = 32" in written(tmp_path)
