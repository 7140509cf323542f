"""What tests ask of a run of processes while it goes on: its lines, and who its processes are."""

import json
import pathlib

from ddiloco.storage import array_file
from ddiloco.storage.run_mark import FRAGMENT
from tests.integration.programs import LIMIT
from tests.remote.ends import until

STEADY = ("--config.eval.every=None", "--config.sample.tokens=0", "--config.sync.quorum=None")
UNENDING = ("--config.train.steps=1000000", "--config.train.min_step_seconds=(0.05, 0.05)", *STEADY[:2])


def lines(path):
    """The complete lines of a file that grows."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().rpartition("\n")[0].splitlines()]


def summary_of(workdir):
    return json.loads((workdir / "summary.json").read_text())


def wait_for(alive, condition, told, limit=LIMIT):
    """Looks until the condition holds, while these processes live."""

    def look():
        for process in alive:
            assert process.poll() is None, process.communicate()
        return condition()

    until(look, told, limit)


def steps_of(workdir, learner):
    return lines(workdir / "learners" / str(learner) / "steps.jsonl")


def processes_of(parent):
    """By learner number or role: the processes that a parent has started, through its fork server."""
    found, parents = {}, {}
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            name = (path / "comm").read_text().strip()
            parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        if name.startswith(("learner-", "syncer", "evaluator")):
            found[name.removeprefix("learner-"), int(path.name)] = parents[int(path.name)]
    return {name: pid for (name, pid), server in found.items() if parents.get(server) == parent.pid}


def merged_batches(workdir, learner):
    """How many batches of a learner's data are merged, by the furthest of its watermarks on disk."""
    paths = (workdir / "syncer").glob("fragment-[0-9]*")
    marks = [array_file.load_header(path, FRAGMENT)["watermarks"].get(learner) for path in paths]
    *_, position = max((mark for mark in marks if mark), key=lambda mark: mark[:2])
    return json.loads(position)["batches"]
