"""Settings that a run makes no use of: of another driver, outer optimizer or merge rule."""

from __future__ import annotations

from ddiloco.settings.experiment import Experiment

OF_DRIVERS = {"remote": "remote", "virtual": "virtual", "eval.devices": "local"}
"""By setting or group, the driver whose runs alone use it."""


def why_idle(experiment: Experiment, path: str) -> str | None:
    """Because of which other setting the run does not use the one of this path; None: it does."""
    group, _, name = path.partition(".")
    driver = OF_DRIVERS.get(path) or OF_DRIVERS.get(group)
    if driver not in (None, experiment.driver):
        return f"driver is {experiment.driver}"
    return experiment.outer.idle.get(name) if group == "outer" else None
