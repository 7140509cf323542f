"""The programs as their users run them: processes of their own, with the data and the caches of the tests."""

import contextlib
import os
import pathlib
import signal
import subprocess
import time

from tests.warm import WHERE, Program

ROOT = pathlib.Path(__file__).parent.parent.parent
LIMIT = 120.0
SMALLEST = (
    "--config.model.num_layers=1",
    "--config.model.model_dim=16",
    "--config.model.num_heads=2",
    "--config.model.num_kv_heads=1",
    "--config.model.head_dim=8",
    "--config.model.mlp_dim=32",
    "--config.data.sequence_length=32",
    "--config.data.train_split=train[:60]",
    "--config.train.batch_size=2",
    "--config.train.steps=12",
    "--config.train.min_step_seconds=(0.02, 0.02)",  # slow enough for a syncer on a busy machine
    "--config.sync.num_learners=2",
    "--config.sync.num_fragments=3",
    "--config.sync.interval=4",
    "--config.eval.every=6",
    "--config.eval.num_batches=1",
    "--config.eval.batch_size=4",
    "--config.sample.tokens=0",
    "--config.inner.optimizer=adamw",  # takes half of Muon's time to compile
    "--config.inner.learning_rate=0.003",
)


class Programs:
    """Runs `python -m experiments.NAME` at the repository's root, on one simulated device."""

    def __init__(self, data_dir: str):
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        self.data_dir = data_dir
        self.environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
        self._started: list[Program] = []

    def start(self, name: str, *arguments: str) -> Program:
        """Starts a program, without its imports."""
        return self.start_module(f"experiments.{name}", *arguments)

    def start_module(self, module: str, *arguments: str, **environment: str) -> Program:
        """The same of any module, with more in its environment."""
        told = {**self.environment, **environment}
        self._started.append(Program(module, arguments, environment=told, cwd=ROOT))
        return self._started[-1]

    def kill_all(self) -> None:
        """Kills what a test that failed has left."""
        for program in self._started:
            program.kill()

    def run(self, name: str, *arguments: str) -> subprocess.CompletedProcess:
        """Runs a program to its end."""
        return self.finish(self.start(name, *arguments))

    def train(self, workdir: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess:
        """Trains the smallest model."""
        return self.run("train", *self.training(workdir), *arguments)

    def training(self, workdir: pathlib.Path) -> list[str]:
        """The arguments that train the smallest model."""
        return [*SMALLEST, f"--config.data.data_dir={self.data_dir}", f"--workdir={workdir}"]

    def finish(self, process: Program, limit: float = LIMIT) -> subprocess.CompletedProcess:
        """Waits for a program; one that takes too long is ended and fails the test with where it was."""
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            process.send_signal(WHERE)
            process.send_signal(signal.SIGINT)  # which ends what it started, too
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10.0)
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{process.args} took more than {limit:g} s:\n{out}\n{err}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def interrupt(self, process: Program, sign: pathlib.Path, number: signal.Signals):
        """Sends the signal once the file `sign` has something in it, and waits for the end."""
        deadline = time.monotonic() + LIMIT
        while not (sign.is_file() and sign.stat().st_size):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline, f"{sign} did not appear"
            time.sleep(0.02)  # between two looks, not for something to happen
        process.send_signal(number)
        return self.finish(process)
