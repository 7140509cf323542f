"""Syncer and learners started by hand, each a process of its own, with what their run has written so far."""

import contextlib
import os
import pathlib
import signal
import socket

from ddiloco.launch.ports import reserved_port
from ddiloco.remote.wire.compatibility import terms_of
from ddiloco.remote.wire.security import Security
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from ddiloco.storage import array_file
from ddiloco.storage.run_mark import FRAGMENT
from experiments.cli import program
from tests.integration.programs import SMALLEST
from tests.integration.remote_runs import lines, summary_of, wait_for
from tests.remote.ends import until

LIMIT = 300.0  # seconds for what must come about; on an idle machine it does in a few
TOKEN = "the token of these tests"
SECURITY = Security(TOKEN)
LOOP = "--config=tests/integration/small_loop.py"
UNENDING = (
    "--config.train.steps=1000000",
    "--config.train.min_step_seconds=(0.05, 0.05)",
    "--config.eval.every=None",
    "--config.sync.quorum=1",
    "--config.sync.offer_timeout=4",
    "--config.sync.silence_timeout=4",
    "--config.sync.resend_timeout=4",
    "--config.remote.gather=0",
    "--config.remote.keepalive=3",
    "--config.remote.longest_backoff=0.5",
    "--config.recovery.checkpoint_every=0.3",
)
TRANSFORMER = ("--config=configs/dense.py", *SMALLEST, *UNENDING)  # for what a loop cannot have
AFFLICTED = "tests.integration.afflicted"


def free_port():
    """One of this machine's loopback on which nothing listens yet."""
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


class Job:
    """One run by hand, of the small loop; `settings` come after its own, alike for all roles."""

    def __init__(self, programs, workdir: pathlib.Path, settings=UNENDING, host="127.0.0.1"):
        self._reservation = contextlib.ExitStack()
        port = self._reservation.enter_context(reserved_port(host))
        self.workdir, self.address = workdir, f"{host}:{port}"
        given = {setting.partition("=")[0]: setting for setting in (LOOP, *settings)}
        self.settings = list(given.values())
        self._programs = programs
        self._processes = []
        token = workdir.with_name(f"{workdir.name}_token")  # a run that begins empties its workdir
        token.touch(mode=0o600)
        token.write_text(TOKEN)
        self.token = f"--token_file={token}"
        self._shared = [*self.settings, self.token, f"--workdir={workdir}"]

    def syncer(self, *more, affliction=None, **environment):
        """Starts the syncer's process."""
        where = [f"--listen={self.address}", *more]
        return self._start("experiments.syncer", where, affliction, **environment)

    def shard(self, shard, *more, affliction=None):
        """Starts the process of one of the syncer's shards beside the first."""
        where = [f"--shard={shard}", "--listen=127.0.0.1:0", *more]
        return self._start("experiments.syncer", where, affliction)

    def learner(self, learner, *more, address=None, affliction=None, **environment):
        """Starts a learner's process."""
        where = [f"--syncer={address or self.address}", f"--learner_id={learner}", *more]
        return self._start("experiments.learner", where, affliction, **environment)

    def _start(self, module, arguments, affliction=None, **environment):
        named = [AFFLICTED, affliction, module] if affliction else [module]
        process = self._programs.start_module(*named, *self._shared, *arguments, **environment)
        self._processes.append(process)
        return process

    def terms(self):
        """What its syncer and learners agree on."""
        file, *overrides = [setting.removeprefix("--config").split("=", 1) for setting in self.settings]
        experiment = parse(program.resolve(file[1], [(path[1:], value) for path, value in overrides]))
        return terms_of(experiment, assembly_of(experiment).layout)

    # What the run has written.

    def rounds(self, since=0.0):
        """The merges after a moment."""
        return [r for r in lines(self.workdir / "rounds.jsonl") if r["time"] > since]

    def merges(self, learner, since=0.0):
        """Those in which the learner is, with what it gave: (learner, incarnation, version, ...)."""
        given = [(r, c) for r in self.rounds(since) for c in r["contributions"]]
        return [(r, c) for r, c in given if c[0] == learner]

    def steps(self, learner):
        """The learner's steps, as far as the syncer has heard."""
        return lines(self.workdir / "learners" / str(learner) / "steps.jsonl")

    def own_step(self, learner):
        """The step of the learner's own last checkpoint, which needs no syncer."""
        paths = sorted((self.workdir / "learners" / str(learner)).glob("state.0.*[0-9]"))
        try:
            return array_file.load(paths[-1], b"ddiloco learner state of a host 1\n")[0]["work"]["clock"]
        except (FileNotFoundError, IndexError):  # the next one may have replaced it
            return -1

    def durable(self):
        """By fragment, the version on disk; loading sees that no file is damaged."""
        paths = sorted((self.workdir / "syncer").glob("fragment-*"))
        return [array_file.load(path, FRAGMENT)[0]["version"] for path in paths]

    def summary(self):
        return summary_of(self.workdir)

    def wait_for(self, condition, told, alive=()):
        """Looks until it holds, while these processes live."""
        wait_for(alive, condition, told, LIMIT)

    # Ends.

    def end(self, process):
        """SIGTERM, unless it has ended; its exit code and what it said."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def left(self, process):
        """Its exit code and what it said, once it has ended by itself."""
        out, err = process.communicate(timeout=LIMIT)
        return process.returncode, out, err

    def kill_all(self):
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.communicate()
        self._reservation.close()


def stop(process):
    """SIGSTOP, and back when it stands still."""
    os.kill(process.pid, signal.SIGSTOP)
    until(lambda: state_of(process) == "T", "the process to stand still", LIMIT)


def go_on(process):
    os.kill(process.pid, signal.SIGCONT)


def state_of(process):
    """R, S, T and so on, as /proc has it."""
    return pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]


def assert_nothing_twice(job):
    """No version was made twice, and none of a learner's work on a version was merged twice."""
    made = [(r["fragment"], r["version"]) for r in job.rounds()]
    assert len(made) == len(set(made))
    merged = [(r["fragment"], c[0], c[2]) for r in job.rounds() for c in r["contributions"]]
    assert len(merged) == len(set(merged))


def assert_counted_once(job, learners):
    """Steps and tokens of the summary are those of the lines, and no process's step is in two lines."""
    summary = job.summary()
    for learner in learners:
        taken = job.steps(learner)
        assert summary["inner_steps"][str(learner)] == len(taken)
        assert summary["tokens"][str(learner)] == sum(line["tokens"] for line in taken)
        times = [(line["time"], line["step"]) for line in taken]
        assert len(times) == len(set(times))
