"""The examples of docs/your_own.md, in threads and in virtual time."""

import gc
import json
import subprocess
import sys

import jax
import pytest
from flax import nnx

import ddiloco
from ddiloco.run.recipes import assembly_of, load_factory
from ddiloco.settings.experiment import parse
from ddiloco.training.mesh import MeshConfig, carve
from experiments.examples import nnx_loop, plain_loop

SYNC = {"num_fragments": 2, "interval": 4}


@pytest.fixture(autouse=True)
def alone(one_device):
    """On one device."""


def trained(make_loop, workdir, **settings):
    changes = {"learners": 2, "steps": 24, "sync": SYNC, "eval": {"every": 0}, **settings}
    return ddiloco.train(make_loop, workdir, **changes)


@pytest.mark.parametrize("example", [plain_loop, pytest.param(nnx_loop, marks=pytest.mark.slow)])
def test_an_example_learns_in_threads(example, tmp_path):
    done = trained(example.make_loop, tmp_path, steps=48, train={"min_step_seconds": (0.02, 0.02)})
    first, *_, last = (score["loss"] for score in done.summary["eval_history"])
    assert last < first / 2
    assert done.summary["finished"]
    assert min(done.summary["outer_steps"].values()) > 2
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


def test_learners_with_the_same_batch_drop_other_units_and_all_score_alike():
    mesh = carve(jax.devices()[:1], 1, MeshConfig())[0]
    batch, losses, scores = nnx_loop.points(nnx_loop.np.random.default_rng(1), 64), [], []
    for learner in (0, 1):
        loop = nnx_loop.make_loop(ddiloco.Place(learner, 2, 0, mesh))
        scores.append(float(loop.evaluate(loop.params(loop.init()))))
        losses.append(float(loop.step(loop.init(), batch)[1]["loss"]))
    assert losses[0] != losses[1] and scores[0] == scores[1]


def test_parameters_come_back_in_the_tree_of_the_loop(tmp_path):
    plain = trained(
        plain_loop.make_loop, tmp_path / "plain", driver="virtual", steps=8, settings={"width": 5}
    )
    assert jax.tree.map(jax.numpy.shape, plain.params) == {
        "hidden": {"w": (1, 5), "b": (5,)},
        "out": {"w": (5, 1), "b": (1,)},
    }
    params = trained(nnx_loop.make_loop, tmp_path / "nnx", driver="virtual", steps=8).params
    model = nnx_loop.Net(32, nnx.Rngs(0))
    nnx.update(model, params)
    model.eval()
    x = nnx_loop.points(nnx_loop.np.random.default_rng(0), 4)["x"]
    assert model(x).shape == (4, 2)


@pytest.mark.parametrize("driver", ["local", "virtual"])
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


@pytest.mark.parametrize("own_work", [{"mixing": 0.5}, {"rebase": False}])
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


def test_importing_the_package_imports_neither_jax_nor_a_driver():
    program = "import sys, ddiloco; print([m for m in sys.modules if m == 'jax' or m.startswith('ddiloco.')])"
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_the_factory_of_a_config_is_one_of_a_file_too():
    model = {"name": "loop", "factory": f"{plain_loop.__file__}:make_loop", "settings": {"width": 3}}
    experiment = parse({"model": model, "sync": SYNC})
    assert assembly_of(experiment).recipe.shapes["hidden/w"] == (1, 3)
    assert load_factory("experiments.examples.plain_loop:make_loop") is plain_loop.make_loop
