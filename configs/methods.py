"""Algorithms, outer optimizers and numbers of learners beside each other, each with its own best settings.

  python -m experiments.tune --config=configs/methods.py[:WHAT] --output=runs/tune-WHAT

WHAT
  methods   three algorithms, and four other outer steps of the last; four learners of 2 rows a step (default)
  learners  Decoupled DiLoCo of 1, 2, 4 and 8; the batch is tuned, too, and momentum is not
  tiny      three algorithms, and 1, 2 and 8 learners, at the tiny preset of configs/dense.py: 480 steps of 32
            rows of all learners together; the inner rate alone is tuned
  short     Decoupled DiLoCo at 2.4 tokens a parameter; weight decay is tuned, too
  momentum  the same with quasi-hyperbolic momentum; inner rate and share of the present gradient are tuned
            at the decay that `short` found
  intervals Decoupled DiLoCo that meets every 24 steps in float32 and every 6 in four bits; the weight decay
            alone is tuned, at the rates of `methods`

And data-parallel. All but `tiny` have the micro dense model (configs/micro.py), at 20 tokens a parameter but
for `short` and `momentum`. Muon inside; learners meet every 24 steps but in `intervals`. Outcome:
docs/results/methods.md, and of `intervals` quality.md.

The rows of `tiny` at 20 tokens a parameter, not tuned there; 30 to 90 minutes a run on a core:

  python -m experiments.compare --config=configs/methods.py:long --output=runs/compare-methods-long
"""

from typing import Any

from ml_collections import ConfigDict

from configs import baselines, dense, exchange, micro, sections, tuned

SETTINGS = {
    "inner.optimizer": "muon",
    "inner.final_fraction": 0.0,
    "train.batch_size": 2,  # rows
    "train.tokens": 2_513_920,  # 20 a parameter
    "data.interleave": 128,
    "eval.num_batches": 64,
    "virtual.step_variation": baselines.STEP_VARIATION,
}
SHORT = {"train.tokens": 302_080, "eval.num_batches": 32}
TINY = {**baselines.SCORED_AT_THE_END, "sample.tokens": 0}
DOCUMENTS = 512  # side by side, of all learners together: SETTINGS with four
NESTEROV = {"outer.learning_rate": 0.5, "outer.momentum": 0.3}
METHODS = {  # algorithm, what else the method has, and where the climb on each of its own axes begins
    "DiLoCo": ("diloco", {}, NESTEROV),
    "Streaming DiLoCo": ("streaming", {"outer.optimizer": "nesterov"}, NESTEROV),
    "decoupled": ("decoupled", {}, NESTEROV),
    "decoupled, direct": ("decoupled", {"outer.optimizer": "direct"}, {}),
    "decoupled, delayed Nesterov": ("decoupled", {"outer.optimizer": "delayed_nesterov"}, NESTEROV),
    "decoupled, HeLoCo": ("decoupled", {"outer.optimizer": "heloco"}, NESTEROV),
}


def get_config(preset: str = "decoupled") -> ConfigDict:
    """The settings of configs/micro.py, of this algorithm, or with `tiny,ALGORITHM` of configs/dense.py."""
    size, algorithm = sections.words(preset, ("micro", "tiny"), dense.ALGORITHMS)
    tiny = size == "tiny"
    config = dense.get_config(f"{preset},paper") if tiny else micro.get_config(algorithm)
    config.update_from_flattened_dict(TINY if tiny else SETTINGS)
    return config


def get_tuning(what: str = "methods") -> dict[str, Any]:
    """The rows of `WHAT`, and data-parallel."""
    rows = {"methods": _methods, "learners": _learners, "tiny": _tiny, "short": _short}
    rows |= {"momentum": _momentum, "intervals": _intervals}
    (what,) = sections.words(what, tuple(rows))
    return {
        "rows": rows[what](),
        "grid": {
            "inner.learning_rate": (0.012, 0.024) if what == "tiny" else (0.006, 0.012, 0.024, 0.048),
            # The default is 0.1; 0.025 is that over M=4
            "inner.weight_decay": (0.1, 0.4) if what == "intervals" else (0.025, 0.1, 0.4, 1.6),
            "inner.gradient_share": (0.05, 0.1, 0.2, 0.4),
            "train.batch_size": (1, 2, 4, 8, 16),
            "outer.learning_rate": (0.35, 0.5, 0.7, 1.0, 1.4),
            "outer.momentum": (0.0, 0.3, 0.6, 0.8),
        },
        "budget": 12,
        "choosing": baselines.CHOOSING,
    }


