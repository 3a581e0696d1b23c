"""Pools of earlier answers over HTTP: separate for each API key and each user, and to be deleted."""

from __future__ import annotations

import json
import logging
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import openai
import pytest

from speculon.core.config import EngineConfig
from speculon.core.errors import ConfigError, EngineError
from speculon.engine import async_engine
from speculon.engine.build import build_engine
from speculon.server import middleware
from tests.server.inside import Inside, served, wait_until
from tests.server.outside import LOCAL_HTTP, Outside
from tests.server.test_abuse import refusal
from tests.tiny.checkpoint import write_checkpoint

pytestmark = pytest.mark.timeout(60)

KEYS = ["key-of-a", "key-of-b"]
PROMPT = "say:one two three four five"
ROUTE = "/v1/speculation/pools"


@pytest.fixture(scope="module")
def keyed() -> Iterator[Inside]:
    with served(api_key=KEYS) as inside:
        yield inside


@pytest.fixture
def inside(keyed: Inside) -> Inside:
    """The server of all tests, without a pool."""
    for key in KEYS:
        forget(keyed, key)
    assert not keyed.engine.pools.sizes
    return keyed


def by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def write(inside: Inside, key: str = KEYS[0], **body: Any) -> None:
    response = inside.client.post("/v1/completions", json={"prompt": PROMPT, **body}, headers=by(key))
    assert response.status_code == 200, response.text


def pools_of(inside: Inside, **body: Any) -> set[str]:
    """The pools that one request enters."""
    before = inside.engine.pools.sizes
    write(inside, **body)
    now = inside.engine.pools.sizes
    return {pool for pool, size in now.items() if size != before.get(pool)}


def forget(inside: Inside, key: str = KEYS[0], query: str = "") -> int:
    return inside.client.delete(ROUTE + query, headers=by(key)).status_code


# isolation

NAMES: tuple[dict[str, Any], ...] = (
    {},
    {"user": "alice"},
    {"safety_identifier": "alice"},
    {"prompt_cache_key": "alice"},
    {"speculation": {"pool": "alice"}},
    {"speculation": {"pool": "key-of-b"}},
)


def check_isolation() -> None:
    """Whatever names clients with different keys send, and whether or not the server needs keys."""
    for settings in ({"api_key": KEYS}, {}):
        with served(**settings) as inside:
            mine, others = (
                set().union(*(pools_of(inside, key=key, **fields) for fields in NAMES)) for key in KEYS
            )
            assert len(mine) == len(others) == 3 and not mine & others
            held = len(inside.engine.pools.sizes)
            assert (
                forget(inside, "key-of-c") == (401 if settings else 404)
                and len(inside.engine.pools.sizes) == held
            )


def test_no_key_uses_the_answers_to_another() -> None:
    check_isolation()


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda token: "", id="no key"),
        pytest.param(lambda token: token[:4].decode(), id="half a key"),
    ],
)
def test_a_pool_without_the_key_is_found_out(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware, "tenant_of", wrong)
    with pytest.raises(AssertionError):
        check_isolation()


def test_no_client_names_another_tenant(inside: Inside) -> None:
    for fields in ({"speculation": {"tenant": "x"}}, {"tenant": "x"}):
        refusal(inside.client.post("/v1/completions", json={"prompt": PROMPT, **fields}), 400)


