"""A learner of several hosts: processes of one JAX job, with one mesh over the devices of all of them.

Host 0 leads: it talks to the syncer, decides, and sends the others an order for each step boundary, so that
all dispatch the same programs in the same order. Each exchanges its own blocks of the fragments with the
syncer. They start and end together: a job cannot continue without one of its processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import NamedTuple

import jax

from ddiloco.config import REFUSED, ConfigError
from ddiloco.data.errors import DataError

STARTING_SECONDS = 300  # for all hosts to be there, and to reach host 0
MET_SECONDS = 60  # for those that the syncer brought together a moment ago
# On GPUs the hosts would share out the search for kernels: where host 0 has a program in its cache, and does
# not compile it, the others would wait a day for its share.
_AUTOTUNES_ALONE = "--xla_gpu_shard_autotuning=false"
_NO_PROXY = "no_grpc_proxy"  # variable with the hosts that JAX, by gRPC, reaches without the web's proxy


class HostPlace(NamedTuple):
    """This process's place among its learner's hosts."""

    number: int  # from 0
    count: int  # of them
    coordinator: str  # HOST:PORT of JAX's coordinator, on host 0, which also leads at the port after it
    refused: int = REFUSED  # exit code where a setting is impossible, or the syncer refuses the learner
    timeout: float = 30.0  # seconds without a message of a host after which JAX ends all of them
    starting: int = STARTING_SECONDS  # for all hosts to be there
    group: str = ""  # name of those hosts, where the syncer brought them together; empty: by their flags

    @property
    def leader(self) -> str:
        """HOST:PORT at which host 0 leads."""
        host, _, port = self.coordinator.rpartition(":")
        return f"{host}:{int(port) + 1}"

    @contextlib.contextmanager
    def ending(self, left: Callable[[], bool] = lambda: False) -> Iterator[None]:
        """Ends this process at once if the block raises, and the other hosts with it.

        Otherwise JAX would let it wait for the others, which wait for it. `left`: whether they have the order
        to leave, so that an exception may be raised.
        """
        try:
            yield
        except (ConfigError, DataError) as error:
            if not left():
                end_at_once(f"host {self.number}: {error}", self.refused)
            raise
        except Exception as error:
            traceback.print_exc()
            end_at_once(f"host {self.number}: {type(error).__name__}: {error}")

    def join(self) -> None:
        """Joins the job of all hosts, before anything asks JAX for its devices.

        If a host is missing, this process ends, to be restarted with it.
        """
        jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM for itself
        without, host = os.environ.get(_NO_PROXY) or os.environ.get("no_proxy", ""), self.coordinator
        os.environ[_NO_PROXY] = f"{without},{host.rpartition(':')[0].strip('[]')}"
        # Before what was asked for, which wins.
        os.environ["XLA_FLAGS"] = f"{_AUTOTUNES_ALONE} {os.environ.get('XLA_FLAGS', '')}"
        try:
            jax.distributed.initialize(
                self.coordinator,
                self.count,
                self.number,
                initialization_timeout=self.starting,
                heartbeat_timeout_seconds=math.ceil(self.timeout),
                cluster_detection_method="deactivate",  # under Slurm it leaves a process one GPU of its node
            )
        except RuntimeError as error:
            problem = f"{error}".splitlines()[0]
            end_at_once(f"coordinator: {self.coordinator}: the hosts do not come together: {problem}")


def stacks_file(workdir: pathlib.Path | None, learner: int, host: int = 0) -> pathlib.Path | None:
    """Where a host writes the stacks of its threads as it ends; None: nowhere."""
    name = f"stacks-{host}.txt" if host else "stacks.txt"
    return None if workdir is None else workdir / "learners" / str(learner) / name


def end_at_once(why: str, code: int = 1) -> None:
    """Ends this process, whatever its threads and devices wait for; the launcher starts all hosts again."""
    print(f"error: {why}", file=sys.stderr, flush=True)
    os._exit(code)
