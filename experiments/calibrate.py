"""Fits the failure model to the paper's table: `python -m experiments.calibrate`.

Prints the fitted values with their 95% confidence intervals, every cell of the table beside the closed forms
and the event engine, and each cell as predicted from those with another number of chips a learner.
"""

from __future__ import annotations

from absl import flags

from experiments.cli import program
from experiments.cli.tables import markdown

_DAYS = flags.DEFINE_float("days", 30.0, "Simulated time of the check by the event engine; 0: no check.")


def main(_) -> int:
    from ddiloco.goodput.failures import FailureModel
    from experiments.studies.goodput import calibration

    if not _DAYS.value >= 0.0:
        raise program.UsageError(f"days: is {_DAYS.value}, but must be at least 0")
    committed = FailureModel()
    model = calibration.calibrate(committed)
    widths = calibration.intervals(committed)
    for name in calibration.FREE:
        value, now = getattr(model, name), getattr(committed, name)
        print(f"{name:22} {value:8.3f} +- {widths[name]:7.3f}   committed {now:g}")
    columns = {"fit": calibration.fits(model)}
    if _DAYS.value:
        columns["engine"] = calibration.checks(committed, _DAYS.value)
    columns["predicted"] = calibration.predictions(committed)
    rows = []
    for cells in zip(*columns.values(), strict=True):
        cell, row = cells[0], [f"{cell.fitted:.1f}" for cell in cells]
        rows.append([cell.system, f"{cell.num_chips:,}", f"{cell.published:.0f}", *row])
    print("\n" + markdown(["system", "chips", "paper", *columns], rows, align=True))
    errors = [
        [name, f"{calibration.rms(cells):.2f}", f"{calibration.largest(cells):.2f}"]
        for name, cells in columns.items()
    ]
    print("\n" + markdown(["points", "rms", "largest"], errors, align=True))
    return 0


if __name__ == "__main__":
    program.run(main)
