"""Compiling for chips that are not there: what the command tells and refuses, and what learners load."""

import dataclasses
import json
import subprocess

import jax
import numpy as np
import pytest

from ddiloco.config import ConfigError
from ddiloco.run.recipes import ModelRecipe
from ddiloco.run.resources import inner_bytes
from ddiloco.settings.experiment import parse
from ddiloco.training.chips import CHIPS
from ddiloco.training.sharding import parameter_shardings
from ddiloco.workers.transfer import FragmentTransfer
from experiments.cli import program
from experiments.cli.dry_run import device_offer_bytes
from experiments.cli.program import UsageError
from experiments.studies.compiling import table, topology
from experiments.studies.compiling.cost import CollectiveTraffic, Cost
from experiments.studies.compiling.report import Compilation, CompiledProgram, report, roofline
from tests.integration.programs import SMALLEST
from tests.refusals import assert_refused, refusal

NO_CHECKPOINTS = {"checkpoint_every": 0.0}

needs_libtpu = pytest.mark.skipif(not topology.has_compiler(), reason="needs libtpu")


@pytest.fixture(scope="module", autouse=True)
def simulated_devices():
    """Made before libtpu is asked for, which takes XLA_FLAGS away, also where this file runs alone."""
    return jax.devices()


def config(**settings):
    found = program.load_config("configs/dense.py:tiny,paper")
    found.model.update(num_layers=1, model_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32)
    found.sync.update(num_fragments=2, num_learners=1)
    found.inner.optimizer = "adamw"  # takes half of Muon's time to compile
    found.train.update(batch_size=8, **settings)
    return parse(found)


def compiled(experiment, where):
    compilation = Compilation(experiment, where)
    programs = list(compilation.programs(lambda line: None))
    return compilation, programs


