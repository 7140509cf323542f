"""What a run would be, told without allocating it: in this process, on eight simulated devices."""

import re

import jax
import pytest

from ddiloco.config import ConfigError
from ddiloco.models import model_of
from ddiloco.run import resources
from ddiloco.run.recipes import assembly_of
from ddiloco.settings.experiment import parse
from ddiloco.training.parameters import num_parameters
from experiments.cli import program
from experiments.cli.dry_run import bandwidth, describe

SIZES = {"tiny": 0.8e6, "small": 24e6, "160m": 160e6, "400m": 400e6, "1b": 1e9}
SIZES |= {"2b": 2e9, "5b": 5e9, "9b": 9e9}


@pytest.mark.parametrize(
    ("size", "named"),
    [pytest.param(*item, marks=[pytest.mark.slow] * (item[0] != "tiny")) for item in SIZES.items()],
)
def test_a_preset_has_the_parameters_of_its_name_in_balanced_fragments(size, named):
    config = program.load_config(f"configs/dense.py:{size}")
    config.mesh.update(data=-1, fsdp=1)
    before = len(jax.live_arrays())
    text = describe(parse(config))
    assert len(jax.live_arrays()) <= before
    count = int(re.search(r"parameters +([\d,]+) ", text)[1].replace(",", ""))
    # Of the 2b shape 0.6 billion are its embedding of 262,144 tokens, which names of that class leave out.
    counted = count - (262_144 * 2304 if size == "2b" else 0)
    assert named * 0.9 < counted < named * 1.1
    fragments = 24 if named > 1e8 else 12
    balance = float(re.search(rf"fragments    {fragments} by strategy balanced; balance ([\d.]+)", text)[1])
    assert 1 <= balance <= 4 / 3
    assert len(re.findall(r"^ +\d+ +\S+ [KMG]iB +\d+ pieces +#+$", text, re.M)) == fragments


@pytest.mark.parametrize(
    ("size", "activated"),
    [
        ("tiny", 0.8e6),
        *(pytest.param(size, n, marks=pytest.mark.slow) for size, n in (("2.8b", 2.8e9), ("3.8b", 3.8e9))),
    ],
)
def test_a_mixture_of_experts_activates_the_parameters_of_its_name(size, activated):
    model = parse(program.load_config(f"configs/moe.py:{size}")).model
    count = num_parameters(model)
    assert count > 2.9 * activated
    assert count - model_of(model).idle_parameters(model) == pytest.approx(activated, rel=0.02)


def test_a_dry_run_tells_the_activated_parameters():
    config = program.load_config("configs/moe.py:tiny,streaming")
    config.mesh.update(data=-1, fsdp=1)
    assert "2,431,104 (9.3 MiB in float32), 809,088 activated by a token\n" in describe(parse(config))


def test_a_learner_alone_draws_the_rows_of_one():
    config = program.load_config("configs/dense.py:tiny,lone_learner")
    config.mesh.update(data=-1, fsdp=1)
    assert describe(parse(config)).endswith("FLOP for the job, 1,024 tokens in all")


def test_a_baseline_is_told_as_the_one_job_that_it_is_on_all_devices():
    """Its mesh would not fit a learner's two devices, nor its fragments the model: it has none."""
    config = program.load_config("configs/dense.py:tiny,data_parallel")
    config.mesh.update(data=1, fsdp=8)
    config.sync.num_fragments = 10_000
    text = describe(parse(config))
    assert re.search(
        r"^mesh +slice=1 data=1 stage=1 fsdp=8 context=1 tensor=1 expert=1 for the job, 8 devices in all$",
        text,
        re.M,
    )
    assert re.search(r"^step +32 x 128 tokens and \S+ FLOP for the job, 4,096 tokens in all$", text, re.M)
    config.train.batch_size = 1
    with pytest.raises(
        ConfigError, match=r"config\.train\.batch_size: gives 4 rows, but must give a multiple of 8"
    ):
        describe(parse(config))


def test_processes_are_told_with_the_share_of_each_host_and_the_evaluator_if_there_is_one():
    config = program.load_config("configs/dense.py:tiny")
    config.update(driver="remote")
    config.remote.update(hosts=(4,) * config.sync.num_learners)
    config.train.sub_shards = 4
    experiment = parse(config)
    told, given = describe(experiment), resources.donor_bytes(experiment) / 4 / 2**10
    assert f" beside its devices, of it {given:.1f} KiB to give its inner" in told
    needed = resources.evaluator_needs(experiment, assembly_of(experiment).layout).most / 2**20
    assert f"\n             evaluator {needed:.1f} MiB where its device is the CPU;\n" in told
    config.eval.every = None
    assert "evaluator" not in describe(parse(config))


def test_a_decoupled_run_moves_every_fragment_once_an_interval():
    experiment = parse(program.load_config("configs/dense.py:tiny,paper"))
    layout = assembly_of(experiment).layout
    moved = bandwidth(experiment, layout)
    assert moved.mean == sum(layout.bytes) / 24
    assert moved.peak == max(layout.bytes)
    assert moved.data_parallel == 2 * 3 / 4 * 2 * sum(layout.bytes) / 4


def test_a_codec_makes_what_goes_up_smaller_and_needs_an_anchor_on_the_devices():
    plain = parse(program.load_config("configs/dense.py:small,paper"))
    layout = assembly_of(plain).layout
    assert bandwidth(plain, layout, "bf16").mean == bandwidth(plain, layout).mean / 2
    share = bandwidth(plain, layout, "int4").peak / bandwidth(plain, layout).peak
    assert share == pytest.approx((4 + 32 / 128) / 32, rel=1e-3)
    config = program.load_config("configs/dense.py:tiny,paper")
    config.mesh.update(data=-1, fsdp=1)
    config.outer.codec = "int4"
    kept = re.search(
        r"each device;\n +([\d.]+) MiB for adopted versions, up to ([\d.]+) MiB for offers$",
        describe(parse(config)),
        re.M,
    )
    sizes = assembly_of(parse(config)).layout.bytes
    assert float(kept[1]) == pytest.approx(sum(sizes) / 2**20, abs=0.1)
    assert float(kept[2]) == pytest.approx(4 * max(sizes) * (1 + (4 + 32 / 128) / 32) / 2**20, rel=0.1)


def test_where_codecs_differ_each_one_s_bytes_are_told_and_all_keep_anchors():
    config = program.load_config("configs/dense.py:tiny,paper")
    config.sync.rebase, config.mesh.data, config.mesh.fsdp = False, -1, 1
    config.outer.codec = "f32,int4,f32,f32"
    told = describe(parse(config))
    assert re.search(
        r"a step and learner: [\d.]+ KiB up in f32 \(learners 0, 2, 3\), "
        r"[\d.]+ KiB up in int4 \(learner 1\), [\d.]+ KiB down in f32,",
        told,
    )
    assert " MiB for adopted versions" in told


def test_what_late_offers_take_is_told_only_where_they_are_merged():
    config = program.load_config("configs/dense.py:tiny,paper")
    sizes = assembly_of(parse(config)).layout.bytes
    told = re.search(
        r"offers miss their rounds: syncer ([\d.]+) MiB, learner up to ([\d.]+) MiB;$",
        describe(parse(config)),
        re.M,
    )
    assert float(told[1]) == pytest.approx(sum(sizes) / 2**20, abs=0.1)
    assert float(told[2]) == pytest.approx(4 * sum(sizes) / 2**20, abs=0.1)
    config = program.load_config("configs/dense.py:tiny,streaming")
    assert "miss their rounds" not in describe(parse(config))
