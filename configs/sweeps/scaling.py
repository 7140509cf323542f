"""The scaling study's runs: loss by parameters, tokens and learners, and the best hyperparameters by both.

  python -m experiments.sweep --sweep=configs/sweeps/scaling.py[:PART][,SCALE] --output=runs/scaling-PART
  python -m experiments.scaling --sweep=runs/scaling-loss,runs/scaling-inner --output=runs/scaling

PART
  loss   sizes x tokens a parameter x learners, and data-parallel; best rates of each, three seeds (default)
  inner  sizes x learners x inner learning rate, at 10 tokens a parameter
  outer  sizes but the largest, with the outer learning rate, at the best inner one
  batch  sizes but the largest x learners x global batch of at least a row a learner, at one inner rate
  muon   sizes x learners, and data-parallel, at 20 tokens a parameter with Muon inside, at the rates that
         configs/methods.py found best at the largest size; three seeds
SCALE
  cpu    25 to 126 thousand parameters, at most 20 tokens a parameter (default)
  accelerator  1 to 30 million, at the rates of the largest of these

What chooses a rate has a seed of its own, sees nine tenths of the training split, and is scored on the last.

After "Scaling Laws for DiLoCo" (arXiv 2503.09799), whose models are a hundred times as large and more: at
35M parameters its gaps are about 0, 1, 2 and 4% for M = 1, 2, 4 and 8.
"""

import itertools

from configs import methods, micro, sections

BASELINE = {"algorithm": "data_parallel"}
PARTS = ("loss", "inner", "outer", "batch", "muon")
#          layers width mlp: parameters, of which embedding and head are 518 a width
SIZES = {
    "cpu": ((2, 24, 64), (2, 32, 88), (2, 48, 128), (2, 64, 176)),
    "accelerator": ((4, 160, 432), (6, 256, 688), (8, 384, 1024), (10, 512, 1408)),
}
LEARNERS = (1, 2, 4, 8)
SYSTEMS = (("data_parallel", 1), *(("decoupled", m) for m in LEARNERS))
ROWS = 8  # of the global batch
LENGTH = 128  # tokens in a row
DOCUMENTS = 64  # read side by side, by all learners together
TOKENS_A_PARAMETER = (5, 10, 20)
INNER_RATES = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3, 128e-3)
OUTER_RATES = (0.35, 0.5, 0.7, 1.0, 1.4)
GLOBAL_BATCHES = (2, 4, 8, 16, 32)  # rows
GOOD_RATE = 16e-3  # losses within 5% of the best at each size and M; lower rates favour small batches
MUON = {
    "inner.optimizer": "muon",
    "inner.learning_rate": 0.024,
    "inner.weight_decay": 0.1,
    "inner.final_fraction": 0.0,
    "eval.num_batches": methods.SETTINGS["eval.num_batches"],
}
# By width: of data-parallel the inner rate; of M = 1, 2, 4, 8 the inner and the outer one.
BEST = {
    24: (0.032, (0.032, 0.5), (0.032, 0.7), (0.032, 0.7), (0.016, 0.7)),
    32: (0.032, (0.032, 1.0), (0.032, 0.7), (0.032, 0.7), (0.016, 0.7)),
    48: (0.016, (0.016, 0.7), (0.016, 0.7), (0.016, 0.7), (0.008, 0.7)),
    64: (0.016, (0.008, 0.7), (0.008, 0.7), (0.008, 0.7), (0.008, 0.7)),  # outer rates of the size below
}


def get_sweep(argument: str = "loss") -> list[dict]:
    """The points of `PART`, `SCALE` or `PART,SCALE`."""
    part, scale = sections.words(argument, PARTS, tuple(SIZES))
    sizes = SIZES[scale]
    if part == "loss":
        return [
            _point(size, multiple, system, seed=seed) | best(size, system)
            for seed in micro.SEEDS
            for size in sizes
            for multiple in TOKENS_A_PARAMETER
            for system in SYSTEMS
        ]
    if part == "muon":
        return [
            _point(size, TOKENS_A_PARAMETER[-1], system, seed=seed) | _muon(system)
            for system in SYSTEMS
            for seed in micro.SEEDS
            for size in sizes
        ]
    return [
        {**_point(size, TOKENS_A_PARAMETER[1], system, rows), **micro.CHOOSING, **settings}
        for size, system in itertools.product(sizes if part == "inner" else sizes[:-1], SYSTEMS)
        for rows, settings in _tried(part, size, system)
    ]


def best(size: tuple[int, int, int], system: tuple[str, int]) -> dict:
    """The best rates at this size, or at the largest that was tried."""
    found = BEST.get(size[1], BEST[max(BEST)])[SYSTEMS.index(system)]
    inner, outer = found if isinstance(found, tuple) else (found, None)
    return {"inner.learning_rate": inner, **({"outer.learning_rate": outer} if outer else {})}


def _muon(system: tuple[str, int]) -> dict:
    algorithm, learners = system
    outer = methods.NESTEROV if algorithm == "decoupled" else {}
    return {**MUON, **outer, "data.interleave": methods.DOCUMENTS // learners}


def _tried(part: str, size: tuple[int, int, int], system: tuple[str, int]) -> list[tuple[int, dict]]:
    """The rows of the global batch and the other settings that a part tries at each size."""
    if part == "batch":
        rows = [rows for rows in GLOBAL_BATCHES if rows >= system[1]]
        return [(rows, {"inner.learning_rate": GOOD_RATE}) for rows in rows]
    if part == "inner":
        return [(ROWS, {"inner.learning_rate": rate}) for rate in INNER_RATES]
    found = best(size, system)
    rates = OUTER_RATES if "outer.learning_rate" in found else (None,)
    return [(ROWS, {**found, "outer.learning_rate": rate} if rate else found) for rate in rates]


def parameters(size: tuple[int, int, int]) -> int:
    """The parameters of a size: an embedding, layers of attention and of a gated MLP, norms, a head."""
    layers, width, mlp = size
    attention = 3 * width * width + 2 * (width // 4)  # two key and value heads of four, and their norms
    return 2 * 259 * width + layers * (attention + 3 * width * mlp + 2 * width) + width


def _point(
    size: tuple[int, int, int], multiple: int, system: tuple[str, int], rows: int = ROWS, seed: int = 0
) -> dict:
    (layers, width, mlp), (algorithm, learners) = size, system
    steps = round(multiple * parameters(size) / (rows * LENGTH))
    return {
        "config": "configs/micro.py:dense",
        "algorithm": algorithm,
        "sync.num_learners": learners,
        "train.batch_size": rows // learners,
        "data.interleave": DOCUMENTS // learners,  # a shard's: all are mixed alike
        "train.steps": steps,
        "inner.warmup_steps": max(1, steps // 12),
        "model.num_layers": layers,
        "model.model_dim": width,
        "model.head_dim": width // 4,
        "model.mlp_dim": mlp,
        "seed": seed,
    }
