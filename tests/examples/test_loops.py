"""The examples of docs/your_own.md, in threads and in virtual time."""

import dataclasses
import functools
import gc
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

import ddiloco
from ddiloco.config import ConfigError
from ddiloco.run.recipes import assembly_of, load_factory
from ddiloco.settings.experiment import parse
from ddiloco.training.mesh import MeshConfig, carve
from experiments.cli.dry_run import describe
from experiments.examples import nnx_loop, plain_loop
from tests import workbench

SYNC = {"num_fragments": 2, "interval": 4}


@pytest.fixture(autouse=True)
def alone(one_device):
    """On one device."""


def trained(make_loop, workdir, **settings):
    changes = {"learners": 2, "steps": 24, "sync": SYNC, "eval": {"every": 0}, **settings}
    return ddiloco.train(make_loop, workdir, **changes)


def test_every_loop_is_a_program():
    loops = {
        path.stem: path.read_text() for path in pathlib.Path(plain_loop.__file__).parent.glob("*_loop.py")
    }
    assert {"plain_loop", "sharded_loop"} <= set(loops)
    assert [name for name, text in loops.items() if '__name__ == "__main__"' not in text] == []


@pytest.mark.parametrize("example", [plain_loop, pytest.param(nnx_loop, marks=pytest.mark.slow)])
def test_an_example_learns_in_threads(example, tmp_path):
    done = trained(example.make_loop, tmp_path, steps=48, train={"min_step_seconds": (0.02, 0.02)})
    first, *_, last = (score["loss"] for score in done.summary["eval_history"])
    assert last < first / 2
    assert done.summary["finished"]
    assert min(done.summary["outer_steps"].values()) >= 1  # the last rounds, however late merges are compiled
    assert min(done.summary["inner_steps"].values()) > 4


@pytest.mark.parametrize("example", [plain_loop, pytest.param(nnx_loop, marks=pytest.mark.slow)])
def test_an_example_comes_to_the_same_parameters_again_in_virtual_time(example, tmp_path):
    first, again, other = (
        trained(example.make_loop, tmp_path / str(n), driver="virtual", seed=seed)
        for n, seed in enumerate((1, 1, 2))
    )
    assert first.summary["params_sha256"] == again.summary["params_sha256"]
    assert first.summary["params_sha256"] != other.summary["params_sha256"]
    assert first.summary["rounds"] == 13


def test_an_equinox_model_learns_and_comes_back_in_its_tree(tmp_path):
    pytest.importorskip("equinox", reason="is no dependency")
    from experiments.examples import equinox_loop

    done = trained(equinox_loop.make_loop, tmp_path, driver="virtual", steps=48, eval={"every": 24})
    first, *_, last = (score["loss"] for score in done.summary["eval_history"])
    assert last < first / 2
    assert done.params.layers[0].weight.shape == (32, 1) and done.params.activation is None


@pytest.mark.slow
def test_learners_with_the_same_batch_drop_other_units_and_all_score_alike():
    mesh = carve(jax.devices()[:1], 1, MeshConfig())[0]
    batch, losses, scores = nnx_loop.points(nnx_loop.np.random.default_rng(1), 64), [], []
    for learner in (0, 1):
        loop = nnx_loop.make_loop(ddiloco.Place(learner, 2, 0, mesh))
        scores.append(float(loop.evaluate(loop.params(loop.init()))))
        losses.append(float(loop.step(loop.init(), batch)[1]["loss"]))
    assert losses[0] != losses[1] and scores[0] == scores[1]


def test_parameters_come_back_in_the_tree_of_the_loop(tmp_path):
    plain = trained(plain_loop.make_loop, tmp_path, driver="virtual", steps=8, settings={"width": 5})
    assert jax.tree.map(jax.numpy.shape, plain.params) == {
        "hidden": {"w": (1, 5), "b": (5,)},
        "out": {"w": (5, 1), "b": (1,)},
    }


@pytest.mark.slow
def test_parameters_of_an_nnx_loop_are_those_of_its_module(tmp_path):
    params = trained(nnx_loop.make_loop, tmp_path, driver="virtual", steps=8).params
    model = nnx_loop.Net(32, nnx.Rngs(0))
    nnx.update(model, params)
    model.eval()
    x = nnx_loop.points(nnx_loop.np.random.default_rng(0), 4)["x"]
    assert model(x).shape == (4, 2)


@pytest.mark.parametrize("driver", ["local", pytest.param("virtual", marks=pytest.mark.slow)])
def test_a_run_that_has_ended_leaves_nothing_on_the_devices(driver, tmp_path):
    gc.collect()
    before = jax.live_arrays()  # held, so that no other gets an id of theirs
    gc.disable()  # it could come at any time
    try:
        trained(plain_loop.make_loop, tmp_path, driver=driver, settings={"width": 5})
        known = {id(array) for array in before}
        assert [array.shape for array in jax.live_arrays() if id(array) not in known] == []
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "own_work", [pytest.param({"mixing": 0.5}, marks=pytest.mark.slow), {"rebase": False}]
)
def test_a_learner_keeps_what_it_did_since_its_offer_unless_another_way_is_asked_for(own_work, tmp_path):
    trained(plain_loop.make_loop, tmp_path, driver="virtual", steps=4, sync={**SYNC, **own_work})
    assert not json.loads((tmp_path / "config.json").read_text())["sync"]["rebase"]


