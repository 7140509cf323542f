"""The page over HTTP, from real sockets: who may look, what is sent, and that it ends with the run."""

import contextlib
import json
import os
import re
import resource
import shutil
import socket
import sys
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ddiloco.config import ConfigError
from ddiloco.dashboard import server as board
from ddiloco.dashboard.exposition import METRICS
from ddiloco.dashboard.server import PageServer
from ddiloco.dashboard.visitors import Visitors, check_page
from ddiloco.run import job
from tests.virtual_runs import virtual

TOKEN = "a token of the run's own"
HERE = "127.0.0.1:0"


@pytest.fixture
def serve():
    """Serves workdirs, and stops after the test."""
    made = []

    def start(*workdirs, address=HERE, visitors=None):
        server = PageServer(address, workdirs, *[visitors] * (visitors is not None))
        made.append(server)
        server.start()
        return server

    yield start
    for server in made:
        server.stop()


@pytest.fixture
def guarded(serve, run_of, monkeypatch):
    """A page that asks for the token, as beyond the loopback, and how to ask it."""
    monkeypatch.setattr("ddiloco.dashboard.server.is_loopback", lambda address: False)
    server = serve(run_of("lives"), visitors=Visitors(lambda token: token == TOKEN))
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client


@pytest.fixture
def client(serve, run_of):
    with httpx.Client(base_url=serve(run_of("lives")).url, trust_env=False) as client:
        yield client


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere only 127.0.0.1 is there")
def test_a_page_at_another_address_of_the_loopback_answers_there(serve, run_of):
    server = serve(run_of("lives"), address="127.0.0.2:0")
    assert server.url.startswith("http://127.0.0.2:")
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get("/").status_code == 200


@pytest.mark.skipif(
    resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2000, reason="a process may not have as many files here"
)
def test_a_process_with_more_than_a_thousand_files_has_a_page(serve, run_of):
    with contextlib.ExitStack() as stack:
        while (taken := os.dup(0)) < 1024:
            stack.callback(os.close, taken)
        stack.callback(os.close, taken)
        with httpx.Client(base_url=serve(run_of("lives")).url, trust_env=False) as client:
            assert client.get("/").status_code == 200


def test_the_page_its_files_and_the_report_are_served(client):
    page = client.get("/")
    assert page.status_code == 200 and "Learner 1 has been dead" in page.text
    assert client.get("/page.css").headers["content-type"].startswith("text/css")
    assert "EventSource" in client.get("/page.js").text
    assert "<style>" in client.get("/report").text
    assert client.get("/nothing").status_code == 404


def test_the_view_is_json_without_what_json_does_not_know(client):
    [run] = client.get("/view.json").json()["runs"]
    assert run["status"] == "finished" and [one["state"] for one in run["learners"]].count("dead") == 1


def test_nothing_is_taken_from_elsewhere_no_one_frames_it_and_another_name_is_refused(client):
    policy = client.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400
    assert client.get("/", headers={"host": "localhost:1234"}).status_code == 200


def test_whoever_watches_gets_what_is_new(serve, run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "EVERY", 0.05)
    workdir = tmp_path / "run"
    shutil.copytree(run_of("steady"), workdir)
    server = serve(workdir)
    with httpx.stream("GET", f"{server.url}events", timeout=30.0, trust_env=False) as news:
        told = (json.loads(line.removeprefix("data: ")) for line in news.iter_lines() if line[:5] == "data:")
        assert "No alarm" in next(told)
        with (workdir / "events.jsonl").open("a") as file:
            file.write(json.dumps({"time": 299.0, "event": "alarm", "alarm": "something burns"}) + "\n")
        assert "something burns" in next(told)


def test_without_the_token_there_is_only_the_question_for_it(guarded):
    for path in ("/", "/view.json", "/metrics", "/report", "/events"):
        answer = guarded.get(path)
        assert answer.status_code == 401 and "learner" not in answer.text
    assert guarded.get("/metrics", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200
    assert guarded.get("/metrics", headers={"authorization": "Bearer another"}).status_code == 401


def test_a_visitor_types_the_token_once(guarded):
    typed = {"content": f"token={TOKEN}\r\n", "headers": {"content-type": "text/plain"}}
    answer = guarded.post("/enter", **typed)
    assert answer.status_code == 303
    assert {"HttpOnly", "SameSite=strict"} <= set(answer.headers["set-cookie"].split("; "))
    assert guarded.get("/").status_code == 200
    assert guarded.post("/enter", content="x" * 5000).status_code == 413


def test_nothing_that_a_visitor_sends_is_taken_for_a_request_to_do_something(client):
    for path in ("/", "/view.json", "/metrics", "/report", "/events"):
        assert client.post(path, json={"verb": "stop"}).status_code == 405


@pytest.mark.parametrize("address", ["0.0.0.0:80", "[::]:7071", "host.example:1"])
def test_beyond_the_loopback_it_needs_credentials(address, tmp_path):
    with pytest.raises(ConfigError, match="which needs a syncer with --token_file or --tls"):
        PageServer(address, [tmp_path])
    check_page(address, Visitors(admits=lambda token: False))


@pytest.mark.parametrize("address", ["nowhere", "localhost:", "localhost:99999"])
def test_an_address_that_is_none_is_told(address):
    with pytest.raises(ConfigError, match="must be HOST:PORT, or empty"):
        check_page(address)


def test_on_the_loopback_another_port_is_taken_where_one_is_in_use(serve, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert not serve(tmp_path, address=f"127.0.0.1:{port}").url.endswith(f":{port}/")


def test_it_ends_with_the_run_though_somebody_watches(serve, run_of, monkeypatch):
    monkeypatch.setattr(board, "EVERY", 0.05)
    server = serve(run_of("steady"))
    with httpx.stream("GET", f"{server.url}events", timeout=30.0, trust_env=False) as news:
        lines = news.iter_lines()
        next(lines)
        server.stop()
        with pytest.raises((StopIteration, httpx.HTTPError)):
            while True:
                next(lines)
    assert "page" not in [thread.name for thread in threading.enumerate()]


def test_prometheus_reads_every_metric_with_its_labels(client, run_of):
    answer = client.get("/metrics")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    assert set(families) == {metric.name.removesuffix("_total") for metric in METRICS}
    clocks = families["ddiloco_learner_clock"].samples
    assert {one.labels["learner"]: one.value for one in clocks} == {"0": 300, "1": 199, "2": 300, "3": 300}
    states = [one.labels for one in families["ddiloco_learner_state"].samples if one.value]
    assert {"run": "lives", "learner": "1", "state": "dead"} in states and len(states) == 4
    [said] = families["ddiloco_advice"].samples
    assert said.labels == {"run": "lives", "rule": "dead", "learner": "1"}


def test_a_run_has_a_page_as_long_as_it_goes_on(data_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("CI", raising=False)
    experiment = virtual(data_dir, virtual={"arrays": False}, train={"steps": 8}, log={"page": "127.0.0.1:0"})
    seen = []

    def runner(assembly, record, stop):
        seen.append(re.search(r"the run's page: (\S+)", capsys.readouterr().out)[1])
        assert "ddiloco" in httpx.get(seen[0], trust_env=False).text
        return job._run(experiment, assembly, record, stop)

    job.run_job(experiment, tmp_path, threading.Event(), runner=runner)
    with pytest.raises(httpx.ConnectError):
        httpx.get(seen[0], trust_env=False)
