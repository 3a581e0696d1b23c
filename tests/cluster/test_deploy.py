"""The commands of docs/cluster.md on a Ray cluster: `serve deploy`, files that have changed, `serve run`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from time import sleep
from typing import Any

import httpx2 as httpx
import openai
import pytest
import yaml

from tests.cluster.conftest import SETTINGS, Cluster, free_port, until
from tests.cluster.load import Case, under_load
from tests.server.outside import LOCAL_HTTP

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs" / "cluster.md").read_text()
FILE, SCALED, AUTOSCALED = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL))
BIN = Path(sys.executable).parent
pytestmark = pytest.mark.long


class Head(Cluster):
    """A Ray cluster of this machine with its dashboard, which takes the files of `serve deploy`."""

    def __init__(self, folder: Path):
        super().__init__(free_port())
        self.folder = folder
        self.ray, self.dashboard, self.clients = free_port(), free_port(), free_port()
        self._api = f"http://127.0.0.1:{self.dashboard}"
        self._headers = {"authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"}
        self.env = os.environ | {
            "RAY_ADDRESS": f"127.0.0.1:{self.ray}",
            "RAY_DASHBOARD_ADDRESS": self._api,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
        }

    @contextmanager
    def started(self) -> Iterator[Head]:
        flags = f"--head --block --node-ip-address 127.0.0.1 --num-cpus 8 --port {self.ray}"
        flags += f" --dashboard-port {self.dashboard} --ray-client-server-port {self.clients}"
        command = ["ray", "start", *flags.split(), "--object-store-memory", str(100 * 2**20)]
        env = {name: value for name, value in self.env.items() if name != "RAY_ADDRESS"}
        with (self.folder / "ray.txt").open("wb") as log:
            process = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            until(self._answers)
            yield self
        finally:
            process.terminate()
            process.wait(60)

    def _answers(self) -> bool:
        try:
            return self._applications() is not None
        except httpx.HTTPError:
            return False

    def _applications(self) -> dict[str, Any] | None:
        url = self._api + "/api/serve/applications/"
        reply = httpx.get(url, headers=self._headers, timeout=30, **LOCAL_HTTP)
        return reply.json()["applications"] if reply.status_code == 200 else None

    def deploy(self, *, engine: dict[str, Any] | None = None, **args: Any) -> None:
        """The file of the document with these arguments, and Ray's own options of the engines."""
        content = deepcopy(FILE)
        content["http_options"]["port"] = int(self.url.rpartition(":")[2])
        (application,) = content["applications"]
        state = {"state": str(self.folder / "state")}
        application["args"] |= {"max_replicas": None, **SETTINGS, **state, **args}
        application["deployments"] = [engine] if engine is not None else []
        (self.folder / "cluster.yaml").write_text(yaml.safe_dump(content))
        command = ["serve", "deploy", "cluster.yaml"]
        subprocess.run(command, cwd=self.folder, env=self.env, check=True, capture_output=True, timeout=60)

    def engines(self) -> dict[str, str]:
        """Id -> state of every replica of the engine."""
        deployments = (self._applications() or {}).get("speculon", {}).get("deployments", {})
        replicas = deployments["Engine"]["replicas"] if "Engine" in deployments else []
        return {replica["replica_id"]: replica["state"] for replica in replicas}

    def wait_for(self, count: int, without: set[str] | None = None) -> set[str]:
        """So many engines run, and nothing else; returns their ids."""

        def there() -> bool:
            engines = self.engines()
            return [*engines.values()] == ["RUNNING"] * count and not engines.keys() & (without or set())

        until(there, 120)
        until(lambda: sum(self.metric("speculon_replicas").values()) == count, 10)
        return set(self.engines())


@pytest.fixture(scope="module")
def head(mixed: list[Case], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Head]:
    with Head(tmp_path_factory.mktemp("cluster")).started() as head:
        yield head


