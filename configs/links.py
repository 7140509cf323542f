"""Fleets by what their links carry: whom a merge waits for, by the paper's rule and by the presets'.

  python -m experiments.compare --config=configs/links.py[:FLEET,FLEET...] --output=runs/links --seeds=0,1
  python -m experiments.compare --config=configs/links.py:trained[,FLEET...] --output=runs/links-trained

FLEET   words with dashes between; the last is what a link carries, in what a learner sends with float32 at
        this interval ("need"): 1.0, M32-0.5, latencies-0.8. Those before it:
  M32         so many learners; without it eight
  half, thin  the links of half of the learners, or of one, are of that; the others' are of 20 times the need
  latencies   0 to 3 s from learner to syncer, evenly spread; far: one is 10 s away; farther: 24 s, a
              round trip of two intervals
  jitter      messages come later by 2 s on average
  uneven      the time of a step varies by 30%, else by 10%; slow: one learner takes three seconds a step
  merges      a merge takes 1.5 s
  failures    1.2 million chips fail and return (configs/chaos.py); a step takes 5 s, else 1 s
`trained` trains the micro dense model on as many tokens each, a minute and a half a run on one core; without
it nothing is trained, and a run of eight learners takes seconds. With no name all of FLEETS, or of TRAINED. A
run that has finished is not run again: where the code has changed, name another --output.
Outcome: docs/results/merged_share.md.
"""

import re
from typing import Any

from ml_collections import ConfigDict

from configs import baselines, chaos, dense, micro, sections
from ddiloco.config import ConfigError

FLEETS = (
    *("20", "1.5", "1.2", "1.0", "0.9", "0.7", "0.5", "0.3"),
    *("thin-0.5", "thin-0.25", "half-1.0", "half-0.5"),
    *("latencies-1.0", "latencies-0.8", "jitter-20", "far-20", "farther-20"),
    *("M2-1.0", "M32-1.0", "M32-0.5", "M64-1.0", "M64-0.5"),
    *("uneven-20", "slow-20", "slow-1.0", "merges-20", "merges-1.0", "failures-1.0"),
)
TRAINED = ("20", "1.0", "0.5", "thin-0.25", "farther-20")
RULES = ("paper", "expected")  # of sync.grace
WIDE = 20.0  # times the need: a fragment travels in a tenth of a step
COLUMNS = (  # of the table
    *("eval_loss", "gap", "tokens_total", "merged_share", "worst_share", "real_steps"),
    *("age", "late_age", "rounds_skipped", "round_seconds", "largest_gap"),
)


def get_config(preset: str = "counted") -> ConfigDict:
    """The settings of all fleets: `counted`, the tiny preset without arrays, or `trained`, the micro one."""
    (preset,) = sections.words(preset, ("counted", "trained"))
    config = dense.get_config("tiny,paper") if preset == "counted" else micro.get_config("dense")
    config.driver = "virtual"
    config.sync.num_learners = 8
    config.virtual.step_variation = 0.1
    if preset == "counted":
        config.virtual.arrays = False
    else:
        config.train.batch_size //= 2  # of eight learners: as many rows in all as of four
        config.train.steps = 264  # eleven turns of each fragment
        config.train.tokens = baselines.budget(config)
    return config


def get_comparison(fleets: str = "counted") -> list[dict[str, Any]]:
    """Each fleet with both rules."""
    preset, *names = fleets.split(",")
    if preset not in ("counted", "trained"):
        preset, names = "counted", [preset, *names]
    rows = []
    for name in names or (FLEETS if preset == "counted" else TRAINED):
        settings = fleet(name, preset)
        for rule in RULES:
            row = {"label": f"{name}, {rule}", "preset": preset, "sync.grace": rule, **settings}
            rows.append(row if rule == RULES[0] else {**row, "against": f"{name}, {RULES[0]}"})
    return rows


def _sent(config: ConfigDict) -> float:
    """Bytes that a learner sends a step, on average: each parameter once in an interval, in float32."""
    from ddiloco.settings.experiment import parse  # only who compares waits for JAX
    from ddiloco.training.parameters import num_parameters

    return 4 * num_parameters(parse(config).model) / config.sync.interval


def fleet(name: str, preset: str = "counted") -> dict[str, Any]:
    """The settings of a fleet, with links for the bytes of this preset.

    Raises:
      ConfigError: there is no such fleet.
    """
    found = re.fullmatch(r"(?:M([1-9]\d*)-)?((?:[a-z]+-)*)(\d+(?:\.\d+)?)", name)
    if found is None:
        raise ConfigError(f"no fleet {name!r}; must end with a share of the need, as M32-thin-0.5 does")
    learners, words, share = int(found[1] or 8), found[2].split("-")[:-1], float(found[3])
    others = learners - 1
    known: dict[str, dict[str, Any]] = {
        "half": {},  # this and the next: below
        "thin": {},
        "latencies": {"virtual.latency": tuple(3.0 * m / max(1, others) for m in range(learners))},
        "far": {"virtual.latency": (*(0.0,) * others, 10.0)},
        "farther": {"virtual.latency": (*(0.0,) * others, 24.0)},
        "jitter": {"virtual.jitter": (2.0,)},
        "uneven": {"virtual.step_variation": 0.3},
        "slow": {"virtual.step_seconds": (*(1.0,) * others, 3.0)},
        "merges": {"virtual.merge_seconds": 1.5},
        "failures": {
            "virtual.availability": "failures",
            "virtual.num_chips": 1_200_000,
            "virtual.step_seconds": (chaos.STEP_SECONDS,),
        },
    }
    sent = _sent(get_config(preset))
    settings: dict[str, Any] = {"sync.num_learners": learners}
    for word in words:
        if word not in known:
            raise ConfigError(f"no fleet {name!r}: {word!r} is none of {', '.join(known)}")
        settings |= known[word]
    need = sent / min(settings.get("virtual.step_seconds", (1.0,)))
    narrow = 1 if "thin" in words else learners // 2 if "half" in words else learners
    shares = (share,) if narrow == learners else (share,) * narrow + (WIDE,) * (learners - narrow)
    return settings | {"virtual.bandwidth": tuple(float(round(share * need)) for share in shares)}
