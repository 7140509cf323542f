"""Settings: every wrong value ends in one line that names the field, and what is right makes a round trip."""

import dataclasses
import json
import math
import typing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_collections import ConfigDict

from configs import accelerator, chaos, dense, heterogeneous, loop, micro, multimodal, scavenging, sections
from ddiloco.config import ConfigError, build, leaves, section, setting, to_dict
from ddiloco.models import MODELS
from ddiloco.settings.experiment import all_settings, parse, to_json, with_steps_of_tokens
from tests.refusals import refusal

PRESETS = [f"{size},decoupled" for size in dense.SIZES]
PRESETS += [f"tiny,{algorithm}" for algorithm in dense.ALGORITHMS if algorithm != "decoupled"]


@dataclasses.dataclass(frozen=True)
class Engine:
    power: float = setting(1.5, "kW", above=0.0, at_most=9.0)
    gears: int | None = setting(None, "speeds; None: none", at_least=2)
    litres: float = setting(1.0, "displacement")
    bores: tuple[float, ...] = setting((), "m, by cylinder")


@dataclasses.dataclass(frozen=True)
class Boat:
    name: str = setting("Ada", "painted on it")
    kind: str = setting("punt", "what it is", choices=("punt", "ferry"))
    seats: int = setting(4, "people", at_least=1, at_most=8)
    draught: float = setting(0.5, "m", above=0.0, below=2.0)
    sails: bool = setting(False, "whether it has any")
    berths: tuple[int, ...] = setting((), "by cabin", at_least=1)
    trim: typing.Any = setting(None, "anything")
    engine: Engine = section(Engine)

    def __post_init__(self):
        if self.kind == "ferry" and self.seats < 2:
            raise ValueError("seats: is below 2, but a ferry has more")


WRONG = [
    ({"nam": "x"}, "config.nam: no such setting; did you mean name?"),
    (
        {"zzz": 1},
        "config.zzz: no such setting; known: berths, draught, engine, kind, name, sails, seats, trim",
    ),
    ({"seats": "4"}, "config.seats: is '4', but must be of type int"),
    ({"seats": 4.0}, "config.seats: is 4.0, but must be of type int"),
    ({"seats": True}, "config.seats: is True, but must be of type int"),
    ({"seats": 0}, "config.seats: is 0, but must be at least 1 and at most 8"),
    ({"draught": "deep"}, "config.draught: is 'deep', but must be of type float"),
    ({"draught": math.nan}, "config.draught: is nan, but must be above 0.0 and below 2.0"),
    ({"draught": 2}, "config.draught: is 2.0, but must be above 0.0 and below 2.0"),
    ({"draught": 0.0}, "config.draught: is 0.0, but must be above 0.0 and below 2.0"),
    ({"engine": {"power": -math.inf}}, "config.engine.power: is -inf, but must be at most 9.0 and above 0.0"),
    ({"engine": {"litres": math.inf}}, "config.engine.litres: is inf, but must be finite"),
    ({"engine": {"bores": (0.1, math.nan)}}, "config.engine.bores: is nan, but must be finite"),
    ({"sails": 1}, "config.sails: is 1, but must be of type bool"),
    ({"name": 3}, "config.name: is 3, but must be of type str"),
    ({"kind": "yacht"}, "config.kind: is 'yacht', but must be one of punt, ferry"),
    ({"berths": 2}, "config.berths: is 2, but must be a sequence"),
    ({"berths": "12"}, "config.berths: is '12', but must be a sequence"),
    ({"berths": (1, "2")}, "config.berths: is '2', but must be of type int"),
    ({"berths": [2, 0]}, "config.berths: is 0, but must be at least 1"),
    ({"engine": 3}, "config.engine: is 3, but is a group of settings"),
    ({"engine": None}, "config.engine: is None, but is a group of settings"),
    ({"engine": {"power": 0}}, "config.engine.power: is 0.0, but must be at most 9.0 and above 0.0"),
    ({"engine": {"gear": 1}}, "config.engine.gear: no such setting; did you mean gears?"),
    ({"kind": "ferry", "seats": 1}, "config.seats: is below 2, but a ferry has more"),
]


@pytest.mark.parametrize(("values", "told"), WRONG)
def test_a_wrong_value_is_told_in_one_line_that_names_the_field(values, told):
    assert refusal(ConfigError, build, Boat, values) == told


