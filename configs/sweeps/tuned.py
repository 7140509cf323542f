"""Tuned points of the tiny dense model, and some with one thing changed that they were not tuned for.

  python -m experiments.sweep --sweep=configs/sweeps/tuned.py[:WHAT] --output=runs/tuned-WHAT --jobs=2

WHAT
  interval    short runs in which learners meet every 6 steps (default)
  interleave  short runs with AdamW, every 24; a shard reads 128 documents side by side, not 8
  both        short runs with AdamW, every 6, and 128 documents
  length      long runs of configs/tuned.py; also at another point of data-parallel and two of decoupled, and
              at one of them every 6 steps in float32; 20 to 100 minutes each
  adamw       long runs of data-parallel with AdamW: what its point was chosen from
  muon        long runs of both with Muon, likewise, with three seeds

The short runs have the points that were found with 8 documents side by side, which docs/results/quality.md
has under that heading; configs/tuned.py has those of 128 a shard. All in virtual time at equal tokens, with
three seeds, two to five minutes each on a core where nothing else is said; but `adamw` and `muon` have the
split and the seed that choose.
"""

from typing import Any

from configs import baselines, dense, micro, sections, tuned

SHORT = {
    "config": "configs/dense.py:tiny,decoupled,paper",
    "train.tokens": baselines.budget(dense.get_config("tiny")),
    "outer.learning_rate": 0.5,
    "data.interleave": 8,
}
ADAMW = {**SHORT, "inner.optimizer": "adamw", "inner.learning_rate": 0.006, "train.batch_size": 2}
MUON = {**SHORT, "inner.optimizer": "muon", "inner.learning_rate": 0.012, "train.batch_size": 4}
ALONE = {"config": "configs/dense.py:tiny,data_parallel", "inner.learning_rate": 0.003, "train.batch_size": 1}
EVERY_6, READING = {"sync.interval": 6}, {"data.interleave": 128}


def _long(preset: str) -> dict[str, Any]:
    preset = f"{preset},long"
    tokens = baselines.budget(tuned.get_config(preset))
    return {"config": f"configs/tuned.py:{preset}", "train.tokens": tokens}


def _point(rows: int, rate: float, outer_rate: float | None = None) -> dict[str, Any]:
    """A long run with Muon; `outer_rate`: None for data-parallel."""
    preset, outer = (
        ("data_parallel", {}) if outer_rate is None else ("decoupled", {"outer.learning_rate": outer_rate})
    )
    return {**_long(f"{preset},muon"), "train.batch_size": rows, "inner.learning_rate": rate, **outer}


POINTS = {
    "interval": ({**ADAMW, **EVERY_6}, {**MUON, **EVERY_6}),
    "interleave": ({**ADAMW, **ALONE, **READING}, {**ADAMW, **READING}),
    "both": ({**ADAMW, **EVERY_6, **READING},),
    "length": (
        _long("data_parallel,adamw"),
        _long("data_parallel,muon"),
        _long("decoupled,muon"),
        _point(2, 0.012),
        _point(4, 0.012, 0.5),
        _point(4, 0.024, 0.35),
        {**_point(4, 0.012, 0.5), **EVERY_6, "outer.codec": "f32", "outer.update_codec": "f32"},
    ),
    "adamw": tuple(
        {**_long("data_parallel,adamw"), "train.batch_size": rows, "inner.learning_rate": rate}
        for rows, rate in ((2, 0.003), (2, 0.006), (2, 0.012), (4, 0.006), (4, 0.012))
    ),
    "muon": (
        _point(4, 0.024, 0.35),
        _point(2, 0.012),
        _point(2, 0.006),
        _point(4, 0.012, 0.5),
        _point(8, 0.024, 0.35),
        _point(4, 0.012),
        _point(4, 0.024),  # run once the others had been decided between
    ),
}
CHOOSING_SEEDS = {"adamw": (100,), "muon": (100, 101, 102)}


def get_sweep(what: str = "interval") -> list[dict[str, Any]]:
    """Each point with each seed, or with what chooses."""
    (what,) = sections.words(what, tuple(POINTS))
    virtual = {"driver": "virtual", "virtual.step_variation": baselines.STEP_VARIATION}
    seeds = [{**micro.CHOOSING, "seed": seed} for seed in CHOOSING_SEEDS.get(what, ())]
    seeds = seeds or [{"seed": seed} for seed in micro.SEEDS]
    return [{**virtual, **point, **data} for data in seeds for point in POINTS[what]]
