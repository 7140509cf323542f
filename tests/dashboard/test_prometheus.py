"""A real Prometheus scrapes a run's page, if there is one (Debian's package `prometheus`)."""

import json
import shutil
import socket
import subprocess

import httpx
import pytest

from ddiloco.dashboard.server import PageServer
from tests.remote.ends import until

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="needs prometheus")


@pytest.fixture
def ask(run_of, tmp_path):
    """Asks a Prometheus that scrapes the page of a planted run: the samples of a query."""
    page = PageServer("127.0.0.1:0", [run_of("lives")])
    page.start()
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    target = page.url.removeprefix("http://").strip("/")
    jobs = [{"job_name": "ddiloco", "static_configs": [{"targets": [target]}]}]
    settings = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yml").write_text(json.dumps(settings))  # JSON is YAML
    where = (f"--storage.tsdb.path={tmp_path / 'data'}", f"--web.listen-address={address}")
    command = [PROMETHEUS, f"--config.file={tmp_path / 'prometheus.yml'}", *where]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def ask(query):
        try:
            url = f"http://{address}/api/v1/query"
            answer = httpx.get(url, params={"query": query}, trust_env=False, timeout=10.0)
            return answer.raise_for_status().json()["data"]["result"]
        except httpx.HTTPError:  # it has only just begun
            return []

    yield ask
    process.terminate()
    process.wait(30)
    page.stop()


def test_prometheus_has_what_the_page_says(ask):
    until(lambda: ask("ddiloco_advice"), "a scrape")
    [said] = ask("ddiloco_advice")
    assert {name: said["metric"][name] for name in ("run", "rule", "learner")} == {
        "run": "lives",
        "rule": "dead",
        "learner": "1",
    }
    [state] = ask('ddiloco_learner_state{learner="1"} == 1')
    assert state["metric"]["state"] == "dead"
    assert [up["value"][1] for up in ask("up")] == ["1"]