def test_whole_numbers_do_for_floats_lists_for_tuples_and_none_where_it_may_be():
    boat = build(Boat, {"draught": 1, "berths": [1, 2], "trim": {"any": 1}, "engine": {"gears": None}})
    assert (boat.draught, type(boat.draught)) == (1.0, float)
    assert (boat.berths, boat.trim, boat.engine.gears) == ((1, 2), {"any": 1}, None)


def test_a_config_dict_builds_what_a_dict_builds():
    values = {"seats": 2, "engine": {"power": 3.0}, "berths": (3,)}
    assert build(Boat, ConfigDict(values)) == build(Boat, values)


@given(
    st.builds(
        Boat,
        name=st.text(),
        seats=st.integers(2, 8),
        draught=st.floats(0.01, 1.99),
        berths=st.lists(st.integers(1, 9)).map(tuple),
        engine=st.builds(Engine, power=st.floats(0.1, 9.0), gears=st.none() | st.integers(2, 9)),
    )
)
def test_settings_survive_json(boat):
    assert build(Boat, json.loads(json.dumps(to_dict(boat)))) == boat


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers())


@given(st.dictionaries(st.sampled_from([field.name for field in dataclasses.fields(Boat)]), ANYTHING))
def test_whatever_is_given_either_builds_or_is_told_in_one_line(values):
    try:
        boat = build(Boat, values)
    except ConfigError as error:
        assert "\n" not in str(error)
        assert str(error).startswith("config.")
    else:
        assert 1 <= boat.seats <= 8
        assert 0 < boat.draught < 2


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_parses_and_makes_a_round_trip(preset):
    experiment = parse(dense.get_config(preset))
    assert parse(json.loads(json.dumps(to_json(experiment)))) == experiment
    assert experiment.algorithm == preset.split(",")[1]


def test_the_order_of_presets_is_free_and_each_has_a_default():
    assert dense.get_config("diloco,small").to_json() == dense.get_config("small,diloco").to_json()
    assert dense.get_config().to_json() == dense.get_config("tiny,decoupled").to_json()
    with pytest.raises(ValueError, match="no preset 'huge'; there are tiny, small"):
        dense.get_config("tiny,huge")
    with pytest.raises(ValueError, match="no preset 'tiny,diloco,small': only one of tiny, small"):
        dense.get_config("tiny,diloco,small")


def test_the_tiny_preset_is_the_defaults_but_for_fragments_rebase_and_muon_and_how_often_learners_meet():
    paper = {"sync": {"num_fragments": 12, "rebase": True}}
    assert parse(sections.run("dense")) == parse({})
    assert parse(dense.begin("tiny,paper")) == parse(paper)
    frequent = {"sync": {**paper["sync"], "interval": 6}}
    frequent["outer"] = {"codec": "int4", "update_codec": "int4"}
    tuned = {**frequent, "inner": {"optimizer": "muon", "learning_rate": 0.012}}
    assert parse(dense.get_config("tiny")) == parse(tuned)


@pytest.mark.parametrize("module", [chaos, heterogeneous, scavenging])
@pytest.mark.parametrize(
    "family",
    ["tiny", *(pytest.param(f, marks=pytest.mark.slow) for f in micro.OR_TINY if f != "tiny")],
)
def test_rows_about_failures_differ_in_nothing_but_their_fleet_and_algorithm(module, family):
    given = {} if family == "tiny" else {"family": family}  # the default
    found = [parse(module.get_config(row["preset"])) for row in module.get_comparison(**given)]
    [budget] = {(e.train.tokens, e.virtual.seconds) for e in found}
    assert budget.count(None) == 1
    [model] = {e.model for e in found}
    assert model == parse(micro.or_tiny(family)).model
    assert {e.driver for e in found} == {"virtual"}


@pytest.mark.parametrize("preset", ["decoupled", "decoupled,1,2", "decoupled,-1", "decoupled,1,huge"])
def test_a_scavenging_preset_that_there_is_not_is_refused(preset):
    with pytest.raises(ValueError, match=r"no preset '.*'; there are "):
        scavenging.get_config(preset)


