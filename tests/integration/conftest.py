"""Programs and runs by hand, whose processes end with the test."""

import pytest

from tests.integration.hand import UNENDING, Job


@pytest.fixture
def started(programs):
    """Starts programs, and ends those that are left."""
    made = []

    def start(*arguments):
        made.append(programs.start(*arguments))
        return made[-1]

    yield start
    for process in made:
        if process.poll() is None:
            process.kill()
            process.communicate()


@pytest.fixture
def new_job(programs, tmp_path):
    """Makes a run by hand, with these settings."""
    made = []

    def make(settings, **more):
        made.append(Job(programs, tmp_path / "run", settings, **more))
        return made[-1]

    yield make
    for job in made:
        job.kill_all()


@pytest.fixture
def job(new_job, request):
    """One that does not end by itself, with the settings of the module's CHANGES, if it has some."""
    return new_job((*UNENDING, *getattr(request.module, "CHANGES", ())))
