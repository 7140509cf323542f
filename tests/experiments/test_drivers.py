"""Every preset under every driver with any number of learners: nothing of another driver is in the way."""

import dataclasses
import itertools
import re

import pytest

from configs import (
    accelerator,
    chaos,
    chaos_processes,
    cross_region,
    dense,
    heterogeneous,
    micro,
    moe,
    multimodal,
    scavenging,
    tuned,
    vit,
)
from ddiloco.config import ConfigError
from ddiloco.run.job import with_steps
from ddiloco.settings.experiment import OF_DRIVERS, parse, why_idle
from experiments.cli import program
from experiments.cli.dry_run import describe
from tests.integration.programs import ROOT
from tests.refusals import refusal

DRIVERS = ("local", "remote", "virtual")
LEARNERS = (1, 9)
AXES = {
    "accelerator": (accelerator.ALGORITHMS, dense.EXCHANGES),
    "chaos": (chaos.PRESETS, micro.OR_TINY),
    "chaos_processes": (chaos_processes.SECONDS,),
    "cross_region": ([f"{algorithm},{codec},5,5" for algorithm, codec in cross_region.ROWS.values()],),
    "dense": (dense.SIZES, dense.ALGORITHMS, dense.EXCHANGES),
    "exchange": (("counted", *micro.FAMILIES),),
    "gap": (("micro", "tiny"), dense.ALGORITHMS),
    "heterogeneous": (heterogeneous.PRESETS, micro.OR_TINY),
    "links": (("counted", "trained"),),
    "loop": (("decoupled", "streaming", "diloco"),),
    "merge_rule": (micro.FAMILIES, dense.ALGORITHMS),
    "methods": (("micro", "tiny"), dense.ALGORITHMS),
    "micro": (micro.FAMILIES, dense.ALGORITHMS),
    "moe": (moe.SIZES, dense.ALGORITHMS),
    "multimodal": (multimodal.SIZES, dense.ALGORITHMS),
    "scavenging": (scavenging.ALGORITHMS, ("0", "4", "12"), micro.OR_TINY),
    "tuned": ([",".join(point) for point in tuned.POINTS],),
    "vit": (vit.SIZES, dense.ALGORITHMS),
}


def presets_of(file):
    """Each word of each axis of the file's presets, with the first words of the others."""
    first = [axis[0] for axis in map(list, AXES[file])]
    words = [[*first[:i], word, *first[i + 1 :]] for i, axis in enumerate(AXES[file]) for word in axis]
    return {f"configs/{file}.py:{','.join(chosen)}" for chosen in words}


OTHERS = ("baselines", "goodput", "sections", "sweeps")  # have no run of their own
# What a number of learners may be refused for: settings of the algorithm, or those by learner.
OF_ALGORITHM = (
    r"driver: is remote, but \w+ is one job, which needs local",
    r"driver: is (local|remote), but elastic_data_parallel needs virtual",
    r"sync\.quorum: is \d+, but must be at most num_learners, 1",
    r"train\.(min_step_seconds|batch_sizes): has \d+ entries, but sync\.num_learners is \d+",
    r"train\.batch_size: gives \d+ rows, but must give a multiple of [248], the devices that share them",
)
OF_VIRTUAL = (r"virtual\.step_seconds: has 8 entries, but must have 1, or \d+, one a learner",)


def made(preset, driver, learners):
    """The run's settings as the command line makes them."""
    return program.resolve(preset, [("driver", driver), ("sync.num_learners", learners)])


