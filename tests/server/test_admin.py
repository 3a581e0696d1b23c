"""The administration over HTTP: what it shows, what it changes, and what it refuses."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from speculon.config.models import ModelSettingsFile
from speculon.config.serve import ServeConfig
from speculon.errors import ConfigError, InvalidParameter, ModelError
from speculon.proposers.registry import methods
from speculon.sequence import Event
from speculon.server.admin.bench import BenchRunner
from speculon.server.admin.requests import rows_of
from speculon.server.catalogue import Catalogue
from speculon.server.pool import ModelPool
from speculon.server.pooled import PooledModel
from tests.server.inside import Inside, ScriptedLoader, serving, wait_until

pytestmark = pytest.mark.timeout(60)

API = "/admin/api"
KEY = {"authorization": "Bearer secret"}
K = "num_speculative_tokens"


@contextmanager
def administered(
    folder: Path,
    loader: ScriptedLoader | None = None,
    models: tuple[str, ...] = ("a",),
    paths: dict[str, str] | None = None,
    **settings: Any,
) -> Iterator[Inside]:
    serve = {"admin": True, **settings.pop("serve", {})}
    file = ModelSettingsFile(folder / "speculon-models.toml", methods())
    given = {"model": "path-a", "serve": serve, **settings}
    paths = paths or {name: f"path-{name}" for name in models}
    catalogue = Catalogue(given, paths, file=file, writable=file)
    with serving(catalogue, loader or ScriptedLoader()) as inside:
        yield inside


def ask(inside: Inside, **body: Any) -> dict[str, Any]:
    answer = inside.post("completions", **{"prompt": "x", "max_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def change(inside: Inside, name: str = "a", **changes: Any) -> Any:
    return inside.client.patch(f"{API}/models/{name}", json={"changes": changes})


def setting(view: dict[str, Any], name: str) -> dict[str, Any]:
    return next(one for one in view["settings"] if one["name"] == name)


def written(folder: Path) -> str:
    path = folder / "speculon-models.toml"
    return path.read_text() if path.exists() else ""


def test_the_overview_counts_what_was_sent(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        before = inside.client.get(f"{API}/overview").json()["models"][0]
        assert before["tokens"] == 0
        ask(inside, max_tokens=7)
        inside.eventually(lambda: inside.client.get(f"{API}/requests").json()[0]["state"] == "ended")
        inside.eventually(
            lambda: inside.client.get(f"{API}/overview").json()["models"][0]["engine"]["target_calls"] > 0
        )
        overview = inside.client.get(f"{API}/overview").json()
        after = overview["models"][0]
    assert after["tokens"] == 7 and after["tokens_per_second"] > 0
    assert after["engine"]["memory_bytes"] == {"held": 100, "pages": 50}
    assert after["engine"]["cost_curve"] == {"1": 2.5}
    assert overview["totals"]["target_calls"] == after["engine"]["target_calls"]
    assert after["engine"]["plain_rounds"]["no_match"] == after["engine"]["target_calls"]


def test_without_admin_there_is_no_route(tmp_path: Path) -> None:
    with administered(tmp_path, serve={"admin": False}) as inside:
        assert inside.client.get(f"{API}/overview").status_code == 404


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        pytest.param({}, 401, id="no key"),
        pytest.param({"authorization": "Bearer wrong"}, 401, id="wrong key"),
        pytest.param({"authorization": "Bearer secret2"}, 401, id="longer"),
        pytest.param({"authorization": "Bearer client"}, 401, id="the API key"),
        pytest.param(KEY, 200, id="right"),
        pytest.param({**KEY, "origin": "http://elsewhere.example"}, 403, id="another origin"),
    ],
)
@pytest.mark.parametrize("path", ["overview", "models", "requests", "log", "bench"])
def test_the_key(tmp_path: Path, path: str, headers: dict[str, str], status: int) -> None:
    with administered(tmp_path, serve={"admin_key": "secret", "api_key": ["client"]}) as inside:
        inside.client.headers.pop("authorization", None)
        assert inside.client.get(f"{API}/{path}", headers=headers).status_code == status
        assert inside.client.get("/v1/models", headers=KEY).status_code == 401  # it opens nothing else


def test_without_a_key_a_name_that_was_bound_anew_is_refused(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        assert inside.client.get(f"{API}/overview").status_code == 200
        assert inside.client.get(f"{API}/overview", headers={"host": "elsewhere.example"}).status_code == 403


def test_other_addresses_need_a_key_and_show_no_texts() -> None:
    with pytest.raises(InvalidParameter, match="admin_key"):
        ServeConfig(admin=True, host="0.0.0.0")
    assert not ServeConfig(admin=True, host="0.0.0.0", admin_key="k").shows_texts
    assert ServeConfig(admin=True).shows_texts


def test_a_change_is_written_and_in_force(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        seen = inside.client.get(f"{API}/models/a").json()
        assert setting(seen, "max_num_seqs")["source"] == "default" and written(tmp_path) == ""
        answer = change(inside, max_num_seqs=3, temperature=0.5)
        assert answer.status_code == 200, answer.text
        assert setting(answer.json(), "max_num_seqs")["value"] == 3
        assert setting(answer.json(), "max_num_seqs")["source"] == "model"
        assert inside.state.pool.models["a"].facts.max_num_seqs == 3
        assert inside.state.pool.models["a"].loads == 2
        assert change(inside, temperature=0.7).status_code == 200
        assert inside.state.pool.models["a"].loads == 2  # requests have it, and no process
        assert change(inside, max_num_seqs=None).status_code == 200
        ask(inside)
    assert "max_num_seqs" not in written(tmp_path) and "temperature = 0.7" in written(tmp_path)


def check_that_defaults_of_requests_need_no_load(folder: Path) -> None:
    loader = ScriptedLoader()
    with administered(folder, loader) as inside:
        model = inside.state.pool.models["a"]

        def sent(**body: Any) -> dict[str, Any]:
            """What the engine was given of a request's speculation."""
            ask(inside, **body)
            found = loader.engines["path-a"].inner.speculations[-1]
            return {} if found is None else found.model_dump(exclude_none=True, exclude={"tenant"})

        def changed(**changes: Any) -> int:
            """Loads so far."""
            answer = change(inside, **changes)
            assert answer.status_code == 200, answer.text
            return model.loads

        assert not setting(inside.client.get(f"{API}/models/a").json(), K)["new_worker"] and sent() == {}
        assert changed(num_speculative_tokens=3, acceptance="matching") == 1
        assert sent() == {K: 3, "acceptance": "matching"}
        assert sent(speculation={K: 2}) == {K: 2, "acceptance": "matching"}, "a request's own comes first"
        assert changed(num_speculative_tokens=None, acceptance=None) == 1 and sent() == {}
        assert changed(method="ngram") == 1 and sent() == {"method": "ngram"}
        assert inside.client.get(f"{API}/models/a").json()["method"] == "ngram"
        assert changed(method="eagle3", draft={"eagle3": str(folder)}) == 2, "its drafter has to be loaded"
        assert changed(method="mtp") == 3 and sent() == {}, "its layers, too; the process has the rest"
        assert changed(num_speculative_tokens=5, max_num_seqs=4) == 4 and sent() == {}
        assert changed(num_speculative_tokens=None) == 5, "no request can take it away"


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


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"no_such_field": 1}, id="unknown"),
        pytest.param({"max_num_seqs": 0}, id="wrong value"),
        pytest.param({"max_num_seqs": 4, "temperature": -1}, id="one of two is wrong"),
        pytest.param({"max_num_seqs": "many"}, id="wrong type"),
        pytest.param({"draft": "/no/such/drafter"}, id="missing drafter"),
        pytest.param({"method": "no_such_method"}, id="unknown method"),
        pytest.param({"block_size": 32}, id="set by a flag"),
        pytest.param({"model": "other"}, id="the path"),
        pytest.param({"trust_remote_code": True}, id="runs code"),
        pytest.param({"allow_pickle": True}, id="may run code"),
        pytest.param({"aliases": ["b"]}, id="name of another model"),
        pytest.param({}, id="empty"),
    ],
)
def test_a_refused_change_changes_nothing(tmp_path: Path, changes: dict[str, Any]) -> None:
    with administered(tmp_path, models=("a", "b"), block_size=16) as inside:
        answer = change(inside, **changes)
        assert answer.status_code == 400, answer.text
        assert inside.state.pool.models["a"].loads == 1
    assert written(tmp_path) == ""


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
    assert methods_of == {"dflash": "dflash", "draft": "draft_model", "eagle3": "eagle3"}
    assert all(one["refusal"] is None and not one["loaded"] for one in found.values())
    assert other["name"] == "broken" and other["refusal"]
    assert not [line for line in caplog.messages if line.startswith("draft ")]


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


