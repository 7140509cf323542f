"""What a codec costs in quality: the same virtual run with each, half the tiny preset's length.

  python -m experiments.sweep --sweep=configs/sweeps/codec.py --output=runs/codec

21 runs, about a minute each on 2 CPU cores: three seeds of each. Under the virtual driver the codec is
all that differs: links take no time, so that the same contributions meet in the same rounds. Its outcome:
docs/results/codecs.md.
"""

CODECS = (
    {"outer.codec": "f32"},
    {"outer.codec": "bf16"},
    {"outer.codec": "int8"},
    {"outer.codec": "int4"},
    {"outer.codec": "int4", "outer.error_feedback": True},
    {"outer.codec": "int2"},
    {"outer.codec": "sign"},
)
SEEDS = (0, 1, 2)


def get_sweep() -> list[dict]:
    """Runs of each codec, and of int4 with error feedback."""
    run = {"train.steps": 240, "eval.every": 0, "sample.tokens": 0}
    run |= {"config": "configs/dense.py:tiny,paper", "driver": "virtual"}
    return [{**run, **codec, "seed": seed} for seed in SEEDS for codec in CODECS]