def told(call, *arguments):
    """Why it is refused; None: it is not."""
    try:
        call(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def right(line, driver):
    known = OF_ALGORITHM + (OF_VIRTUAL if driver == "virtual" else ())
    return any(re.match(rf"config\.{one}", line) for one in known)


def test_every_config_file_is_known():
    files = {path.stem for path in (ROOT / "configs").iterdir() if not path.name.startswith("__")}
    assert files == {*AXES, *OTHERS}


SELDOM = ("merge_rule", "micro", "moe", "multimodal", "tuned", "vit")  # presets much like those of others


@pytest.mark.parametrize(
    "file", [pytest.param(name, marks=[pytest.mark.slow] * (name in SELDOM)) for name in AXES]
)
def test_settings_of_another_driver_refuse_no_run(file):
    for preset in presets_of(file):
        config = program.load_config(preset)
        for driver, config.sync.num_learners in itertools.product(DRIVERS, LEARNERS):
            config.driver = driver
            line = told(parse, config)
            assert line is None or right(line, driver), (preset, driver, config.sync.num_learners, line)


@pytest.mark.parametrize(
    "driver", ["remote", *(pytest.param(name, marks=pytest.mark.slow) for name in ("local", "virtual"))]
)
def test_a_dry_run_tells_of_as_many_learners_as_are_asked_for(driver):
    told = describe(parse(made("configs/dense.py:tiny", driver, 9)))
    assert told.startswith("algorithm    decoupled, 9 learners\n")


@pytest.mark.slow
@pytest.mark.parametrize("file", [file for file in AXES if file != "loop"])
def test_a_dry_run_tells_of_every_preset(file):
    for preset, driver in itertools.product(presets_of(file), DRIVERS):
        config = made(preset, driver, 9)
        config.mesh.update(data=-1, fsdp=1, stage=1, expert=1)
        line = told(lambda config: describe(parse(config)), config)
        assert line is None or right(line, driver), (preset, driver, line)


ODD = {  # settings that their own driver refuses with four learners, and of which others know nothing
    "virtual": {
        "num_chips": 1,
        "seconds": 5.0,
        "step_seconds": (1.0,) * 3,
        "latency": (),
        "availability": "trace",
        "arrays": False,
    },
    "remote": {"hosts": (2, 2), "syncer_shards": 99, "max_learners": 64, "spares": 2, "longest_backoff": 1e6},
    "eval": {"devices": 1},
}


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_run_is_the_same_whatever_a_file_says_of_other_drivers(driver):
    plain = {"driver": driver, "train": {"batch_size": 2, "tokens": 4096}}
    own = "eval" if driver == "local" else driver
    others = {group: values for group, values in ODD.items() if group != own}
    expected, found = parse(plain), parse({**plain, **others})
    for name in ("max_learners", "max_hosts", "syncer_shards", "eval_devices", "virtual_seconds"):
        assert getattr(found, name) == getattr(expected, name), name
    assert [found.hosts(m) for m in range(4)] == [expected.hosts(m) for m in range(4)]
    if driver != "virtual":
        unbounded = dataclasses.replace(found, train=dataclasses.replace(found.train, tokens=None))
        assert with_steps(unbounded, lambda: pytest.fail("a budget of virtual time")) == unbounded
    if driver == "local":
        assert describe(found) == describe(expected)


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_setting_of_another_driver_that_the_command_line_gives_is_refused(driver, programs):
    experiment = parse({"driver": driver})
    for group, owner in OF_DRIVERS.items():
        path = {"remote": "remote.keepalive", "virtual": "virtual.failures.mtbi_years"}.get(group, group)
        assert why_idle(experiment, path) == (None if owner == driver else f"driver is {driver}")
    given = {"local": "remote.spares=1", "remote": "virtual.latency=1", "virtual": "eval.devices=1"}[driver]
    done = programs.run("train", f"--config.driver={driver}", f"--config.{given}", "--dry_run")
    path = given.partition("=")[0]
    line = f"error: config.{path}: has no use where driver is {driver}; leave it out\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", line)


def test_a_fleet_has_a_chip_a_learner_unless_more_are_asked_for():
    chips = lambda **virtual: parse({"driver": "virtual", "virtual": virtual}).virtual.chips(9)  # noqa: E731
    assert (chips(), chips(num_chips=64)) == (9, 64)
    config = made("configs/dense.py:tiny", "virtual", 9)
    config.virtual.num_chips = 8
    line = "config.virtual.num_chips: is 8, but must be at least 9: one a learner"
    assert refusal(ConfigError, parse, config) == line
