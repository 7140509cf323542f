"""A role to which something happens: `python -m tests.integration.afflicted WHAT MODULE ARGUMENTS`.

WHAT is `clock` (SIGUSR1 puts the wall clock an hour forward, SIGUSR2 an hour back), `clock:SECONDS` (it is
off by so much from the beginning), `merge:N` (killed by SIGKILL in its Nth merge), `memory:N` (no memory for
its Nth merge and later ones), `write:N` (killed half-way through the write of its Nth merged fragment),
`start` (killed before its first start is complete), `step:N` (no memory for its Nth step), `hang:N` (its Nth
step never ends), `corrupt` (the bits of a step differ each time it is computed),
`files:N` (it may have so many open) or `network:NAME` (it is in a network namespace).
"""

import ctypes
import itertools
import os
import resource
import runpy
import signal
import sys
import threading
import time
import types

HOUR = 3600.0


def with_another_clock(off):
    """The wall clock of this process alone; time.monotonic stays as it is."""
    import grpc._channel
    import grpc._server

    true = types.ModuleType("time")
    true.__dict__.update(time.__dict__)
    # gRPC's core reads the system's clock, from which what its Python tells it may not differ.
    grpc._channel.time = grpc._server.time = true
    now, now_ns, by = time.time, time.time_ns, [off]

    def jump(number, frame):
        by[0] += HOUR if number == signal.SIGUSR1 else -HOUR

    signal.signal(signal.SIGUSR1, jump)
    signal.signal(signal.SIGUSR2, jump)
    time.time = lambda: now() + by[0]
    time.time_ns = lambda: now_ns() + int(by[0] * 1e9)


def no_memory():
    raise MemoryError("no more of it")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def ending_in_merge(number, end):
    from ddiloco.outer.global_model import GlobalModel

    merge, done = GlobalModel.merge, []

    def merged(self, *arguments):
        result = merge(self, *arguments)
        done.append(1)
        if len(done) >= number:  # one of another fragment may follow before the process has ended
            end()
        return result

    GlobalModel.merge = merged


def dying_in_write(number):
    from ddiloco.storage import array_file, durable

    replace, commit, commits = array_file.replace, durable.DurableState.commit, []

    def committed(self, merged, *model):
        commits.append(merged)
        return commit(self, merged, *model)

    def cut(parts):
        for at, part in enumerate(parts):
            if at == len(parts) // 2:
                die()
            yield part

    def replaced(path, parts):
        fatal = path.name.startswith("fragment-") and len(commits) >= number
        replace(path, cut(list(parts)) if fatal else parts)

    array_file.replace, durable.DurableState.commit = replaced, committed


def dying_in_start():
    from ddiloco.storage import durable

    durable.DurableState.complete = lambda self: die()


def computing_wrong():
    import jax

    from ddiloco.workers import learner_arrays

    calls = itertools.count()
    learner_arrays.checksums = lambda tree: {jax.local_devices()[0]: next(calls)}


def failing_in_step(number, fail=no_memory):
    from ddiloco.workers.learner_arrays import TrainingArrays

    step, done = TrainingArrays.step, []

    def stepped(self, clock):
        done.append(1)
        if len(done) == number:
            fail()
        return step(self, clock)

    TrainingArrays.step = stepped


def in_network(name):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), name)


def main():
    what, _, value = sys.argv[1].partition(":")
    if what == "clock":
        with_another_clock(float(value or 0))
    elif what == "merge":
        ending_in_merge(int(value), die)
    elif what == "memory":
        ending_in_merge(int(value), no_memory)
    elif what == "start":
        dying_in_start()
    elif what == "step":
        failing_in_step(int(value))
    elif what == "hang":
        failing_in_step(int(value), threading.Event().wait)
    elif what == "corrupt":
        computing_wrong()
    elif what == "files":
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), int(value)))
    elif what == "network":
        in_network(value)
    else:
        dying_in_write(int(value))
    module = sys.argv[2]
    sys.argv[:] = ["", *sys.argv[3:]]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
