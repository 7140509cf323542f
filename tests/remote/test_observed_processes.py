"""What a supervisor tells whoever observes its processes: each start, and each end before the next start."""

import os
import signal
import threading

from ddiloco.launch.supervisor import Role, Roles, Supervisor
from ddiloco.settings.remote import RemoteConfig
from tests.remote.ends import until


def test_starts_and_ends_are_told_in_their_order_with_numbers_and_codes(tmp_path, monkeypatch):
    takes_it = "signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})"
    (tmp_path / "stands.py").write_text(f"import signal; {takes_it}; signal.pause()")
    monkeypatch.syspath_prepend(tmp_path)
    told, stop = [], threading.Event()
    roles = [Role(name, "stands", [], os.environ) for name in ("the syncer", "learner 0")]
    supervisor = Supervisor(
        Roles(roles[0], roles[1:]),
        RemoteConfig(longest_backoff=0.05),
        lambda line: None,
        tmp_path / "run",
        late_seconds=0.0,
        observe=lambda *news: told.append(news),
    )
    thread = threading.Thread(target=supervisor.run, args=(stop,))
    thread.start()
    until(lambda: len(told) == 2, "two starts")
    assert [(name, code) for name, _, code in told] == [("the syncer", None), ("learner 0", None)]
    first = told[1][1]
    os.kill(first, signal.SIGKILL)
    until(lambda: len(told) == 4, "an end and a start")
    assert told[2] == ("learner 0", first, -signal.SIGKILL)
    name, second, code = told[3]
    assert (name, code) == ("learner 0", None)
    assert second != first
    stop.set()
    thread.join()
    assert sorted(told[4:]) == sorted(
        [("the syncer", told[0][1], -signal.SIGTERM), ("learner 0", second, -signal.SIGKILL)]
    )
