"""What actors run in place of a role; it imports next to nothing, since each actor is another process."""

import dataclasses
import json
import types

from ddiloco.settings.remote import RemoteConfig


@dataclasses.dataclass(frozen=True)
class Bare:
    """What is asked of an experiment; the imports of a whole one are half of a short actor's time."""

    max_learners: int = 1
    remote: RemoteConfig = RemoteConfig(restarts=1)
    syncer_shards: int = 1
    eval = types.SimpleNamespace(every=None)


def refused_once(assignment, experiment, security, stop):
    """The syncer ends once its learner has begun a second time; every first time it was refused."""
    mark = assignment.workdir / "refused"
    match assignment.role:
        case "syncer":
            while not (mark.with_name("begun").exists() or stop.wait(0.05)):
                pass
            return 0
        case "learner" if mark.exists():
            mark.with_name("begun").touch()
            return 0
    mark.touch()
    return 2


def syncer_refused_once(assignment, experiment, security, stop):
    """The syncer is refused at its first start, and a learner waits for it."""
    mark = assignment.workdir / "refused"
    if assignment.role == "syncer":
        refused = not mark.exists()
        mark.touch()
        return 2 * refused
    stop.wait()
    return 0


def saved_at_the_second_try(assignment, experiment, security, stop):
    """The syncer that is told to end fails to save, as on a full disk; the next one does not."""
    if assignment.role == "syncer":
        told = assignment.workdir / "told"
        stop.wait()
        if not told.exists():
            told.touch()
            stop.clear()
            while not (assignment.workdir / "go_on").exists():
                stop.wait(0.05)
            return 1
    return 0


def merging_once(assignment, experiment, security, stop):
    """The syncer fails at every start, and has merged by then at the second."""
    if assignment.role == "syncer":
        with (assignment.workdir / "starts").open("a") as file:
            file.write("another\n")
        starts = (assignment.workdir / "starts").read_text().count("another")
        (assignment.workdir / "summary.json").write_text(json.dumps({"rounds": int(starts > 1)}))
        return 1
    stop.wait()
    return 0


def never_begun(assignment, experiment, security, stop):
    """No learner begins: one fails, and another is refused each time."""
    if assignment.role == "syncer":
        stop.wait()
        return 0
    return 1 + assignment.learner
