"""One server with several models: names, loads, memory, crashes. Scripted engines, a thread for each."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from speculon.core.errors import ConfigError, ModelNotFound
from speculon.server.pool.catalogue import Catalogue
from speculon.server.pool.pool import ModelPool
from speculon.server.pool.pooled import PooledModel
from tests.server.inside import Inside, ScriptedLoader, cut, served, serving, wait_until
from tests.server.outside import started
from tests.server.test_answers import events_of
from tests.server.test_life import Reader, check_clean

pytestmark = pytest.mark.timeout(60)

PATHS = {"a": "path-a", "b": "path-b", "c": "path-c"}


class Pool:
    """A server of the models a, b and c."""

    def __init__(self, inside: Inside, loader: ScriptedLoader):
        self.inside, self.loader = inside, loader
        self.threads = ThreadPoolExecutor(16)

    def model(self, name: str) -> PooledModel:
        return self.inside.state.pool.models[name]

    def ask(self, name: str | None, **body: Any) -> httpx.Response:
        model = {} if name is None else {"model": name}
        return self.inside.post("completions", **{"prompt": "x", "max_tokens": 3, **model, **body})

    def text(self, name: str | None, **body: Any) -> str:
        answer = self.ask(name, **body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def later(self, name: str, **body: Any) -> Future[httpx.Response]:
        return self.threads.submit(self.ask, name, **body)

    def post(self, path: str) -> httpx.Response:
        return self.inside.client.post(f"/v1/models/{path}")

    def states(self) -> dict[str, str]:
        cards = self.inside.client.get("/v1/models").json()["data"]
        return {card["id"]: card["state"] for card in cards}

    @contextmanager
    def stream(self, name: str) -> Iterator[Iterator[str]]:
        """The lines of a long answer, which has begun."""
        body = {"model": name, "prompt": "x", "max_tokens": 3000, "stream": True}
        with self.inside.client.stream("POST", "/v1/completions", json=body) as response:
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines


@contextmanager
def several(
    serve: dict[str, Any] | None = None,
    gigabytes: dict[str, float] | None = None,
    loader: ScriptedLoader | None = None,
    **script: Any,
) -> Iterator[Pool]:
    sizes = {PATHS[name]: size for name, size in (gigabytes or {}).items()}
    loader = loader or ScriptedLoader(gigabytes=sizes, **script)
    settings = {"model": "path-a", "serve": serve or {}}
    with serving(Catalogue(settings, PATHS, {"head": "eagle3"}), loader) as inside:
        yield Pool(inside, loader)


# names


def test_requests_choose_a_model_and_the_first_is_the_default() -> None:
    with several() as pool:
        assert pool.states() == {"a": "loaded", "b": "unloaded", "c": "unloaded", "head": "drafter"}
        assert pool.ask("b").json()["model"] == "b"
        assert pool.ask(None).json()["model"] == "a"
        assert pool.states()["b"] == "loaded" and pool.states()["c"] == "unloaded"
        cards = {card["id"]: card for card in pool.inside.client.get("/v1/models").json()["data"]}
        assert cards["a"]["default"] and not cards["b"]["default"]
        assert (cards["b"]["max_model_len"], cards["c"]["max_model_len"]) == (4096, None)
        assert cards["head"]["drafter"] == "eagle3" and cards["a"]["drafter"] is None
        assert pool.inside.client.get("/v1/models/b").json() == cards["b"]
        chat = {"messages": [{"role": "user", "content": "x"}]}
        bodies = (("completions", {"prompt": "x"}), ("chat/completions", chat), ("responses", {"input": "x"}))
        for name, what in (
            ("nobody", "this server"),
            ("head", "is a drafter of method eagle3, not a model; this server"),
        ):
            for route, body in bodies:
                refused = pool.inside.post(route, model=name, **body)
                error = refused.json()["error"]
                assert (refused.status_code, error["code"]) == (404, "model_not_found")
                assert error["message"] == f"model = {name!r}: {what} serves 'a', 'b', 'c'"


def test_the_routes_beside_generation_take_a_model() -> None:
    with several() as pool:
        client = pool.inside.client
        tokens = client.post("/tokenize", json={"prompt": "hi", "model": "b"}).json()["tokens"]
        text = client.post("/detokenize", json={"tokens": tokens, "model": "b"}).json()["prompt"]
        assert text == "hi" and pool.states()["b"] == "loaded" and pool.states()["c"] == "unloaded"
        table = client.get("/v1/speculation/capabilities?model=b").json()
        assert table["model"] == "b" and client.get("/v1/speculation/capabilities").json()["model"] == "a"
        pool.text("b", prompt="say:remember", user="u")
        forget = "/v1/speculation/pools?pool=u"
        assert client.delete(forget).status_code == 404, "those of the default model"
        assert client.delete(forget + "&model=b").status_code == 204
        assert client.delete(forget + "&model=b").status_code == 404
        assert client.delete(forget + "&modle=b").status_code == 400
        assert client.delete(forget + "&model=nobody").status_code == 404


def test_a_pinned_name_has_to_be_there() -> None:
    with pytest.raises(ConfigError, match="pin = 'd': must be a model of this server: 'a', 'b', 'c'"):
        with several({"pin": ["d"]}):
            pass


def test_each_model_writes_a_record_of_its_own(tmp_path: Path) -> None:
    settings = {"events": tmp_path / "events.jsonl"}
    paths = {"a/b": "path-a", "a-b": "path-b", "c": "path-c"}
    found = [Catalogue(settings, paths).settings_of(name).keywords["events"].name for name in paths]
    assert found == ["events-a-b-1.jsonl", "events-a-b-2.jsonl", "events-c.jsonl"]
    alone = Catalogue(settings, {"a": "path-a"}).settings_of("a").keywords
    assert alone == {**settings, "model": "path-a"}


# loads


def check_that_requests_share_a_load() -> None:
    gate = threading.Event()
    loader = ScriptedLoader()
    loader.gates["path-b"] = gate
    with several(loader=loader) as pool:
        asking = [pool.later("b") for _ in range(8)]
        wait_until(lambda: pool.model("b").waiting == 8)
        assert pool.states()["b"] == "loading" and pool.text("a") == "abc"
        gate.set()
        assert [one.result().status_code for one in asking] == [200] * 8
        assert pool.model("b").loads == 1


def test_many_requests_wait_for_one_load() -> None:
    check_that_requests_share_a_load()


def test_a_load_for_each_request_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: every request begins a load of its own."""
    monkeypatch.setattr(ModelPool, "_one_load", ModelPool._load)
    with pytest.raises(AssertionError):
        check_that_requests_share_a_load()


