"""What it costs in quality that the syncer sends differences: each codec at two horizons with three seeds.

  python -m experiments.sweep --sweep=configs/sweeps/update_codec.py --output=runs/update_codec

18 runs, two to four minutes each on 2 CPU cores. Its outcome: docs/results/codecs.md.
"""


def get_sweep() -> list[dict]:
    """f32, int8 and int4 downwards; learners send what they send in f32."""
    run = {"config": "configs/dense.py:tiny,paper", "driver": "virtual", "eval.every": 0, "sample.tokens": 0}
    return [
        {**run, "outer.update_codec": codec, "train.steps": steps, "seed": seed}
        for steps in (240, 480)
        for seed in (0, 1, 2)
        for codec in ("f32", "int8", "int4")
    ]
