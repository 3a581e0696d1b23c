"""The commands of docs/cluster.md on a Ray cluster: `serve deploy`, files that have changed, `serve run`."""

from __future__ import annotations

import re
import signal
import subprocess
from copy import deepcopy
from time import sleep
from typing import Any

import httpx2 as httpx
import openai
import pytest

from tests.cluster.conftest import AUTOSCALED, DOCUMENT, SCALED, Cluster, ready, until
from tests.cluster.load import Case, under_load
from tests.server.outside import LOCAL_HTTP

pytestmark = pytest.mark.long


def write(url: str, case: Case, **options: Any) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        reply = api.completions.create(model="demo", prompt=case.prompt, **case.options, **options)
        return reply.choices[0].text


def test_the_file_of_the_document_serves(cluster: Cluster, mixed: list[Case]) -> None:
    before = set(cluster.engines())
    cluster.deploy(replicas=1)
    until(ready(cluster.url), 300)
    cluster.wait_for(1, without=before)
    assert [write(cluster.url, case) for case in mixed[:4]] == [case.text for case in mixed[:4]]
    status = subprocess.run(["serve", "status"], env=cluster.env, capture_output=True, text=True, timeout=60)
    assert "status: RUNNING" in status.stdout, status


def test_scaling_and_other_settings_under_load_cost_no_request(cluster: Cluster, mixed: list[Case]) -> None:
    """Scaling restarts no replica that stays; other settings replace all of them."""
    first = cluster.wait_for(1)
    engine = {**SCALED["deployments"][0], "num_replicas": 2}

    def change() -> None:
        cluster.deploy(replicas=1, engine=engine)
        two = cluster.wait_for(2)
        assert first < two
        cluster.deploy(replicas=1, engine=engine, max_num_seqs=16)
        new = cluster.wait_for(2, without=two)
        cluster.deploy(replicas=1, engine={**engine, "num_replicas": 1}, max_num_seqs=16)
        assert cluster.wait_for(1) < new

    load = under_load(cluster.url, mixed, change)
    load.check()
    print(f"{load.done} requests, no error")


def test_the_load_chooses_the_number_of_replicas(cluster: Cluster, mixed: list[Case]) -> None:
    engine = deepcopy(AUTOSCALED["deployments"][0])
    quick = {"target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 4}
    engine["autoscaling_config"] |= quick | {"metrics_interval_s": 0.5, "look_back_period_s": 2}
    cluster.deploy(replicas=1, max_replicas=3, engine=engine)
    cluster.wait_for(1)
    most = 0  # replicas

    def change() -> None:
        nonlocal most
        cluster.wait_for(3)
        for _ in range(20):
            most = max(most, len(cluster.engines()))

    load = under_load(cluster.url, mixed, change)
    load.check()
    assert most == 3, "8 clients ask for 4"
    cluster.wait_for(1)


def test_several_servers_take_requests(cluster: Cluster, mixed: list[Case]) -> None:
    cluster.deploy(replicas=2, ingresses=2)
    until(ready(cluster.url), 300)
    cluster.wait_for(2)

    def both_have_routed() -> bool:
        """The two servers are told apart by their counts; the second one may start later than the engines."""
        under_load(cluster.url, mixed, lambda: sleep(3)).check()
        scrapes = {frozenset(cluster.metric("speculon_routed_requests_total").items()) for _ in range(20)}
        return len(scrapes) == 2 and all(sum(count for _, count in scrape) > 0 for scrape in scrapes)

    until(both_have_routed, 90)


def test_a_second_model_runs_beside_it(cluster: Cluster, mixed: list[Case]) -> None:
    (command,) = re.findall(r"^(serve run speculon.operations.cluster:app \S+ \S+)", DOCUMENT, re.MULTILINE)
    command = command.replace("model=smollm2", "model=demo")
    command += " threads=1 cpus=0.5 serve.served_model_name=other --name second --route-prefix /second"
    with (cluster.folder / "run.txt").open("wb") as log:
        process = subprocess.Popen(command.split(), env=cluster.env, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(ready(cluster.url + "/second"), 300)
        assert write(cluster.url, mixed[0]) == mixed[0].text
        names = httpx.get(cluster.url + "/second/v1/models", **LOCAL_HTTP).json()["data"]
        assert [one["id"] for one in names] == ["other"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0