def test_a_client_that_leaves_does_not_end_the_load() -> None:
    gate = threading.Event()
    loader = ScriptedLoader()
    loader.gates["path-b"] = gate
    with several(loader=loader) as pool:
        with pytest.raises(httpx.TimeoutException):
            body = {"model": "b", "prompt": "x"}
            pool.inside.client.post("/v1/completions", json=body, timeout=0.3)
        wait_until(lambda: pool.model("b").waiting == 0)
        gate.set()
        wait_until(lambda: pool.states()["b"] == "loaded")


def test_a_failed_load_is_an_error_of_its_requests_and_tried_again() -> None:
    loader = ScriptedLoader()
    loader.faults["path-b"] = [ModelNotFound("planted"), ModelNotFound("planted again")]
    with several(loader=loader) as pool:
        for reason in ("planted", "planted again"):
            failed = pool.ask("b")
            error = failed.json()["error"]
            assert (
                failed.status_code == 503 and error["code"] == "load_failed" and failed.headers["retry-after"]
            )
            assert error["message"] == f"model 'b' could not be loaded: ModelNotFound: {reason}"
            assert pool.states()["b"] == "failed"
        assert "the next attempt is possible in 1 s" in pool.ask("b").json()["error"]["message"]
        card = pool.inside.client.get("/v1/models/b").json()
        assert card["error"] == "planted again" and pool.inside.client.get("/health").status_code == 200
        assert pool.text("a") == "abc"
        wait_until(lambda: pool.ask("b").status_code == 200, 3)
        assert pool.model("b").failures == 2 and pool.states()["b"] == "loaded"


def test_a_default_model_in_its_pause_is_not_healthy_and_others_serve() -> None:
    loader = ScriptedLoader()
    with several({"restart_engine": False}, loader=loader) as pool:
        pool.model("a")._pause = 60.0
        cut(loader.engines["path-a"])
        wait_until(lambda: pool.states()["a"] == "failed")
        health = pool.inside.client.get("/health")
        assert health.status_code == 503 and "could not be loaded" in health.json()["error"]["message"]
        assert pool.text("b") == "abc"
        pool.model("a")._retry_at = 0.0  # the pause is over
        assert pool.inside.client.get("/health").status_code == 200, "it can be loaded"
        assert pool.text("a") == "abc" and pool.inside.client.get("/ready").status_code == 200


# memory

TWO_OF_THREE = {"a": 4.0, "b": 4.0, "c": 4.0}


