"""What may change between a snapshot and its resumption: every setting is decided, each refusal is a line."""

import dataclasses
import importlib
import itertools

import jax
import pytest

from ddiloco.config import ConfigError, leaves
from ddiloco.settings.experiment import all_settings, parse, to_json
from ddiloco.storage.snapshots.resuming import check_resumable, why_fixed
from ddiloco.training.inner_optimizer import InnerConfig, make_inner_optimizer


def settings(config="dense", preset="tiny", **changes):
    """A preset with some settings changed, by dotted path."""
    made = importlib.import_module(f"configs.{config}").get_config(preset)
    with made.unlocked():
        made.update_from_flattened_dict({path.replace("__", "."): value for path, value in changes.items()})
    return parse(made)


@dataclasses.dataclass
class Unmarked:
    new: int = 0


UNKNOWN = next(leaves(Unmarked()))


@pytest.mark.parametrize("config", ["dense", "moe", "vit", "multimodal"])
def test_every_setting_says_whether_it_may_change(config):
    for leaf in all_settings(settings(config)):
        reason = leaf.metadata["because"] if leaf.metadata["may_change"] == "never" else None
        assert reason != UNKNOWN.metadata["because"], leaf.path


ALLOWED = [
    {"sync__num_learners": 7},
    {"sync__num_learners": 2, "sync__quorum": 2},
    {"mesh__data": 1, "mesh__fsdp": 2},
    {"outer__codec": "int4", "outer__error_feedback": True},
    {"outer__learning_rate": 0.1, "outer__momentum": 0.0, "outer__merge": "direct"},
    {"inner__learning_rate": 1.0, "inner__accumulation": 2, "inner__clip_norm": None},
    {"train__batch_size": 3, "train__steps": 10_000, "train__steps_in_flight": 1},
    {
        "sync__gamma": 0.1,
        "sync__max_grace": 3.0,
        "sync__overlap": 1,
        "sync__mixing": 0.5,
        "sync__rebase": False,
        "sync__interval": 6,
    },
    {"model__remat": "full", "model__logits_chunk": 64, "model__attention": "splash"},
    {"driver": "remote"},
    {"virtual__loss": (0.5,)},
    {"algorithm": "streaming", "sync__quorum": None, "sync__max_run_ahead": 2},
    {"eval__every": 1, "log__every": 1, "tape__enabled": False, "snapshot__every": 5, "resume": True},
    {"data__sequence_length": 32, "data__prefetch": 3, "data__data_dir": "elsewhere", "sample__tokens": 0},
]


@pytest.mark.parametrize("changes", ALLOWED, ids=lambda changes: ",".join(changes))
def test_what_is_sound_may_change(changes):
    check_resumable(settings(), settings(**changes))


REFUSED = [
    ("model.num_layers", 9),
    ("model.rope_theta", 5.0),
    ("seed", 3),
    ("data.name", "c4/en"),
    ("data.train_split", "train[:10%]"),
    ("data.shuffle", False),
    ("data.interleave", 1),
    ("sync.num_fragments", 3),
    ("outer.fragmentation", "layer"),
    ("outer.optimizer", "adam"),
    ("algorithm", "data_parallel"),
]


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=lambda told: str(told))
def test_what_is_not_sound_is_refused_in_a_line_with_what_it_was_and_is(path, value):
    then = settings()
    was = to_json(then)
    for name in path.split("."):
        was = was[name]
    with pytest.raises(ConfigError) as error:
        check_resumable(then, settings(**{path.replace(".", "__"): value}))
    told = str(error.value)
    assert told.startswith(f"config.{path}: is {value!r}, but must be {was!r} to resume")
    assert "\n" not in told


def test_another_kind_of_model_is_told_by_its_name():
    with pytest.raises(ConfigError, match=r"^config.model.name: is 'vit', but must be 'dense'"):
        check_resumable(settings(), settings("vit"))


def test_augmentation_of_images_must_stay():
    with pytest.raises(ConfigError, match=r"^config.data.flip"):
        check_resumable(settings("vit"), settings("vit", data__flip=True))


def test_the_last_step_must_not_lie_before_the_snapshot():
    check_resumable(settings(), settings(train__steps=24), step=24)
    with pytest.raises(ConfigError, match=r"^config.train.steps: is 23, but must be at least 24"):
        check_resumable(settings(), settings(train__steps=23), step=24)


def test_a_baseline_may_have_other_learners_and_a_lone_learner_its_share_alone():
    then = settings(preset="tiny,data_parallel")
    check_resumable(then, settings(preset="tiny,data_parallel", sync__num_learners=3))
    then = settings(preset="tiny,lone_learner")
    with pytest.raises(ConfigError, match=r"^config.sync.num_learners: .* share of the data"):
        check_resumable(then, settings(preset="tiny,lone_learner", sync__num_learners=3))


def test_a_loop_has_as_many_learners_as_before():
    then = settings("loop", "decoupled")
    with pytest.raises(ConfigError, match=r"^config.sync.num_learners: is 3, but must be 4 .* batches"):
        check_resumable(then, settings("loop", "decoupled", sync__num_learners=3))


def test_a_setting_that_does_not_say_is_refused():
    assert why_fixed(UNKNOWN, settings(), settings()) is not None


def test_the_inner_state_is_of_the_same_arrays_whatever_the_inner_settings():
    params = {
        "embed/w": jax.ShapeDtypeStruct((4, 2), "float32"),
        "layer/norm": jax.ShapeDtypeStruct((2,), "float32"),
    }

    def state(**changes):
        optimizer = make_inner_optimizer(InnerConfig(**changes), {})
        return jax.tree.leaves(jax.eval_shape(optimizer.init, params))

    for clip_norm, weight_decay, accumulation, b1 in itertools.product(
        (None, 1.0), (0.0, 0.1), (1, 2), (0.0, 0.9)
    ):
        assert state() == state(
            clip_norm=clip_norm,
            weight_decay=weight_decay,
            accumulation=accumulation,
            b1=b1,
        )
