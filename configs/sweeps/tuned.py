"""The points of configs/tuned.py with one thing changed, which none of them was tuned for.

  python -m experiments.sweep --sweep=configs/sweeps/tuned.py[:WHAT] --output=runs/tuned-WHAT --jobs=2

WHAT
  interval    learners meet every 6 steps, not every 24 (default)
  interleave  with AdamW; a shard reads 128 documents side by side, not 8
  both        the two together
  length      with Muon; 20 tokens a parameter, not 2.4; 30 to 40 minutes a run

Runs in virtual time at equal tokens, four to five minutes each on a core, with three seeds.
"""

from configs import baselines, dense, tuned

SEEDS = (0, 1, 2)
MEETING = {"sync.interval": tuned.OFTEN}
READING = {"data.interleave": 128}
LENGTH = {"train.tokens": 16_121_856, "eval.every": 480}
POINTS = {  # by preset of configs/tuned.py
    "interval": {"decoupled,adamw": MEETING, "decoupled,muon": MEETING},
    "interleave": {"data_parallel,adamw": READING, "decoupled,adamw": READING},
    "both": {"decoupled,adamw": {**MEETING, **READING}},
    "length": {"data_parallel,muon": LENGTH, "decoupled,muon": LENGTH},
}


def get_sweep(what: str = "interval") -> list[dict]:
    """Each point with each seed."""
    if what not in POINTS:
        raise ValueError(f"no sweep {what!r}; there are {', '.join(POINTS)}")
    run = {
        "driver": "virtual",
        "virtual.step_variation": baselines.STEP_VARIATION,
        "train.tokens": baselines.budget(dense.get_config("tiny")),
    }
    return [
        {**run, **changed, "config": f"configs/tuned.py:{preset}", "seed": seed}
        for seed in SEEDS
        for preset, changed in POINTS[what].items()
    ]
