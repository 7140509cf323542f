"""The scaling study's runs: loss by parameters, tokens and learners, and the best hyperparameters by both.

  python -m experiments.sweep --sweep=configs/sweeps/scaling.py[:PART][,SCALE] --output=runs/scaling-PART
  python -m experiments.scaling --sweep=runs/scaling-loss,runs/scaling-inner --output=runs/scaling

PART
  loss   sizes x tokens a parameter x learners, and data-parallel, three seeds (default)
  inner  sizes but the largest x learners x inner learning rate, one seed
  batch  the same with the global batch, of at least a row a learner, at an inner rate good at all sizes
  outer  the same with the outer learning rate, beside data-parallel, which has none
SCALE
  cpu    25 to 126 thousand parameters, at most 20 tokens a parameter (default)
  accelerator  1 to 30 million

After "Scaling Laws for DiLoCo" (arXiv 2503.09799), whose models are a hundred times as large and more.
"""

import itertools

from configs import micro, sections

BASELINE = {"algorithm": "data_parallel"}
PARTS = ("loss", "inner", "batch", "outer")
#          layers width mlp: parameters, of which embedding and head are 518 a width
SIZES = {
    "cpu": ((2, 24, 64), (2, 32, 88), (2, 48, 128), (2, 64, 176)),
    "accelerator": ((4, 160, 432), (6, 256, 688), (8, 384, 1024), (10, 512, 1408)),
}
LEARNERS = (1, 2, 4, 8)
ROWS = 8  # of the global batch
LENGTH = 128  # tokens in a row
TOKENS_A_PARAMETER = (5, 10, 20)
INNER_RATES = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
GOOD_RATE = 16e-3  # losses within 5% of the best at each size and M; lower rates favour small batches
GLOBAL_BATCHES = (2, 4, 8, 16, 32)  # rows
OUTER_RATES = (0.35, 0.5, 0.7, 1.0, 1.4)


def get_sweep(argument: str = "loss") -> list[dict]:
    """The points of `PART`, `SCALE` or `PART,SCALE`."""
    part, scale = sections.words(argument, PARTS, tuple(SIZES))
    sizes = SIZES[scale]
    systems = [("data_parallel", 1), *(("decoupled", m) for m in LEARNERS)]
    if part == "loss":
        return [
            _point(size, multiple, algorithm, learners, seed=seed)
            for seed in micro.SEEDS
            for size in sizes
            for multiple in TOKENS_A_PARAMETER
            for algorithm, learners in systems
        ]
    return [
        settings | _point(size, TOKENS_A_PARAMETER[1], algorithm, learners, rows)
        for size, (algorithm, learners) in itertools.product(sizes[:-1], systems)
        for rows, settings in _tried(part, algorithm, learners)
    ]


def _tried(part: str, algorithm: str, learners: int) -> list[tuple[int, dict]]:
    """The rows of the global batch and the other settings that a part tries at each size."""
    if part == "batch":
        return [(rows, {"inner.learning_rate": GOOD_RATE}) for rows in GLOBAL_BATCHES if rows >= learners]
    if part == "inner":
        return [(ROWS, {"inner.learning_rate": rate}) for rate in INNER_RATES]
    if algorithm == "data_parallel":
        return [(ROWS, {})]
    return [(ROWS, {"outer.learning_rate": rate}) for rate in OUTER_RATES]


def parameters(size: tuple[int, int, int]) -> int:
    """The parameters of a size: an embedding, layers of attention and of a gated MLP, norms, a head."""
    layers, width, mlp = size
    attention = 3 * width * width + 2 * (width // 4)  # two key and value heads of four, and their norms
    return 2 * 259 * width + layers * (attention + 3 * width * mlp + 2 * width) + width


def _point(
    size: tuple[int, int, int], multiple: int, algorithm: str, learners: int, rows: int = ROWS, seed: int = 0
) -> dict:
    layers, width, mlp = size
    steps = round(multiple * parameters(size) / (rows * LENGTH))
    return {
        "config": "configs/micro.py:dense",
        "algorithm": algorithm,
        "sync.num_learners": learners,
        "train.batch_size": rows // learners,
        "train.steps": steps,
        "inner.warmup_steps": max(1, steps // 12),
        "model.num_layers": layers,
        "model.model_dim": width,
        "model.head_dim": width // 4,
        "model.mlp_dim": mlp,
        "seed": seed,
    }
