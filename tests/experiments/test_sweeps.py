"""The sweeps and comparisons of configs: every point could start, and they are equal where they say so."""

import dataclasses
import pathlib

import pytest

from configs import baselines, dense, links, methods, micro, moe, multimodal, tuned, vit
from configs.sweeps import honest, scaling
from ddiloco.protocol.schedule import Schedule
from ddiloco.settings.experiment import parse, task_of
from experiments.cli import program
from experiments.studies import sweeps
from tests.long import times

FOLDER = pathlib.Path(__file__).parents[2] / "configs" / "sweeps"
ARGUMENTS = {
    "scaling": scaling.PARTS,
    "tuned": ("length", "muon"),
    "quality": ("vit", "rates", "moe,rates", "vit,rates"),
    "outer": ("vit",),
    "horizons": ("vit",),
}
SWEEPS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
SWEEPS += [f"{name}:{argument}" for name, known in ARGUMENTS.items() for argument in known]
FAMILIES = {"dense": dense, "moe": moe, "vit": vit, "multimodal": multimodal}


def sweep_of(name):
    """The sweep of a file by its name, with an argument after a colon."""
    name, colon, argument = name.partition(":")
    return sweeps.load(f"{FOLDER}/{name}.py{colon}{argument}")


def experiment(point):
    overrides = [(name, value) for name, value in point.items() if name != "config"]
    return parse(program.resolve(point["config"], overrides))


def parsed_row(module, row):
    own = ("label", "preset", "against", "axes")
    overrides = [(name, value) for name, value in row.items() if name not in own]
    return parse(program.resolve(f"{module.__file__}:{row['preset']}", overrides))


def tokens(e):
    rows = sum(e.batch_size(m) for m in range(e.sync.num_learners))
    return e.train.tokens or e.train.steps * rows * task_of(e).row_tokens