def test_the_model_that_was_used_least_recently_makes_room() -> None:
    with several({"memory_gb": 10}, TWO_OF_THREE) as pool:
        pool.text("b"), pool.text("a"), pool.text("c")
        assert pool.states() == {"a": "loaded", "b": "unloaded", "c": "loaded", "head": "drafter"}
        pool.text("b")
        assert pool.states() == {"a": "unloaded", "b": "loaded", "c": "loaded", "head": "drafter"}
        assert pool.inside.client.get("/health").status_code == 200, "the default can be loaded"
        assert pool.text(None) == "abc" and pool.states()["c"] == "unloaded"
        assert [pool.model(name).evictions for name in "abc"] == [1, 1, 1]


def check_that_a_busy_model_stays() -> None:
    """`a` was used before `b`, and has a stream."""
    with several({"memory_gb": 10}, TWO_OF_THREE, step_seconds=0.005) as pool:
        with pool.stream("a") as lines:
            pool.text("b"), pool.text("c")
            assert pool.states() == {"a": "loaded", "b": "unloaded", "c": "loaded", "head": "drafter"}
            assert "error" not in json.loads(next(lines).removeprefix("data: "))


def test_a_busy_model_is_not_ended() -> None:
    check_that_a_busy_model_stays()


def test_an_eviction_of_a_busy_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin: whatever is loaded counts as idle."""
    monkeypatch.setattr(PooledModel, "idle", property(lambda model: model.state == "loaded"))
    with pytest.raises(AssertionError):
        check_that_a_busy_model_stays()


def test_what_does_not_fit_is_refused_with_the_numbers_and_ends_nothing() -> None:
    with several({"memory_gb": 10, "pin": ["a"]}, {**TWO_OF_THREE, "c": 7.0}) as pool:
        pool.text("b")
        refused = pool.ask("c")
        error = refused.json()["error"]
        assert refused.status_code == 503 and error["code"] == "no_room"
        held = "held by a 4.00 (pinned), b 4.00 (loaded)"
        assert error["message"] == f"c needs 7.00 GB, 2.00 of 10.00 GB are free on cpu; {held}"
        assert pool.states() == {"a": "loaded", "b": "loaded", "c": "unloaded", "head": "drafter"}
        assert pool.inside.client.get("/v1/models/a").json()["pinned"]


def test_the_share_goes_to_the_engine_and_is_given_back_by_a_crash() -> None:
    class Limited(ScriptedLoader):
        def share(self, settings: dict[str, Any], total: int) -> Any:
            share = super().share(settings, total)
            return share._replace(settings={**settings, "kv_memory_gb": 0.5})

    loader = Limited(gigabytes=dict.fromkeys(PATHS.values(), 4.0))
    with several({"memory_gb": 10, "restart_engine": False}, loader=loader) as pool:
        assert loader.engines["path-a"].inner.config.kv_memory_gb == 0.5
        assert pool.inside.state.pool.free("cpu") == 6 * 2**30
        cut(loader.engines["path-a"])
        wait_until(lambda: pool.states()["a"] == "failed")
        wait_until(lambda: pool.inside.state.pool.free("cpu") == 10 * 2**30)  # once its process has ended


def test_refused_settings_and_a_fault_of_the_estimate_are_failed_loads() -> None:
    class Wrong(ScriptedLoader):
        def share(self, settings: dict[str, Any], total: int) -> Any:
            if settings["model"] == "path-c":
                raise RuntimeError("no such device")
            wrong = {"kv_memory_gb": 0.0} if settings["model"] == "path-b" else {}
            return super().share(settings, total)._replace(settings={**settings, **wrong})

    with several(loader=Wrong()) as pool:
        for name, reason in (("b", "kv_memory_gb"), ("c", "no such device")):
            answer = pool.ask(name)
            assert answer.json()["error"]["code"] == "load_failed" and reason in answer.text
            assert pool.states()[name] == "failed" and pool.text("a") == "abc"


# loading and ending by scripts


def test_a_load_reports_its_stages_and_its_end() -> None:
    with several() as pool:
        for _ in range(2):
            answer = pool.post("b/load")
            *events, done = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            events = [json.loads(event) for event in events]
            assert done == "[DONE]" and answer.headers["content-type"].startswith("text/event-stream")
            assert events[-1] == {"model": "b", "state": "loaded", "seconds": events[-1]["seconds"]}
            stages = [event.get("stage") for event in events[:-1]]
            assert stages == ([None, "reading the script"] if not _ else [])
        assert pool.post("nobody/load").status_code == pool.post("nobody/unload").status_code == 404


def test_a_load_that_fails_ends_its_events_with_the_error() -> None:
    loader = ScriptedLoader()
    loader.faults["path-b"] = [ModelNotFound("planted")]
    with several(loader=loader) as pool:
        last = events_of(pool.post("b/load"))[-1]
        assert last["error"]["code"] == "load_failed" and "planted" in last["error"]["message"]


def test_an_unload_waits_for_running_requests() -> None:
    with several(step_seconds=0.01) as pool:
        pool.text("b")
        running = pool.later("b", max_tokens=200)
        wait_until(lambda: pool.model("b").engine.open_requests)
        ending = pool.threads.submit(pool.post, "b/unload")
        wait_until(lambda: pool.states()["b"] == "draining")
        after = pool.later("b")
        assert len(running.result().json()["choices"][0]["text"]) == 200
        assert ending.result().json()["id"] == "b" and after.result().status_code == 200
        assert pool.model("b").loads == 2, "the request that came meanwhile loads it again"
        assert pool.post("b/unload").json()["state"] == "unloaded" == pool.post("b/unload").json()["state"]


def test_two_unloads_both_wait_for_the_end() -> None:
    with several(step_seconds=0.01) as pool:
        running = pool.later("b", max_tokens=200)
        wait_until(lambda: pool.model("b").engine.open_requests == 1)
        first = pool.threads.submit(pool.post, "b/unload")
        wait_until(lambda: pool.model("b").state == "draining")
        assert pool.post("b/unload").json()["state"] == "unloaded"
        assert first.result().status_code == 200 and running.result().status_code == 200


def test_an_unload_ends_what_runs_on() -> None:
    with several({"drain_timeout": 0.1}, step_seconds=0.005) as pool:
        with pool.stream("b") as lines:
            assert pool.post("b/unload").json()["state"] == "unloaded"
            ends = [line for line in lines if "finish_reason" in line or "error" in line][-1]
            assert '"abort"' in ends, ends


def test_the_only_model_of_a_server_stays() -> None:
    with served() as inside:
        assert inside.client.post("/v1/models/scripted/unload").status_code == 400
        assert events_of(inside.client.post("/v1/models/scripted/load"))[-1]["state"] == "loaded"


# ends


def test_a_crash_costs_the_streams_of_its_model_alone(caplog: pytest.LogCaptureFixture) -> None:
    with several({"restart_engine": False}, step_seconds=0.005) as pool:
        with pool.stream("a") as first, pool.stream("b") as second:
            cut(pool.loader.engines["path-b"])
            *_, error, done = second
            assert (
                "the engine's process has ended"
                in json.loads(error.removeprefix("data: "))["error"]["message"]
            )
            assert done == "data: [DONE]" and "error" not in json.loads(next(first).removeprefix("data: "))
            assert pool.text("b") == "abc", "loaded again by the request"
            told = "b: EngineError: the engine's process has ended"
            assert sum(message.startswith(told) for message in caplog.messages) == 1
            assert pool.model("b").loads == 2 and pool.model("a").loads == 1
            assert "error" not in json.loads(next(first).removeprefix("data: "))


def test_requests_that_wait_for_a_load_are_refused_at_the_end(tmp_path: Path) -> None:
    with started(tmp_path, "--model", "a", "--model", "b", SCRIPTED_LOAD="1") as server:
        url = server.ready()
        waiting = Reader(url, model="b")
        server.wait_for(lambda: "loading b: reading the script" in server.stderr)
        check_clean(server)
        waiting.join(10)
        (line,) = waiting.lines
        assert line["error"]["message"] == "the server is about to end"
        assert (
            "models: a, b; requests that name no model use the first\n" in server.stderr
            and "serving a:" in server.stderr
        )


# metrics


def test_every_series_of_an_engine_has_its_model() -> None:
    with several() as pool:
        pool.text("a", prompt="say:one"), pool.text("b", prompt="say:three"), pool.text("b")
        wait_until(lambda: pool.inside.metric('speculon_sequences_total{model="b"}') == 2)
        page = pool.inside.client.get("/metrics").text
        families = list(text_string_to_metric_families(page))
        names = [family.name for family in families]
        assert len(names) == len(set(names)) and page.count("# TYPE speculon_sequences_total") == 1
        http = ("http_requests", "requests", "request_seconds", "time_to_first_token_seconds")
        shared = {
            f"speculon_{name}" for name in (*http, "inter_token_seconds", "time_per_output_token_seconds")
        }
        for family in families:
            for sample in family.samples:
                named = sample.labels.get("model") or sample.labels.get("model_name")
                assert (named in PATHS) != (family.name.removesuffix("_created") in shared), sample
        by_name = {
            name: pool.inside.metric(f'speculon_generated_tokens_total{{model="{name}"}}') for name in PATHS
        }
        assert by_name == {"a": 3, "b": 6, "c": 0}
        assert pool.inside.metric('speculon_model_state{model="b",state="loaded"}') == 1
        assert pool.inside.metric("speculon_model_state") == 3, "one state each"
        assert pool.inside.metric('speculon_model_loads_total{model="b"}') == 1
