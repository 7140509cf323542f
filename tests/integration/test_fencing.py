"""Two syncers for one workdir, and syncers that die before their run has begun."""

import signal
import socket

from ddiloco.storage import array_file
from ddiloco.storage.run_mark import FRAGMENT, begun
from tests.integration.hand import assert_counted_once, assert_nothing_twice, free_port


def more_merges(job, alive):
    made = len(job.rounds())
    job.wait_for(lambda: len(job.rounds()) > made + 3, "more merges", alive)


def test_a_taken_port_is_found_before_an_earlier_run_is_touched(job):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        (job.workdir / "syncer").mkdir(parents=True)
        (job.workdir / "rounds.jsonl").write_text("{}\n")
        code, _, told = job.left(job.syncer(f"--listen=127.0.0.1:{taken.getsockname()[1]}"))
    assert code == 2 and "\nerror: listen: " in told
    assert {path.name for path in job.workdir.iterdir()} == {".lock", "syncer", "rounds.jsonl"}
    assert (job.workdir / "rounds.jsonl").read_text() == "{}\n"


def test_one_command_serves_every_start_and_a_second_syncer_is_refused_and_changes_nothing(job):
    learner = job.learner(0)
    killed = job.syncer("--resume=auto", affliction="start")
    killed.wait(300.0)
    assert killed.returncode == -signal.SIGKILL
    assert begun(job.workdir / "syncer") is None
    code, _, told = job.left(job.syncer("--resume"))
    assert (code, told.splitlines()) == (
        1,
        [f"error: {job.workdir}: has no run to resume"],
    )
    syncer = job.syncer("--resume=auto")
    more_merges(job, [syncer, learner])
    run, aside = begun(job.workdir / "syncer"), list(job.workdir.glob("previous/*"))
    # A new run; one that would go on with the run at another port; one that decides by itself.
    others = [
        job.syncer(),
        *(job.syncer(f"--listen=127.0.0.1:{free_port()}", how) for how in ("--resume", "--resume=auto")),
    ]
    for other in others:
        code, _, told = job.left(other)
        assert (code, told.count("\n")) == (2, 1), told
        assert told.startswith(
            f"error: workdir: {job.workdir}: belongs to a run in progress, of process {syncer.pid} on "
        )
    more_merges(job, [syncer, learner])
    assert begun(job.workdir / "syncer") == run
    assert list(job.workdir.glob("previous/*")) == aside
    (job.workdir / "syncer" / "run.json").unlink()  # its fragments say what they are of
    syncer.kill()
    syncer.communicate()
    syncer = job.syncer("--resume=auto")
    more_merges(job, [syncer, learner])
    assert begun(job.workdir / "syncer").run == run.run
    header, _ = array_file.load(job.workdir / "syncer" / "fragment-0000", FRAGMENT)
    assert header["run"] == run.run
    syncer.send_signal(signal.SIGINT)  # SIGTERM would not end the run
    assert job.left(syncer)[0] == 130
    assert job.left(learner)[0] == 0
    assert_nothing_twice(job)
    assert_counted_once(job, (0,))
