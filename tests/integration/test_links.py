"""Links are measured and limited by command."""

import json
import re
import signal

from tests.integration.hand import UNENDING, free_port
from tests.refusals import assert_refused
from tests.remote.ends import until


def test_one_process_answers_and_another_measures(programs, tmp_path):
    port = free_port()
    answering = programs.start("links", f"--listen=127.0.0.1:{port}")
    until(lambda: not programs.run("links", f"--syncer=127.0.0.1:{port}", "--mib=2").returncode, "answers")
    given = [f"--syncer=127.0.0.1:{port}", "--mib=8", "--connections=2", f"--output={tmp_path}/link.json"]
    done = programs.run("links", *given)
    assert re.fullmatch(r"round trip +[\d.]+ ms\nup +[\d.]+ Mbit/s\ndown +[\d.]+ Mbit/s\n", done.stdout), done
    found = json.loads((tmp_path / "link.json").read_text())
    assert (found["connections"], found["bytes"]) == (2, 8 << 20) and found["round_trip_seconds"] > 0
    assert min(found["up_bytes_per_second"], found["down_bytes_per_second"]) > 0
    answering.send_signal(signal.SIGINT)
    ended = programs.finish(answering)
    assert (ended.returncode, ended.stderr) == (0, f"answers at 127.0.0.1:{port}; Ctrl-C ends it\n")
    done = programs.run("links", f"--syncer=127.0.0.1:{port}")
    assert done.returncode == 1 and done.stderr.startswith(f"error: syncer: 127.0.0.1:{port}: ")


def test_beyond_the_loopback_who_measures_needs_a_token(programs):
    told = "listen: 0.0.0.0:0 can be reached from other machines, which needs --token_file or --tls\n"
    assert_refused(programs.run("links", "--listen=0.0.0.0:0"), told)


def test_a_limit_is_ordered_at_a_running_syncer_and_merges_go_on(programs, new_job):
    job = new_job(UNENDING)
    alive = [job.syncer(), job.learner(0), job.learner(1)]
    job.wait_for(lambda: job.merges(0), "a merge", alive)

    def limit(*words):
        done = programs.run("links", f"--syncer={job.address}", job.token, *words)
        return done.returncode, done.stdout or done.stderr

    assert limit("--limit=2Mbit") == (0, "all links are limited to 2 Mbit/s each way\n")
    assert limit("--limit=1.5Mbit", "--learner_id=1")[1].startswith(
        "the link of learner 1 is limited to 1.5 "
    )
    assert limit("--limit=1Mbit", "--learner_id=9") == (
        1,
        "error: a learner's number is below 2, by config.remote.max_learners\n",
    )
    orders = job.workdir / "syncer" / "operator.json"
    assert json.loads(orders.read_text())["limits"] == {"0": 250_000.0, "1": 187_500.0}
    merged = len(job.merges(0))
    job.wait_for(lambda: len(job.merges(0)) > merged + 1, "merges over the limited links", alive)
    assert limit("--limit=none") == (0, "all links are not limited\n")
    assert json.loads(orders.read_text())["limits"] == {}