def test_learners_and_steps_may_be_in_their_groups(tmp_path):
    sync, train = {**SYNC, "num_learners": 3}, {"steps": 8}
    done = ddiloco.train(plain_loop.make_loop, tmp_path, driver="virtual", sync=sync, train=train)
    assert done.summary["inner_steps"] == {"0": 8, "1": 8, "2": 8}
    assert json.loads((tmp_path / "config.json").read_text())["sync"]["rebase"], "as in the presets"


def test_a_run_goes_on_from_a_snapshot(tmp_path):
    paced = {"min_step_seconds": (0.05, 0.05)}  # so that a snapshot is complete before the end
    settings = {"snapshot": {"every": 4}, "sync": {**SYNC, "quorum": None}, "train": paced}
    trained(plain_loop.make_loop, tmp_path, **settings)
    number = max(int(path.parent.name) for path in tmp_path.glob("snapshots/*/snapshot.json"))
    done = trained(plain_loop.make_loop, tmp_path, **settings, steps=40, resume=number)
    assert done.summary["finished"]
    steps = [json.loads(line) for line in (tmp_path / "learners/0/steps.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps][-1] == 40
    assert len(steps) <= 40


def counted(place):
    """The plain loop, with the tokens of its steps."""
    return dataclasses.replace(plain_loop.make_loop(place), step_tokens=64)


def test_a_loop_that_says_its_tokens_has_a_budget_of_them(tmp_path):
    done = trained(counted, tmp_path, train={"tokens": 64 * 2 * 9})
    assert done.summary["step"] == 9
    with pytest.raises(ConfigError, match=r"train\.tokens: is 100, but the loop does not say its"):
        trained(plain_loop.make_loop, tmp_path, train={"tokens": 100})


def test_a_loop_begins_from_a_file_with_its_own_names(tmp_path):
    begun = trained(plain_loop.make_loop, tmp_path / "one", driver="virtual", steps=4)
    leaves = jax.tree_util.tree_flatten_with_path(begun.params)[0]
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(x) for path, x in leaves}
    save_file(named, tmp_path / "weights.safetensors")
    model = {"name": "loop", "factory": f"{plain_loop.__file__}:make_loop"}
    experiment = parse({"model": model, "sync": SYNC, "init_from": str(tmp_path / "weights.safetensors")})
    workbench.assert_equal(assembly_of(experiment).initial_parameters(), named)
    save_file({name: x for name, x in named.items() if name != "out/w"}, tmp_path / "weights.safetensors")
    with pytest.raises(ConfigError, match=r"init_from: \S+weights.safetensors: has no tensor out/w"):
        trained(plain_loop.make_loop, tmp_path / "two", init_from=f"{tmp_path}/weights.safetensors")


def test_data_parallel_takes_the_steps_of_a_loop_on_all_learners_batches(tmp_path):
    """As the loop takes them by itself."""
    done = trained(plain_loop.make_loop, tmp_path, algorithm="data_parallel", steps=5)
    mesh = carve(jax.devices()[:1], 1, MeshConfig())[0]
    loops = [plain_loop.make_loop(ddiloco.Place(m, 2, 0, mesh)) for m in (0, 1)]
    state, batches = loops[0].init(), [loop.batches() for loop in loops]
    for _ in range(5):
        batch = jax.tree.map(lambda *rows: np.concatenate(rows), *map(next, batches))
        state, _ = loops[0].step(state, batch)
    close = functools.partial(np.testing.assert_allclose, rtol=1e-6)
    jax.tree.map(close, done.params, loops[0].params(state))
    assert done.summary["tokens"] == {"0": 5 * 2 * 64}


@pytest.mark.slow
def test_a_baseline_of_a_loop_goes_on_where_it_was(tmp_path):
    paced = {"min_step_seconds": (0.02, 0.02)}
    whole = trained(plain_loop.make_loop, tmp_path / "whole", algorithm="data_parallel", steps=12)
    half = tmp_path / "half"
    trained(plain_loop.make_loop, half, algorithm="data_parallel", steps=6, train=paced)
    done = trained(plain_loop.make_loop, half, algorithm="data_parallel", steps=12, resume=True)
    assert done.summary["params_sha256"] == whole.summary["params_sha256"]


def test_a_lone_learner_reads_the_share_of_the_first(tmp_path):
    done = trained(plain_loop.make_loop, tmp_path, algorithm="lone_learner", steps=5)
    assert done.summary["tokens"] == {"0": 5 * 64}


def test_a_dry_run_makes_a_loop_and_takes_no_step(tmp_path):
    model = {"name": "loop", "factory": f"{plain_loop.__file__}:make_loop", "settings": {"width": 3}}
    lines = describe(parse({"model": model, "sync": SYNC})).splitlines()
    assert lines[1] == "parameters   10 (40 B in float32)"
    # Adam's two moments of each, and its count.
    assert lines[3] == "memory       40 B of parameters and 84 B of other state on each device"
    assert any(line.startswith("bandwidth ") for line in lines)


def test_importing_the_package_imports_neither_jax_nor_a_driver():
    program = "import sys, ddiloco; print([m for m in sys.modules if m == 'jax' or m.startswith('ddiloco.')])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_the_factory_of_a_config_is_one_of_a_file_too():
    model = {"name": "loop", "factory": f"{plain_loop.__file__}:make_loop", "settings": {"width": 3}}
    experiment = parse({"model": model, "sync": SYNC})
    assert assembly_of(experiment).recipe.shapes["hidden/w"] == (1, 3)
    assert load_factory("experiments.examples.plain_loop:make_loop") is plain_loop.make_loop
