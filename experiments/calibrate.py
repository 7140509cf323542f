"""Fits the failure model to the paper's table: `python -m experiments.calibrate`.

Prints the fitted values with their 95% confidence intervals, every cell of the table beside the closed forms
and the event engine, and each cell as predicted from those with another number of chips a learner.
"""

from __future__ import annotations

from absl import flags

from experiments.front import cli
from experiments.front.tables import markdown

_DAYS = flags.DEFINE_float("days", 30.0, "Simulated time of the check by the event engine; 0: no check.")


def main(_) -> int:
    from ddiloco.goodput.failures import FailureModel
    from experiments.studies.goodput import calibration

    if not _DAYS.value >= 0.0:
        raise cli.UsageError(f"days: is {_DAYS.value}, but must be at least 0")
    committed = FailureModel()
    model = calibration.calibrate(committed)
    widths = calibration.intervals(committed)
    for name in calibration.FREE:
        value, now = getattr(model, name), getattr(committed, name)
        print(f"{name:22} {value:8.3f} +- {widths[name]:7.3f}   committed {now:g}")
    fitted, engine = calibration.fits(model), {}
    if _DAYS.value:
        engine = {(cell.system, cell.num_chips): cell for cell in calibration.checks(committed, _DAYS.value)}
    predicted = {(cell.system, cell.num_chips): cell for cell in calibration.predictions(committed)}
    rows = []
    for cell in fitted:
        key = cell.system, cell.num_chips
        simulated = f"{engine[key].fitted:.1f}" if engine else "-"
        told = [f"{cell.published:.0f}", f"{cell.fitted:.1f}", simulated, f"{predicted[key].fitted:.1f}"]
        rows.append([cell.system, f"{cell.num_chips:,}", *told])
    names = ["system", "chips", "paper", "fit", "engine", "predicted"]
    print(f"\n{markdown(names, rows, align=True)}")
    points = {"fit": fitted, "engine": engine.values(), "predicted": predicted.values()}
    errors = [
        [name, f"{calibration.rms(cells):.2f}", f"{calibration.largest(cells):.2f}"]
        for name, cells in points.items()
        if cells
    ]
    table = markdown(["points", "rms", "largest"], errors, align=True)
    print(f"\n{table}")
    return 0


if __name__ == "__main__":
    cli.run(main)