@pytest.mark.slow
@needs_libtpu
def test_a_preset_is_compiled_by_the_tpu_compiler(programs, tmp_path):
    output, saved = tmp_path / "new" / "figures.json", tmp_path / "step"
    done = programs.run(
        "compile",
        "--config=configs/dense.py:tiny",
        *SMALLEST[:6],
        "--config.data.sequence_length=32",
        "--config.sync.num_fragments=3",
        "--config.mesh.fsdp=2",
        "--config.inner.optimizer=adamw",  # Muon's own operations are not the model's
        "--topology=v5e:2x2",
        f"--output={output}",
        f"--save={saved}",
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert (found["preset"], found["topology"], found["chips"]) == ("configs/dense.py:tiny", "v5e:2x2", 4)
    assert found["fits"]
    assert found["mesh"] == {
        "slice": 1,
        "data": 2,
        "stage": 1,
        "fsdp": 2,
        "context": 1,
        "tensor": 1,
        "expert": 1,
    }
    assert 0 < found["state_gib"] <= found["argument_gib"] < found["peak_gib"] < found["hbm_gib"] == 15.75
    assert found["program_flops"] == pytest.approx(found["model_flops"], rel=0.02)
    assert found["collective_bytes"]["all-gather"] > 0
    assert found["roofline"]["step_seconds"] > 0
    names = [program["name"] for program in found["programs"]]
    assert names[:4] == ["step", "evaluation", "fragment 0 copy", "fragment 0 apply"]
    assert len(names) == 2 + 2 * 3
    assert "MFU at most" in done.stdout
    assert saved.stat().st_size > 1000


@pytest.mark.slow
@needs_libtpu
def test_of_several_slices_only_copies_of_the_model_meet_over_the_network_between_them(programs, tmp_path):
    """Measured: libtpu sums gradients within a slice, and hands each chip's part to the hosts."""
    output = tmp_path / "figures.json"
    asked = ("--config.mesh.fsdp=4", "--config.inner.optimizer=adamw", "--topology=v5e:2x2", "--slices=2")
    done = programs.run("compile", *SMALLEST[:7], *asked, f"--output={output}")
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert (found["chips"], found["mesh"]["slice"]) == (8, 2)
    step, *others = (program["dcn_bytes"] for program in found["programs"])
    assert {kind for kind, sent in step.items() if sent} == {"all-reduce"}
    parameters = found["state_gib"] * 2**30 / 3  # and two moments, on a chip
    assert parameters <= step["all-reduce"] <= 4 * parameters  # what it has of them, to all of its slice's
    assert not any(sent for kinds in others[1:] for sent in kinds.values())  # nor does the evaluation's
    assert "and to other slices:" in done.stdout and "by dcn" in done.stdout


@needs_libtpu
def test_a_slice_that_does_not_do_is_told_in_one_line(programs):
    done = programs.run("compile", "--config.mesh.fsdp=3", "--topology=v5p:2x2x2")
    assert_refused(done, "mesh: data=-1 x fsdp=3 needs a multiple of 3 devices")


@pytest.mark.slow
@needs_libtpu
def test_parts_of_the_logits_gather_the_head_twice_however_many_there_are():
    def sent(tokens: int) -> float:
        found = program.load_config("configs/dense.py:tiny")
        found.model.update(num_layers=1, model_dim=64, vocab_size=4096, logits_chunk=tokens)
        found.data.sequence_length, found.mesh.fsdp, found.inner.optimizer = 32, 4, "adamw"
        compilation = Compilation(parse(found), topology.slice_of("v5e:2x2"))
        return sum(next(compilation.programs(lambda line: None)).as_json()["collective_bytes"].values())

    whole, parts = sent(64), sent(4)  # of 64 tokens of a device
    assert parts <= whole + 1.01 * 4096 * 64 * 4  # once more, of float32 at most


def test_an_unknown_chip_and_a_missing_compiler_are_told_in_one_line(monkeypatch):
    for asked in ("v9x:2x2", "v5p:0x4x4", "v5p:4x", "v5p:axb"):
        with pytest.raises(
            UsageError, match=f"topology: is {asked}, but must be one of v5e, v5p, v6e, a col"
        ):
            topology.slice_of(asked)
    monkeypatch.setattr(topology, "has_compiler", lambda: False)
    with pytest.raises(UsageError, match=r"needs libtpu, .*pip install 'ddiloco\[tpu_compiler\]'"):
        topology.slice_of("v5e:2x2")


@pytest.mark.parametrize(
    ("more", "copied"),
    [
        ({"snapshot": {"every": 100}, "recovery": NO_CHECKPOINTS}, lambda state, inner: state),
        ({}, lambda state, inner: state),
        ({"recovery": NO_CHECKPOINTS}, lambda state, inner: inner),
        ({"recovery": NO_CHECKPOINTS, "remote": {"donor_port": None}}, lambda state, inner: 0.0),
    ],
)
def test_what_fits_has_room_for_a_copy_of_the_state_on_its_way_to_the_disk_or_to_a_peer(more, copied):
    experiment = config()
    more = {**more, "sync": {"rebase": False}}  # else adopted versions are kept, too
    changed = {name: dataclasses.replace(getattr(experiment, name), **x) for name, x in more.items()}
    experiment = dataclasses.replace(experiment, **changed)
    state = Compilation(experiment, topology.Slice(jax.devices()[:1], None)).state_bytes
    copied = copied(state, inner_bytes(experiment))
    compilation = Compilation(experiment, topology.Slice(jax.devices()[:1], None))
    copied += device_offer_bytes(experiment, compilation.layout, compilation.mesh)
    step = CompiledProgram("step", 1.0, arguments=state, temp=1000.0, cost=Cost(flops=1.0))
    for hbm, fits in ((state + 1000 + copied, True), (state + 999 + copied, False)):
        chip = dataclasses.replace(CHIPS["v5e"], hbm_bytes=hbm)
        compilation = Compilation(experiment, topology.Slice(jax.devices()[:1], chip))
        assert report("tiny", "v5e:1x1", compilation, [step])["fits"] is fits


@pytest.mark.slow
def test_a_saved_step_is_loaded_by_learners_and_gives_the_same_and_another_is_refused(tmp_path):
    where = topology.Slice(jax.devices()[:2], None)
    compilation, programs = compiled(config(), where)
    found = report("tiny", topology.HERE, compilation, programs)
    assert found["fits"] is None and found["roofline"] is None
    assert found["state_gib"] * 2**30 == pytest.approx(compilation.state_bytes)
    path = tmp_path / "step"
    compilation.save(path)
    batches, states = None, []
    for experiment in (config(), config(executable=str(path))):
        recipe = ModelRecipe(experiment)
        program = recipe.program(compilation.mesh, 8)
        batches = batches or [next(recipe.batches((0,))) for _ in range(2)]
        state = program.state_from(recipe.initial_parameters())
        for clock, batch in enumerate(batches):
            state, metrics = program.step(state, batch, clock)
        states.append((float(metrics["loss"]), state))
    (loss, plain), (loaded_loss, loaded) = states
    assert loss == loaded_loss
    for name, value in plain.params.items():
        assert (value == loaded.params[name]).all(), name

    def told(mesh, path, **model):
        experiment = config(executable=str(path))
        experiment = dataclasses.replace(experiment, model=dataclasses.replace(experiment.model, **model))
        return refusal(ConfigError, ModelRecipe(experiment).program, mesh, 8)

    other = Compilation(config(), topology.Slice(jax.devices()[2:4], None)).mesh
    assert "its devices is [0, 1], but this learner's is [2, 3]" in told(other, path)
    assert "the program differs in code or settings" in told(compilation.mesh, path, mlp_dim=64)
    assert "cannot be read: No such file" in told(compilation.mesh, tmp_path / "none")
    (tmp_path / "text").write_text("text")
    assert "was not written by" in told(compilation.mesh, tmp_path / "text")
    for cut in (path.read_bytes()[:-1], path.read_bytes()[:60]):  # in the program, and before it
        path.write_bytes(cut)
        assert "is not complete; compile it again" in told(compilation.mesh, path)


def test_a_compiler_that_is_killed_leaves_out_its_row_alone(monkeypatch, tmp_path):
    killed = subprocess.CompletedProcess((), -9, "", "")
    monkeypatch.setattr(table, "GRID", {"dense:tiny": ("v5e:2x2", "v6e:2x2")})
    monkeypatch.setattr(subprocess, "run", lambda *command, **more: killed)
    told = []
    assert table.compile_all(tmp_path, told.append) == []
    assert told == ["dense:tiny on v5e:2x2", "exit status -9", "dense:tiny on v6e:2x2", "exit status -9"]


def test_what_a_codec_keeps_counts_pieces_that_do_not_divide_among_the_chips_whole():
    found = program.load_config("configs/dense.py:tiny")
    found.model.num_layers, found.mesh.fsdp, found.outer.codec = 2, 8, "int4"
    found.sync.update(num_fragments=24, num_learners=1)
    compilation = Compilation(parse(found), topology.Slice(jax.devices()[:8], None))
    told = report("tiny", topology.HERE, compilation, [CompiledProgram("step", 0.0)])["anchor_gib"]
    layout, model = compilation.layout, compilation.experiment.model
    transfer = FragmentTransfer(layout, parameter_shardings(model, compilation.mesh), "int4")
    kept = 0
    for p in range(layout.num_fragments):
        pieces = [np.zeros(shape, np.float32) for shape in layout.piece_shapes(p)]
        kept += sum(array.addressable_data(0).nbytes for array in transfer.place(p, pieces))
    assert told * 2**30 == kept > 2 * sum(layout.bytes) / 8


def test_a_step_takes_what_its_slowest_part_takes():
    chip = CHIPS["v5p"]
    moved = {"a": CollectiveTraffic("all-gather", 2 * chip.link_bandwidth, group=4, times=3)}
    found = roofline(Cost(2 * chip.peak_flops, chip.hbm_bandwidth, moved), chip.peak_flops, chip)
    assert (found["compute_seconds"], found["hbm_seconds"], found["interconnect_seconds"]) == (2, 1, 3)
    assert (found["step_seconds"], found["bound_by"]) == (3, "interconnect")
    assert found["mfu"] == pytest.approx(1 / 3)
    across = {"b": CollectiveTraffic("all-reduce", 2 * chip.dcn_bandwidth, group=2, times=4, dcn=True)}
    found = roofline(Cost(0, 0, moved | across), chip.peak_flops, chip)
    assert (found["interconnect_seconds"], found["dcn_seconds"], found["bound_by"]) == (3, 8, "dcn")
