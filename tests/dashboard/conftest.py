"""The planted runs, each made once."""

import functools

import pytest

from ddiloco.dashboard.view import read_views
from tests.dashboard import planted

RUNS = {
    "steady": {},
    "thin_link": {"bandwidth": [1e6, 1e6, 1e6, 400.0]},
    "third_speed": {"step_seconds": [1.0, 1.0, 1.0, 3.0], "steps": 150},
    "long_steps": {"step_seconds": [300.0], "steps": 40},
    "lives": {"lives": "50,2,fail,\n120,2,recover,\n200,1,fail,"},
    "all_links_thin": {"bandwidth": [300.0], "steps": 100},
    "busy_syncer": {"merge_seconds": 6.0, "steps": 120},
    "no_grace": {"step_variation": 0.2, "latency": [0.0, 0.05, 0.1, 0.3], "sync": {"gamma": 0.0}},
    "everybody_waits": {
        "step_seconds": [1.0, 1.0, 1.0, 2.0],
        "algorithm": "streaming",
        "steps": 60,
    },
    "one_job_waits": {"step_seconds": [1.0, 1.0, 1.0, 3.0], "algorithm": "data_parallel", "steps": 20},
    "restarts": {"lives": "\n".join(f"{t},2,fail,\n{t + 5},2,recover," for t in (20, 80, 140, 200))},
    "late_offers": {"latency": [0.0, 0.0, 0.0, 9.0], "steps": 150},
    "far_apart": {"latency": [2.5]},
    "far_link": {"latency": [0.0, 0.0, 0.0, 5.0], "sync": {"rebase": True}},
}
OTHERS = {
    "nan": planted.with_arrays,
    "overflow": functools.partial(planted.with_arrays, arrays=planted.Overflowing),
    "inflated": functools.partial(planted.with_arrays, arrays=planted.Inflated),
    "slow_disk": planted.with_slow_disk,
    "costly_merges": planted.with_costly_merges,
    "hang": planted.with_hang,
    "missing_host": planted.with_missing_host,
    "planned": functools.partial(planted.with_plan, bandwidth=[600.0], steps=200),
    "late_planned": functools.partial(planted.with_plan, latency=[0.0, 0.0, 0.0, 9.0], steps=150),
}


@pytest.fixture(scope="session")
def run_of(tmp_path_factory, data_dir):
    """The workdir of a planted run by its name."""
    folder = tmp_path_factory.mktemp("planted")

    @functools.cache
    def made(name):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CI", "true")
            if name in OTHERS:
                return OTHERS[name](folder / name, data_dir)
            return planted.timed(folder / name, data_dir, **RUNS[name])

    return made


@pytest.fixture(scope="session")
def view_of(run_of):
    """The view of a planted run by its name."""
    return functools.cache(lambda name: read_views([run_of(name)])[0])