def get_comparison(what: str = "long") -> list[dict[str, Any]]:
    """The rows of `tiny` at 20 tokens a parameter, data-parallel with its batch of configs/tuned.py."""
    sections.words(what, ("long",))
    point = tuned.POINTS["data_parallel", "muon", "long"]
    long = {
        "train.tokens": baselines.budget(tuned.get_config("data_parallel,muon,long")),
        "inner.learning_rate": point.rate,
        "inner.final_fraction": 0.0,
        "eval.every": 492,
    }
    data_parallel, *others = ({k: v for k, v in row.items() if k != "axes"} | long for row in _tiny())
    scored = tuned.STEPS["long"] // point.rows  # as often by tokens
    return [{**data_parallel, "train.batch_size": point.rows, "eval.every": scored}, *others]


def _methods() -> list[dict[str, Any]]:
    rows = [_row("data-parallel", "data_parallel", {}, {})]
    return rows + [_row(label, *method) for label, method in METHODS.items()]


def _learners() -> list[dict[str, Any]]:
    """All begin with as many rows a step, and read as many documents side by side, of all together."""
    rows = [_row("data-parallel", "data_parallel", {}, {"train.batch_size": 2})]
    for learners in (1, 2, 4, 8):
        has = {"sync.num_learners": learners, "data.interleave": DOCUMENTS // learners}
        has["outer.momentum"] = 0.3
        begin = {"train.batch_size": 8 // learners, "outer.learning_rate": 0.5}
        rows.append(_row(f"decoupled, M={learners}", "decoupled", has, begin))
    return rows


def _short() -> list[dict[str, Any]]:
    decay = {"inner.weight_decay": 0.1}
    rows = [("data-parallel", "data_parallel", decay), ("decoupled", "decoupled", {**decay, **NESTEROV})]
    return [_row(label, preset, SHORT, begin) for label, preset, begin in rows]


def _momentum() -> list[dict[str, Any]]:
    has, begin = {**SHORT, "inner.b1": 0.95, "inner.weight_decay": 0.4}, {"inner.gradient_share": 0.2}
    rows = [("data-parallel", "data_parallel", {}), ("decoupled", "decoupled", NESTEROV)]
    return [_row(label, preset, {**has, **outer}, begin) for label, preset, outer in rows]


def _intervals() -> list[dict[str, Any]]:
    rows = [_row("data-parallel", "data_parallel", {}, {})]
    for label in ("H=24, float32", "H=6, int4"):
        rows.append(_row(label, "decoupled", {**exchange.CHOICES[label], **NESTEROV}, {}))
    return [{**row, "inner.weight_decay": 0.1, "axes": ["inner.weight_decay"]} for row in rows]


def _tiny() -> list[dict[str, Any]]:
    outer = {"outer.learning_rate": 0.7, "outer.momentum": 0.3}
    rows = [_row("data-parallel", "tiny,data_parallel", {}, {})]
    for label, algorithm in (("DiLoCo", "diloco"), ("Streaming DiLoCo", "streaming")):
        rows.append(_row(label, f"tiny,{algorithm}", {"outer.optimizer": "nesterov", **outer}, {}))
    for learners in (1, 2, 4, 8):
        has = {"sync.num_learners": learners, "train.batch_size": 32 // learners, **outer}
        has["data.interleave"] = DOCUMENTS // learners
        rows.append(_row(f"decoupled, M={learners}", "tiny,decoupled", has, {}))
    return [{**row, "inner.learning_rate": 0.012} for row in rows]


def _row(label: str, preset: str, has: dict[str, Any], begin: dict[str, float]) -> dict[str, Any]:
    row = {"label": label, "preset": preset, "inner.learning_rate": 0.024, **has, **begin}
    row["axes"] = ["inner.learning_rate", *begin]
    return row if label == "data-parallel" else {**row, "against": "data-parallel"}