def test_tokens_of_a_request_that_asked_for_it(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        explained = ask(inside, prompt="say:abcdef", logprobs=1, speculation={"explain": True})
        plain = ask(inside)
        url = f"{API}/requests/{explained['id']}"
        inside.eventually(lambda: inside.client.get(url).json()["state"] == "ended")
        shown = inside.client.get(f"{url}/tokens").json()
        refused = inside.client.get(f"{API}/requests/{plain['id']}/tokens")
        view = inside.client.get(url).json()
    fates = [(one["fate"], one["position"]) for one in shown["choices"][0]]
    assert fates == [
        *[("plain", None), ("accepted", 0), ("bonus", None)],
        *[("plain", None), ("accepted", 0), ("bonus", None)],
    ]
    assert [one["logprob"] for one in shown["choices"][0]] == [-0.5] * 6
    assert [one["fate"] for one in explained["choices"][0]["speculation"]["tokens"]] == [f for f, _ in fates]
    assert refused.status_code == 400 and "explain" in refused.text
    assert (view["prompt"], view["answer"]) == ("say:abcdef", "abcdef")


def test_texts_are_kept_only_where_they_are_allowed(tmp_path: Path) -> None:
    with administered(tmp_path, serve={"admin_texts": False}) as inside:
        done = ask(inside, prompt="say:private", speculation={"explain": True})
        tokens = inside.client.get(f"{API}/requests/{done['id']}/tokens")
        view = inside.client.get(f"{API}/requests/{done['id']}").json()
        kept = inside.state.observers[0]._requests.find(done["id"])  # type: ignore[attr-defined]
    assert view["prompt"] is None and view["answer"] is None
    assert tokens.status_code == 400 and "admin_texts is off" in tokens.text
    assert kept is not None and not kept.prompt and not kept.rows


def test_the_latest_requests_are_bounded(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        ids = [ask(inside, max_tokens=1)["id"] for _ in range(205)]
        wait_until(lambda: inside.client.get(f"{API}/requests").json()[0]["id"] == ids[-1])
        shown = [one["id"] for one in inside.client.get(f"{API}/requests").json()]
        assert shown == ids[::-1][:200]
        assert inside.client.get(f"{API}/requests/{ids[0]}").status_code == 404


@pytest.mark.parametrize(
    ("sources", "drafted", "expected"),
    [
        pytest.param((), 0, [("plain", None), ("plain", None)], id="no draft"),
        pytest.param(("ngram",), 1, [("accepted", 0), ("bonus", None)], id="all accepted"),
        pytest.param(("ngram",), 3, [("accepted", 0), ("correction", 1)], id="second rejected"),
    ],
)
def test_positions_in_the_draft(
    sources: tuple[str, ...], drafted: int, expected: list[tuple[str, int | None]]
) -> None:
    rows = rows_of(Event("r", 0, (5, 6), sources=sources, drafted=drafted))
    assert [(fate, position) for _, fate, _, position, _, _ in rows] == expected


def test_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("speculon")
    monkeypatch.setattr(logger, "level", logging.INFO)
    logger.manager._clear_cache()  # type: ignore[attr-defined]
    with administered(tmp_path) as inside:
        done = inside.post("completions", prompt="x", max_tokens=2)
        name = done.headers["x-request-id"]
        inside.eventually(lambda: name in inside.client.get(f"{API}/log?lines=5").text)
        assert inside.client.get(f"{API}/log?lines=0").status_code == 400


def script(inside: Inside, code: str) -> BenchRunner:
    runner = inside.state.observers[0].bench_runner  # type: ignore[attr-defined]
    runner._command = (sys.executable, "-c", code)
    return runner


def test_a_benchmark_has_progress_and_a_result(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        code = "import sys, json; print('half', file=sys.stderr); print(json.dumps({'args': sys.argv[1:]}))"
        script(inside, code)
        assert inside.client.post(f"{API}/bench", json={"prompts": 2}).status_code == 200
        inside.eventually(lambda: inside.client.get(f"{API}/bench").json()["state"] == "done")
        done = inside.client.get(f"{API}/bench").json()
        assert done["lines"] == ["half"]
        assert "--model=path-a" in done["result"]["args"] and "--prompts=2" in done["result"]["args"]
        script(inside, "print('no JSON')")
        inside.client.post(f"{API}/bench", json={})
        inside.eventually(lambda: inside.client.get(f"{API}/bench").json()["state"] == "failed")
        assert inside.client.post(f"{API}/bench", json={"prompts": 0}).status_code == 400


def test_one_benchmark_at_a_time_and_none_after_the_server(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        runner = script(inside, "import time; time.sleep(60)")
        assert inside.client.post(f"{API}/bench", json={}).status_code == 200
        assert inside.client.post(f"{API}/bench", json={}).status_code == 400
        assert inside.client.delete(f"{API}/bench").json()["state"] == "cancelled"
        assert inside.client.post(f"{API}/bench", json={}).status_code == 200
        inside.eventually(lambda: runner._process is not None and runner._process.returncode is None)
        process = runner._process
    assert process is not None and process.returncode is not None
    assert threading.active_count() < 50


def test_the_command_of_a_benchmark_is_there() -> None:
    def status(*command: str) -> int:
        return subprocess.run([*command, "bench", "--help"], capture_output=True, timeout=30).returncode

    assert status(*BenchRunner()._command) == 0
    assert status(sys.executable, "-m", "speculon.no_such_module") != 0