def test_keys_and_names_stay_in_the_middleware(
    inside: Inside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sent: list[bytes] = []
    send = async_engine.AsyncEngine._send

    async def noted(engine: Any, message: Any) -> None:
        sent.append(pickle.dumps(message))
        await send(engine, message)

    monkeypatch.setattr(async_engine.AsyncEngine, "_send", noted)
    with caplog.at_level(logging.DEBUG):
        write(inside, user="alice")
        assert forget(inside, query="?pool=alice") == 204 and forget(inside, query="?pool=alice") == 404
        wait_until(lambda: any(f"404 {ROUTE}" in message for message in caplog.messages))  # after the answer
    logged = [record.getMessage() for record in caplog.records if record.name.startswith("speculon")]
    output = b"".join(sent) + json.dumps([*logged, *inside.engine.pools.sizes]).encode()
    assert b"ForgetPools" in output and b"404 " + ROUTE.encode() in output, (
        "the output that is searched is not empty"
    )
    assert b"alice" not in output and b"key-of" not in output


# whose pool it is


def test_a_caller_has_a_pool_of_his_own(inside: Inside) -> None:
    (alice,) = pools_of(inside, user="alice")
    assert pools_of(inside, user="alice", prompt="say:something else") == {alice}
    assert pools_of(inside, speculation={"pool": "alice"}, user="bob") == {alice}, (
        "`speculation.pool` comes first"
    )
    assert pools_of(inside, safety_identifier="alice", user="bob", prompt_cache_key="c") == {alice}
    assert pools_of(inside, safety_identifier=" ", user="alice", prompt_cache_key="c") == {alice}
    assert pools_of(inside, user="", prompt_cache_key="alice") == {alice}
    (unnamed,) = pools_of(inside)
    assert unnamed != alice and pools_of(inside, user=" \t") == {unnamed}, "a blank name is none"
    assert pools_of(inside, prompt="say:something else") != {unnamed}, "without a name: the prompt's"
    assert pools_of(inside, user="u" * 5000), "any name will do"
    odd = json.dumps({"prompt": PROMPT, "user": "\ud800"})
    headers = {"content-type": "application/json", **by(KEYS[0])}
    assert inside.client.post("/v1/completions", content=odd, headers=headers).status_code == 200


def test_a_request_may_have_no_pool(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pools_of(inside, speculation={"pool": ""}, user="alice") == set()
    monkeypatch.setattr(inside.engine.pools, "max_pools", 0)
    assert pools_of(inside, user="alice") == set()


def test_a_chat_has_its_caller_too(inside: Inside) -> None:
    (alice,) = pools_of(inside, user="alice")
    before = inside.engine.pools.sizes[alice]
    chat = {"messages": [{"role": "user", "content": PROMPT}], "user": "alice", "max_tokens": 8}
    assert inside.client.post("/v1/chat/completions", json=chat, headers=by(KEYS[0])).status_code == 200
    assert inside.engine.pools.sizes[alice] > before


def test_a_bad_pool_is_refused_by_name(inside: Inside) -> None:
    for pool in (5, "p" * 257):
        response = inside.client.post("/v1/completions", json={"prompt": "x", "speculation": {"pool": pool}})
        assert refusal(response, 400)["param"] == "speculation.pool"


# deletion


def test_a_user_or_all_of_a_key_is_forgotten_and_the_others_are_not(inside: Inside) -> None:
    for key in KEYS:
        for user in ("alice", "bob"):
            write(inside, key, user=user)
    inside.eventually(lambda: inside.metric("speculon_history_pools") == 4)
    inside.eventually(lambda: inside.metric("speculon_history_pool_tokens") == 4 * 17)
    assert forget(inside, query="?pool=alice") == 204 and forget(inside, query="?pool=alice") == 404
    assert forget(inside, KEYS[1], "?pool=alice") == 204, "the other key's alice was another"
    assert len(inside.engine.pools.sizes) == 2
    for fields in NAMES:
        write(inside, **fields)
    assert forget(inside) == 204 and len(inside.engine.pools.sizes) == 1
    assert forget(inside) == 404 and forget(inside, KEYS[1]) == 204 and not inside.engine.pools.sizes


def test_a_misspelt_query_and_the_empty_name_delete_nothing(inside: Inside) -> None:
    write(inside, user="alice")
    for query in ("?user=alice", "?pool=alice&pool=bob", "?pool=alice&x=1", "?x"):
        refused = refusal(inside.client.delete(ROUTE + query, headers=by(KEYS[0])), 400)
        assert refused["param"] == "query"
    assert forget(inside, query="?pool=") == forget(inside, query="?pool=%20") == 404
    assert len(inside.engine.pools.sizes) == 1


def test_after_the_engine_has_ended_deletion_fails() -> None:
    with served() as inside:
        inside.state.pool.default.engine.fail(EngineError("planted"))
        assert refusal(inside.client.delete(ROUTE), 503)["code"] == "not_ready"


# several keys


def test_each_of_several_keys_opens(inside: Inside, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: compared.append(b) or a == b)
    for key, status in [
        (KEYS[0], 200),
        (KEYS[1], 200),
        ("key-of-c", 401),
        ("\n".join(KEYS).replace("\n", " "), 401),
    ]:
        compared.clear()
        assert inside.client.get("/v1/models", headers=by(key)).status_code == status
        assert compared == [key.encode() for key in KEYS], "all of them, whichever fits"


def test_keys_from_the_environment_stand_on_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> list[str]:
        return [key.get_secret_value() for key in EngineConfig().serve.api_key]

    assert keys() == []
    for value, expected in [
        ("one", ["one"]),
        ("a b\nc", ["a b", "c"]),
        ("12345", ["12345"]),
        ("null", ["null"]),
        ("[]", ["[]"]),
    ]:
        monkeypatch.setenv("SPECULON_SERVE__API_KEY", value)
        assert keys() == expected
    for value in ("", "\n", "a\n\nb", " "):
        monkeypatch.setenv("SPECULON_SERVE__API_KEY", value)
        with pytest.raises(ConfigError, match="api_key"):
            keys()


# the real engine


def calls(client: openai.OpenAI, key: str, **body: Any) -> int:
    """Target calls for one answer."""
    speculation = {
        "method": "suffix",
        "num_speculative_tokens": 8,
        "stats": True,
        **body.pop("speculation", {}),
    }
    answer = client.with_options(api_key=key).completions.create(
        model="demo",
        prompt="def mean(values):\n",
        max_tokens=48,
        temperature=0,
        extra_body={"speculation": speculation, **body},
    )
    return int(answer.speculation["target_calls"]) if "target_calls" in answer.speculation else 48  # type: ignore[attr-defined]


@pytest.mark.timeout(300)  # the model is loaded for the first test that asks for it
def test_speed_reveals_nothing_to_another_key(client: openai.OpenAI, real: Outside) -> None:
    cold = calls(client, "a")
    assert calls(client, "a") < 0.5 * cold, "the same answer again"
    assert calls(client, "b") == cold and calls(client, "a", speculation={"pool": ""}) == cold
    named = calls(client, "a", user="alice")
    assert (
        named == cold
        and calls(client, "a", user="alice") < 0.5 * cold
        and calls(client, "b", user="alice") == cold
    )
    url = real.url()
    assert (
        httpx.delete(url + ROUTE, params={"pool": "alice"}, headers=by("a"), **LOCAL_HTTP).status_code == 204
    )
    assert calls(client, "a", user="alice") == cold and calls(client, "a") < 0.5 * cold
    assert httpx.delete(url + ROUTE, headers=by("a"), **LOCAL_HTTP).status_code == 204
    assert calls(client, "a") == cold
    page = httpx.get(url + "/metrics", **LOCAL_HTTP).text
    count, seconds = (
        float(
            re.search(rf'^speculon_{name}_total{{method="suffix",model="demo"}} (.+)$', page, re.MULTILINE)[1]
        )  # type: ignore[index]
        for name in ("proposals", "proposal_seconds")
    )
    assert count > 50 and 1e-6 < seconds / count < 1e-2


def check_kept(folder: Path, serve: Callable[[str], AbstractContextManager[str]]) -> None:
    """`serve` yields the address of a server that keeps its state in the folder."""

    def at(url: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0, timeout=60)

    def restored(url: str, part: str) -> float:
        page = httpx.get(url + "/metrics", **LOCAL_HTTP).text
        found = re.search(
            rf'^speculon_restored_total{{model="demo",part="{part}"}} (.+)$', page, re.MULTILINE
        )
        return float(found[1]) if found else -1

    fixed = {"policy": "fixed"}
    with serve("first") as url, at(url) as client:
        cold = calls(client, "a", user="alice", speculation=fixed)
        calls(client, "a", user="bob", speculation={"policy": "goodput"})
    (pools,) = folder.glob("pools-*")
    assert len(pools.read_text().splitlines()) == 4 and "alice" not in pools.read_text()
    with serve("second") as url, at(url) as client:
        wait_until(lambda: restored(url, "pools") == 2)
        assert restored(url, "policies") == 2, "costs, and goodput"
        others, own = (calls(client, key, user="alice", speculation=fixed) for key in "ba")
        assert others == cold > 2 * own
        assert httpx.delete(url + ROUTE, headers=by("a"), **LOCAL_HTTP).status_code == 204
        assert len(pools.read_text().splitlines()) == 3, "only the other key's is left, at once"


def test_answers_outlive_the_server_and_can_be_deleted_for_good(tmp_path: Path) -> None:
    """With the engine in this process; in the soak both servers are processes."""
    speculation = {"policy": "goodput", "method": "suffix"}
    settings = {"warmup": False, "state": tmp_path / "state", "speculation": speculation}
    config = EngineConfig(model=str(write_checkpoint(tmp_path / "model")), **settings)

    @contextmanager
    def serve(name: str) -> Iterator[str]:
        with closing(build_engine(config)) as engine:
            with served(over=engine, served_model_name="demo") as inside:
                yield inside.url

    check_kept(tmp_path / "state", serve)
