"""A process that commits for ever and is killed in the middle: what it leaves was committed; a full disk."""

import contextlib
import itertools
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

from ddiloco.outer.global_model import FragmentState
from ddiloco.protocol.messages import RoundId
from ddiloco.storage.durable import DurableState
from tests import small_disks
from tests.integration.programs import ROOT
from tests.long import times
from tests.remote.ends import TIMEOUT

KILLS = times(8, 50)
PIECES = 4
PIECE = 1 << 18  # float32: four pieces of a MiB each
NAMES = tuple(types.SimpleNamespace(name=f"piece {n}") for n in range(PIECES))
LAYOUT = types.SimpleNamespace(num_fragments=1, fingerprint="of this test", fragments=(NAMES,))
SERVES = "import sys; from tests.integration.test_killed_writes import serve; serve(sys.argv[1])"


class Versions:
    """In a GlobalModel's place: a fragment of which every number is its version."""

    version, fragments = 0, (0,)

    def state(self, p):
        pieces = tuple(np.full(PIECE, self.version, np.float32) for _ in range(PIECES))
        return FragmentState(self.version, pieces, (np.int32(self.version),))


def state_in(folder):
    return DurableState(pathlib.Path(folder), LAYOUT, print, threading.Event())


def serve(folder):
    """For each version that it reads: a child that goes on from there, telling its number and each commit."""
    state = state_in(folder)
    state.begin(Versions())
    print("ready", flush=True)
    for line in sys.stdin:
        child = os.fork()
        if not child:
            commit_for_ever(state, int(line))
        os.write(1, b"%d\n" % child)
        os.waitpid(child, 0)
        os.write(1, b"dead\n")


def commit_for_ever(state, version):
    fragment = Versions()
    for fragment.version in itertools.count(version + 1):
        state.commit(RoundId(4 * fragment.version, 0), fragment)
        os.write(1, b"committed %d\n" % fragment.version)


def size_of(folder):
    """Bytes of the file that is being written there; 0: there is none."""
    sizes = [0]
    for path in folder.glob(".fragment-0000.*"):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def kill_in_a_write(server, folder, version, at):
    """Kills a child that goes on from the version once its new file has so many bytes; its last commit."""
    server.stdin.write(f"{version}\n")
    server.stdin.flush()
    said = [server.stdout.readline() for _ in range(2)]  # its number, and its first commit, in any order
    child = next(int(line) for line in said if line[0].isdigit())
    end = time.monotonic() + TIMEOUT
    while size_of(folder) < at:  # without a pause: a moment later it may be over
        assert time.monotonic() < end, "the child does not write"
    os.kill(child, signal.SIGKILL)
    said += iter(server.stdout.readline, "dead\n")
    return max(int(line.split()[1]) for line in said if line.startswith("committed"))


def test_whenever_a_committing_process_is_killed_its_state_is_the_last_commit_or_the_one_under_way(tmp_path):
    rng, folder = random.Random(0), tmp_path / "syncer"
    whole, version, in_the_middle = 4 * PIECE * PIECES, 0, 0
    command = [sys.executable, "-W", "ignore", "-c", SERVES, str(folder)]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "ready\n"
        for _ in range(10 * KILLS):
            told = kill_in_a_write(server, folder, version, at=rng.randrange(1, whole))
            in_the_middle += size_of(folder) > 0
            state, step, _ = state_in(folder).fragment(0)
            version = state.version
            assert version in (told, told + 1), "durable before it is told, and never half"
            assert step == 4 * version
            assert all((piece == version).all() for piece in state.pieces)
            assert state.optimizer == (version,)
            if in_the_middle == KILLS:
                break
            state_in(folder).sweep()  # so that the next one is seen as it grows
        server.stdin.close()
    assert in_the_middle == KILLS


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a file system of 128 KiB."""
    with small_disks.small_disk(tmp_path / "disk", "128k") as folder:
        yield folder
