"""The points of configs/tuned.py, and some with one thing changed that they were not tuned for.

  python -m experiments.sweep --sweep=configs/sweeps/tuned.py[:WHAT] --output=runs/tuned-WHAT --jobs=2

WHAT
  interval    short runs in which learners meet every 6 steps (default)
  interleave  short runs with AdamW, every 24; a shard reads 128 documents side by side, not 8
  both        short runs with AdamW, every 6, and 128 documents
  length      long runs: 20 tokens a parameter, also every 6 steps in float32; 20 to 100 minutes each
  adamw       long runs of data-parallel with AdamW: what its point was chosen from

Runs in virtual time at equal tokens, two to five minutes each on a core, with three seeds; but `adamw` has
the split and the seed that choose.
"""

from configs import baselines, micro, tuned

OFTEN, SELDOM = {"sync.interval": tuned.OFTEN["short"]}, {"sync.interval": tuned.PAPERS}
READING = {"data.interleave": 128}
EVERY_6 = {"sync.interval": 6, "outer.codec": "f32", "outer.update_codec": "f32"}
POINTS = {  # presets of configs/tuned.py, and what is changed
    "interval": (("decoupled,adamw,short", OFTEN), ("decoupled,muon,short", OFTEN)),
    "interleave": (("data_parallel,adamw,short", READING), ("decoupled,adamw,short", {**SELDOM, **READING})),
    "both": (("decoupled,adamw,short", {**OFTEN, **READING}),),
    "length": (
        ("data_parallel,adamw,long", {}),
        ("data_parallel,muon,long", {}),
        ("decoupled,muon,long", {}),
        ("decoupled,muon,long", EVERY_6),
    ),
    "adamw": tuple(
        (
            "data_parallel,adamw,long",
            {"train.batch_size": rows, "inner.learning_rate": rate, "train.steps": 31_488 // rows},
        )
        for rows, rate in ((2, 0.003), (2, 0.006), (2, 0.012))
    ),
}


def get_sweep(what: str = "interval") -> list[dict]:
    """Each point with each seed, or with what chooses."""
    if what not in POINTS:
        raise ValueError(f"no sweep {what!r}; there are {', '.join(POINTS)}")
    return [
        {
            "driver": "virtual",
            "virtual.step_variation": baselines.STEP_VARIATION,
            "train.tokens": baselines.budget(tuned.get_config(preset)),
            **changed,
            "config": f"configs/tuned.py:{preset}",
            **data,
        }
        for data in ([micro.CHOOSING] if what == "adamw" else [{"seed": seed} for seed in micro.SEEDS])
        for preset, changed in POINTS[what]
    ]