def ready(url: str) -> Callable[[], bool]:
    def asked() -> bool:
        try:
            return httpx.get(url + "/ready", **LOCAL_HTTP).status_code == 200
        except httpx.HTTPError:
            return False

    return asked


def write(url: str, case: Case, **options: Any) -> str:
    with openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as api:
        reply = api.completions.create(model="demo", prompt=case.prompt, **case.options, **options)
        return reply.choices[0].text


def test_the_file_of_the_document_serves(head: Head, mixed: list[Case]) -> None:
    head.deploy(replicas=1)
    until(ready(head.url), 120)
    head.wait_for(1)
    assert [write(head.url, case) for case in mixed[:4]] == [case.text for case in mixed[:4]]
    status = subprocess.run(["serve", "status"], env=head.env, capture_output=True, text=True, timeout=60)
    assert "status: RUNNING" in status.stdout, status


def test_scaling_under_load_costs_no_request(head: Head, mixed: list[Case]) -> None:
    """Replicas that stay are not restarted."""
    first = head.wait_for(1)
    (engine,) = SCALED["deployments"]

    def change() -> None:
        head.deploy(replicas=1, engine=engine)
        three = head.wait_for(3)
        head.deploy(replicas=1, engine={**engine, "num_replicas": 1})
        one = head.wait_for(1)
        assert first < three and one < three

    load = under_load(head.url, mixed, change)
    load.check()
    print(f"{load.done} requests, no error")


def test_a_changed_file_replaces_replicas_without_an_error(head: Head, mixed: list[Case]) -> None:
    head.deploy(replicas=1, engine={**SCALED["deployments"][0], "num_replicas": 2})
    old = head.wait_for(2)

    def change() -> None:
        head.deploy(replicas=2, max_num_seqs=16)
        head.wait_for(2, without=old)

    load = under_load(head.url, mixed, change)
    load.check()
    print(f"{load.done} requests, no error")


def test_the_load_chooses_the_number_of_replicas(head: Head, mixed: list[Case]) -> None:
    engine = deepcopy(AUTOSCALED["deployments"][0])
    quick = {"target_ongoing_requests": 2, "upscale_delay_s": 1, "downscale_delay_s": 4}
    engine["autoscaling_config"] |= quick | {"metrics_interval_s": 0.5, "look_back_period_s": 2}
    head.deploy(replicas=1, max_replicas=3, engine=engine)
    head.wait_for(1)
    most = 0  # replicas

    def change() -> None:
        nonlocal most
        head.wait_for(3)
        for _ in range(20):
            most = max(most, len(head.engines()))

    load = under_load(head.url, mixed, change)
    load.check()
    assert most == 3, "8 clients ask for 4"
    head.wait_for(1)


def test_several_servers_take_requests(head: Head, mixed: list[Case]) -> None:
    head.deploy(replicas=2, ingresses=2)
    until(ready(head.url), 120)
    head.wait_for(2)
    load = under_load(head.url, mixed, lambda: sleep(10))
    load.check()
    scrapes = {frozenset(head.metric("speculon_routed_requests_total").items()) for _ in range(20)}
    assert len(scrapes) == 2, "each has routed other requests"
    assert all(sum(count for _, count in scrape) > 0 for scrape in scrapes)


def test_a_second_model_runs_beside_it(head: Head, mixed: list[Case]) -> None:
    (command,) = re.findall(r"^(serve run speculon.operations.cluster:app \S+ \S+)", DOCUMENT, re.MULTILINE)
    command = command.replace("model=smollm2", "model=demo")
    command += " threads=1 cpus=0.5 serve.served_model_name=other --name second --route-prefix /second"
    with (head.folder / "run.txt").open("wb") as log:
        process = subprocess.Popen(command.split(), env=head.env, stdout=log, stderr=subprocess.STDOUT)
    try:
        until(ready(head.url + "/second"), 120)
        assert write(head.url, mixed[0]) == mixed[0].text
        names = httpx.get(head.url + "/second/v1/models", **LOCAL_HTTP).json()["data"]
        assert [one["id"] for one in names] == ["other"]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
