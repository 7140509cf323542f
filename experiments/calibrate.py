"""Fits the failure model to the paper's table: `python -m experiments.calibrate`.

Prints the fitted values with their 95% confidence intervals, every cell of the table beside the closed forms
and the event engine, and each cell as predicted from those with another number of chips a learner.
"""

from __future__ import annotations

from absl import flags

from experiments.front import cli

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
    print(f"\n{'system':22} {'chips':>9} {'paper':>6} {'fit':>6} {'engine':>7} {'predicted':>10}")
    for cell in fitted:
        key = cell.system, cell.num_chips
        simulated = f"{engine[key].fitted:7.1f}" if engine else f"{'-':>7}"
        figures = f"{cell.published:6.0f} {cell.fitted:6.1f} {simulated} {predicted[key].fitted:10.1f}"
        print(f"{cell.system:22} {cell.num_chips:9,} {figures}")
    print(f"\n{'points':22} {'rms':>9} {'largest':>8}")
    for name, cells in (("fit", fitted), ("engine", engine.values()), ("predicted", predicted.values())):
        if cells:
            print(f"{name:22} {calibration.rms(cells):9.2f} {calibration.largest(cells):8.2f}")
    return 0


if __name__ == "__main__":
    cli.run(main)
