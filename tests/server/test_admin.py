"""The administration over HTTP: what it shows, what it changes, and what it refuses."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from speculon.core.config.serve import ServeConfig
from speculon.decoding.sequence import Event
from speculon.operations.admin.requests import token_rows
from tests.server.administered import API, KEY, administered, ask
from tests.server.inside import wait_until

pytestmark = pytest.mark.timeout(60)


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


def test_the_key(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, str], int]] = [
        ({}, 401),
        ({"authorization": "Bearer secret2"}, 401),
        ({"authorization": "Bearer client"}, 401),
        (KEY, 200),
        ({**KEY, "origin": "http://elsewhere.example"}, 403),
    ]
    with administered(tmp_path, serve={"admin_key": "secret", "api_key": ["client"]}) as inside:
        inside.client.headers.pop("authorization", None)
        for path in ("overview", "models", "requests", "log"):
            for headers, status in cases:
                assert inside.client.get(f"{API}/{path}", headers=headers).status_code == status
        assert inside.client.get("/v1/models", headers=KEY).status_code == 401  # it opens nothing else


def test_without_a_key_a_name_that_was_bound_anew_is_refused(tmp_path: Path) -> None:
    with administered(tmp_path) as inside:
        assert inside.client.get(f"{API}/overview").status_code == 200
        assert inside.client.get(f"{API}/overview", headers={"host": "elsewhere.example"}).status_code == 403


def test_other_addresses_show_no_texts() -> None:
    assert not ServeConfig(admin=True, host="0.0.0.0", admin_key="k").shows_texts
    assert ServeConfig(admin=True).shows_texts


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
        kept = inside.state.admin.requests.find(done["id"])
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
    rows = token_rows(Event("r", 0, (5, 6), sources=sources, drafted=drafted))
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
