"""A supervisor of small programs, which write down their starts and then do as they are told."""

import os
import signal
import threading

from ddiloco.launch.supervisor import Role, Roles, Supervisor
from ddiloco.settings.remote import RemoteConfig
from tests.remote.ends import alive, until

CONFIG = RemoteConfig(longest_backoff=0.25, restarts=2)

# Each process writes a line for each of its starts; then it does as it is told.
STANDS = "signal.pause()"
ENDS_AT_THE_WORD = "\n".join(
    [
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))",
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})",
        "signal.pause()",
    ]
)
PROGRAM = """
import os, signal, sys
with open({path!r}, "a") as file:
    file.write(" ".join(map(str, [os.getpid(), *sys.argv[1:]])) + "\\n")
{then}
"""


class Run:
    """A supervisor of small programs, in a thread."""

    def __init__(self, folder, syncer, *learners, spare=None, shard=None, hosts=1, environment=os.environ):
        self.folder, self.told, self.observed = folder, [], []
        self.environment = environment
        self.stop, self.codes = threading.Event(), []
        roles = [self._role("syncer", syncer)]
        roles += [self._role(f"learner {m}", then) for m, then in enumerate(learners)]
        for number, role in enumerate(roles[1:]):
            role.assignment, role.hosts = f"{number} somewhere:1", hosts
        spares = [] if spare is None else [self._role("spare", spare)]
        shards = [] if shard is None else [self._role("shard", shard)]
        self.supervisor = Supervisor(
            Roles(roles[0], roles[1:], shards, spares),
            CONFIG,
            self.told.append,
            folder / "run",
            observe=lambda *observed: self.observed.append(observed),
            late_seconds=2.0,
        )
        self._thread = threading.Thread(target=lambda: self.codes.append(self.supervisor.run(self.stop)))
        self._thread.start()

    def _role(self, name, then):
        module = name.replace(" ", "_")
        (self.folder / f"{module}.py").write_text(PROGRAM.format(path=str(self.folder / name), then=then))
        again = ["again"] if name == "syncer" else []
        alone = ["alone"] if name == "syncer" else []
        return Role(name, module, [], self.environment, again, alone)

    def starts(self, name):
        """The words of each start of a process: its number, and its arguments."""
        path = self.folder / name
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def ends(self):
        """Whose processes have ended, in their order."""
        return [name for name, _, code in self.observed if code is not None]

    def kill(self, name, number=signal.SIGKILL):
        """Ends the process as it runs now."""
        os.kill(int(self.starts(name)[-1][0]), number)

    def end(self):
        """The exit code, once it is over and no process is left."""
        until(lambda: not self._thread.is_alive(), "the end")
        for path in self.folder.iterdir():
            if path.suffix or path.is_dir():
                continue
            for number, *_ in self.starts(path.name):
                assert not alive(int(number))
        return self.codes[0]