@pytest.mark.parametrize("name", SWEEPS)
def test_every_point_of_a_sweep_is_a_run_that_could_start(name):
    points = sweep_of(name).points
    first = [point for point in points if point.get("seed") == points[0].get("seed")]
    for point in first[:: max(1, len(first) // times(2, 5))]:
        experiment(point)


def experiments_of(name):
    """The runs of a sweep with the first of its seeds."""
    return [experiment(point) for point in sweep_of(name).points if point["seed"] in (0, 100)]


SAME_BATCH = ["merge_rule", "mixing", "gamma", "overlap"]


@pytest.mark.parametrize("name", SAME_BATCH)
def test_an_ablation_compares_at_equal_tokens_and_global_batch(name):
    experiments = experiments_of(name)
    assert len({tokens(e) for e in experiments}) == 1
    assert len({sum(e.batch_size(m) for m in range(e.sync.num_learners)) for e in experiments}) == 1


def test_honest_runs_are_smaller_and_have_a_thousand_rounds_and_the_fleet_of_the_preset():
    for point in honest.get_sweep():
        whole, smaller = experiment({"config": point["config"]}), experiment(point)
        schedule = Schedule(smaller.sync.num_fragments, smaller.sync.interval)
        rounds = sum(len(schedule.due(step)) for step in range(1, smaller.train.steps + 1))
        assert rounds >= honest.ROUNDS
        assert smaller.driver == "virtual" and smaller.train.tokens is smaller.virtual.seconds is None
        assert smaller.outer.guard == whole.outer.guard and smaller.outer.guard.gates
        assert (smaller.virtual.availability, smaller.sync) == (whole.virtual.availability, whole.sync)
        assert type(smaller.model) is type(whole.model)


def row(point):
    """A run with a loss by half above the baseline's of the same steps and inner rate."""
    loss = 1 / (point["train.steps"] + point["inner.learning_rate"])
    return {**point, "eval_loss": loss * (1 if point["algorithm"] == "data_parallel" else 1.5)}


COMPARED = {name: (module, "tiny") for name, module in FAMILIES.items()}
COMPARED |= {f"micro {name}": (micro, name) for name in micro.FAMILIES}


@pytest.mark.parametrize(("module", "argument"), COMPARED.values(), ids=COMPARED)
def test_the_five_algorithms_are_compared_at_equal_tokens_and_global_batch(module, argument):
    rows = module.get_comparison(argument)
    assert [row["algorithm"] for row in rows] == list(baselines.ALGORITHMS.values())
    found = [parsed_row(module, row) for row in rows]
    assert len({tokens(e) for e in found}) == 1
    assert len({e.sync.num_learners * e.batch_size(0) for e in found}) == 1
    assert {e.driver for e in found} == {"virtual"}
    with pytest.raises(ValueError, match=r"no preset 'streaming'; there are (tiny|dense)"):
        module.get_comparison("streaming")


@pytest.mark.parametrize(("argument", "names"), {"counted": links.FLEETS, "trained": links.TRAINED}.items())
def test_fleets_are_compared_at_equal_tokens_with_both_rules_and_no_other_difference(argument, names):
    rows = links.get_comparison(argument)
    assert [row["label"] for row in rows] == [f"{name}, {rule}" for name in names for rule in links.RULES]
    found = [parsed_row(links, row) for row in rows]
    for paper, expected in zip(found[::2], found[1::2], strict=True):
        assert (paper.sync.grace, expected.sync.grace) == links.RULES
        sync = dataclasses.replace(paper.sync, grace=expected.sync.grace)
        assert dataclasses.replace(paper, sync=sync) == expected
    assert {e.virtual.arrays for e in found} == {argument == "trained"}
    assert len({tokens(e) / e.sync.num_learners for e in found}) == 1


def bandwidth(name):
    """Of each learner of a fleet without arrays, in what float32 needs where a step takes a second."""
    _, row = links.get_comparison(name)
    e = parsed_row(links, row)
    sent = 4 * num_parameters(links.get_config()) / e.sync.interval
    return [round(e.virtual.of("bandwidth", m) / sent, 3) for m in range(e.sync.num_learners)]


@pytest.mark.parametrize(("length", "wanted"), [("short", 480 * 32 * 128), ("long", 16_121_856)])
def test_tuned_points_are_compared_at_equal_tokens(length, wanted):
    presets = [preset for preset in tuned.POINTS if preset[2] == length]
    found = [parse(tuned.get_config(",".join(preset))) for preset in presets]
    compared = [parsed_row(tuned, row) for row in tuned.get_comparison(length)]
    assert {tokens(e) for e in found} == {e.train.tokens for e in compared} == {wanted}
    assert [e.inner.optimizer for e in compared] == ["muon", "adamw", "muon", "muon"]
    assert [e.sync.interval for e in compared[2:]] == [2, 24]
    assert {(e.inner.final_fraction, e.data.interleave) for e in found} == {(0.0, 128)}
    for one, e in zip(found, compared, strict=False):
        assert (one.train.batch_size, one.inner) == (e.train.batch_size, e.inner)


MIXED = ("algorithm", "sync.num_learners", "data.interleave")


def experiments_by_learners(name):
    """The runs of a sweep, one of each number of learners."""
    points = {tuple(point.get(setting) for setting in MIXED): point for point in sweep_of(name).points}
    return [experiment(point) for point in points.values()]


@pytest.mark.parametrize("name", ["learners", "tiny", *scaling.PARTS])
def test_numbers_of_learners_are_compared_on_data_that_is_as_mixed_for_each_and_for_data_parallel(name):
    if name in ("learners", "tiny"):
        found = [parsed_row(methods, row) for row in methods.get_tuning(name)["rows"]]
    else:
        found = [e for scale in scaling.SIZES for e in experiments_by_learners(f"scaling:{name},{scale}")]
    assert {e.algorithm for e in found} >= {"data_parallel", "decoupled"}
    assert {e.sync.num_learners for e in found if e.algorithm == "decoupled"} >= {1, 2, 4, 8}
    # Each learner's shard has as many documents side by side as the setting says.
    assert len({e.sync.num_learners * e.data.interleave for e in found}) == 1


@pytest.mark.parametrize(
    ("call", "preset", "problem"),
    [
        (tuned.get_config, "adamw,long", "decoupled was not tuned with adamw"),
        (links.get_comparison, "thin", "no fleet 'thin'; must end with a share of the need"),
    ],
)
def test_a_preset_or_fleet_that_there_is_not_says_which_there_are(call, preset, problem):
    with pytest.raises(ValueError, match=problem):
        call(preset)


@pytest.mark.parametrize("size", scaling.SIZES["cpu"])
def test_the_study_knows_the_parameters_of_its_sizes(size):
    point = next(p for p in scaling.get_sweep() if p["model.model_dim"] == size[1])
    overrides = [(name, value) for name, value in point.items() if name != "config"]
    assert num_parameters(program.resolve(point["config"], overrides)) == scaling.parameters(size)


def num_parameters(config):
    from ddiloco.training import parameters

    return parameters.num_parameters(parse(config).model)