def test_a_section_has_every_setting_and_takes_what_the_type_takes():
    boat = sections.section(Boat)
    assert build(Boat, boat) == Boat()
    boat.engine.gears, boat.draught = 3, 1
    assert build(Boat, boat) == Boat(draught=1.0, engine=Engine(gears=3))
    with pytest.raises(TypeError):
        boat.engine.gears = "three"


@pytest.mark.parametrize("name", MODELS)
def test_every_setting_says_what_it_means(name):
    for leaf in all_settings(parse({"model": {"name": name}})):
        assert len(leaf.metadata["meaning"]) > 3, leaf.path


@dataclasses.dataclass(frozen=True)
class Harbour:
    flagship: Boat = section(Boat, may_change="resume", both_ends=True)
    depth: float = setting(3.0, "m", may_change="never", because="it is dug")
    berths: int = setting(3, "boats")


def test_a_setting_has_the_marks_of_the_nearest_group_that_has_them():
    told = {leaf.path: leaf for leaf in leaves(Harbour())}
    assert (told["flagship.engine.power"].value, told["flagship.berths"].value) == (1.5, [])
    marks = {path: [leaf.metadata[m] for m in ("may_change", "both_ends")] for path, leaf in told.items()}
    assert marks["flagship.seats"] == marks["flagship.engine.gears"] == ["resume", True]
    assert marks["depth"] == marks["berths"] == ["never", False]
    assert told["depth"].metadata["because"] == "it is dug"
    assert told["berths"].metadata["because"] == "it is not known to be sound to change"


def test_settings_say_who_must_share_them():
    told = {leaf.path: leaf.metadata for leaf in all_settings(parse({}))}
    both_ends = {path for path, metadata in told.items() if metadata["both_ends"]}
    assert {"train.steps", "outer.codec", "seed", "inner.learning_rate", "model.rope_theta"} <= both_ends
    assert both_ends >= {path for path in told if path.startswith("sync.")}
    assert not both_ends & {"mesh.fsdp", "model.attention", "inner.accumulation", "outer.learning_rate"}
    for free in ("data.data_dir", "data.prefetch", "train.executable", "remote.spares", "eval.every"):
        assert told[free]["may_change"] == "process"
    for decisive in ("inner.learning_rate", "mesh.fsdp", "data.sequence_length", "sync.gamma"):
        assert told[decisive]["may_change"] == "resume"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"model.name": "dens"},
            "config.model.name: is 'dens', but must be one of captioner, dense, moe, vit",
        ),
        ({"model.vocab_size": 256}, "config.model.vocab_size: is 256, but bytes need at least 259"),
        ({"algorithm": "async"}, "config.algorithm: is 'async', but must be one of decoupled, streaming, "),
        (
            {"algorithm": "diloco"},
            "config.algorithm: is diloco, which needs sync.num_fragments 1",
        ),
        ({"algorithm": "streaming"}, "config.algorithm: is streaming, which needs sync.quorum None and"),
        ({"sync.quorum": None, "sync.max_run_ahead": 2}, "config.algorithm: is decoupled, which needs"),
        (
            {"model.attention": "splash", "data.sequence_length": 200},
            "config.data.sequence_length: is 200, but must be a multiple of 128 for splash",
        ),
        (
            {
                "model.attention": "cudnn",
                "model.compute_dtype": "bfloat16",
                "model.head_dim": 32,
                "data.sequence_length": 201,
            },
            "config.data.sequence_length: is 201, but must be a multiple of 2 for cudnn",
        ),
        (
            {"eval.every": None, "eval.devices": 1},
            "config.eval.devices: is 1, but must be 0 but for learners of driver local and an eval.every",
        ),
        ({"sync.quorum": 5}, "config.sync.quorum: is 5, but must be at most num_learners, 4"),
        ({"sync.max_run_ahead": 6}, "config.sync.max_run_ahead: is 6, but must be below interval, 6"),
        ({"sync.max_run_ahead": 1}, "config.sync.max_run_ahead: is bounded, so quorum must be None"),
        ({"sync.gamma": 1.0}, "config.sync.gamma: is 1.0, but must be at least 0.0 and below 1.0"),
        (
            {"driver": "remote", "sync.silence_timeout": 10.0},
            "config.remote.longest_backoff: is 15, but must be below sync.silence_timeout, 10: a learner",
        ),
        (
            {"driver": "remote", "snapshot.every": 12, "snapshot.timeout": 60.0},
            "config.snapshot.timeout: is 60, but must be above sync.silence_timeout, 60: a snapshot leaves",
        ),
        (
            {"train.batch_sizes": (1, 2)},
            "config.train.batch_sizes: has 2 entries, but",
        ),
        ({"outer.codec": "f32,int4"}, "config.outer.codec: has 2 entries, but sync.num_learners is 4"),
        (
            {"driver": "remote", "remote.max_learners": 6, "outer.codec": "f32,f32,f32,int4,int4,int4,f32"},
            "config.outer.codec: has 7 entries, but remote.max_learners is 6",
        ),
        (
            {"train.min_step_seconds": (0.1,)},
            "config.train.min_step_seconds: has 1 entries, but sync.num_learners is 4",
        ),
        (
            {"algorithm": "data_parallel", "train.batch_sizes": (1, 2, 1, 1)},
            "config.train.batch_sizes: differ, but data_parallel reads as many rows of each shard",
        ),
        ({"data.tokenizer": "sentencepiece"}, "config.data.tokenizer_model: is missing, but"),
        ({"sample.prompt": ""}, "config.sample.prompt: is empty, but must have something to continue"),
        (
            {"driver": "remote", "remote.max_learners": 9},
            "config.remote.max_learners: is 9, but must be from 4 to 8",
        ),
        (
            {"driver": "remote", "remote.max_learners": 6, "train.min_step_seconds": (1.0,) * 4},
            "config.train.min_step_seconds: has 4 entries, but remote.max_learners is 6",
        ),
        (
            {"driver": "remote", "remote.min_hosts": 3, "remote.hosts": (4, 4, 4, 4)},
            "config.remote.min_hosts: is 3, but must divide the 4 hosts of each learner",
        ),
        (
            {"driver": "remote", "remote.min_hosts": 1, "mesh.data": 2},
            "config.remote.min_hosts: is 1, which needs an axis of the mesh of -1, such as mesh.data",
        ),
        (
            {"driver": "remote", "remote.min_hosts": 1, "mesh.slice": 2},
            "config.mesh.slice: is 2, but must be 1 with remote.min_hosts",
        ),
        (
            {"driver": "remote", "remote.min_hosts": 1, "train.executable": "step.bin"},
            "config.train.executable: is of one mesh, but must be None with remote.min_hosts",
        ),
        (
            {"driver": "remote", "remote.min_hosts": 1, "recovery.checkpoint_every": 0.0},
            "config.recovery.checkpoint_every: is 0, but must be above 0 with remote.min_hosts",
        ),
        (
            {"driver": "remote", "algorithm": "lone_learner"},
            "config.driver: is remote, but lone_learner is one job",
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_settings_that_contradict_each_other_are_told(changes, told):
    config = dense.get_config()
    config.unlock()
    with config.ignore_type():
        config.update_from_flattened_dict(changes)
    assert refusal(ConfigError, parse, config).startswith(told)


@pytest.mark.parametrize(("width", "fits"), [(32, True), (36, False)])
def test_a_kernel_for_even_lengths_reads_patches_and_tokens(width, fits):
    config = multimodal.get_config()
    config.model.update({"attention": "cudnn", "compute_dtype": "bfloat16"})
    config.model.image_width = width
    if fits:
        parse(config)
    else:
        told = "config.model.attention: is cudnn, but 45 patches and tokens are an odd number"
        assert refusal(ConfigError, parse, config) == told


def test_settings_of_a_loop_are_what_every_process_reads():
    config = loop.get_config()
    config.model.settings.optim = ConfigDict({"lr": 0.5})
    config.model.settings.widths = (1, 2)
    experiment = parse(config)
    assert experiment.model.settings == {"optim": {"lr": 0.5}, "widths": [1, 2]}
    assert parse(json.loads(json.dumps(to_json(experiment)))) == experiment
    config.model.settings.act = len
    with pytest.raises(ConfigError, match=r"^config\.model\.settings: must be values that JSON has: "):
        parse(config)


def test_each_row_of_the_accelerators_comparison_has_whole_steps_of_as_many_tokens():
    for row in accelerator.get_comparison():
        e = with_steps_of_tokens(parse(accelerator.get_config(row["preset"])))
        step = e.sync.num_learners * e.train.batch_size * e.data.sequence_length
        assert e.train.steps * step == accelerator.TOKENS, row["label"]
