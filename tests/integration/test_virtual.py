"""Virtual time through the program: what a dead fleet ends with, how sweeps go."""

import json

from tests.refusals import assert_refused

VIRTUAL = (
    "--config.driver=virtual",
    "--config.virtual.arrays=False",
    "--config.virtual.step_seconds=(1.0, 1.5)",
    "--config.train.min_step_seconds=()",
)


def test_a_sweep_without_arrays_has_a_table_though_no_loss_and_runs_again_only_what_changed(
    programs, tmp_path
):
    def sweep():
        grid = "driver=virtual;virtual.arrays=False;train.steps=12,24"
        done = programs.run("sweep", f"--sweep={grid}", f"--output={tmp_path}")
        assert done.returncode == 0, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("[")]

    names = [f"driver=virtual,virtual.arrays=False,train.steps={steps}" for steps in (12, 24)]
    assert sweep() == [f"[1/2] {names[0]}", f"[2/2] {names[1]}"]
    path = tmp_path / names[1] / "config.json"
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 7'))
    assert sweep() == [f"[2/2] {names[1]}, again: seed was 7, but is 0 now"]
    rows = json.loads((tmp_path / "sweep.json").read_text())
    figures = [(row["train.steps"], row["eval_loss"], row["goodput"]) for row in rows]
    assert figures == [("12", None, 1.0), ("24", None, 1.0)]
    assert (tmp_path / "sweep.png").stat().st_size


def test_a_sweep_goes_on_after_a_point_that_failed_and_names_it(programs, tmp_path):
    for name, time in (("dying", 2), ("living", 9999)):
        fails = "".join(f"{time},{m},fail\n" for m in range(4))
        (tmp_path / name).write_text(f"time,learner,event\n{fails}")
    grid = f"driver=virtual;virtual.arrays=False;virtual.availability=trace;virtual.trace={tmp_path}/dying"
    done = programs.run("sweep", f"--sweep={grid},{tmp_path}/living", f"--output={tmp_path}/sweep")
    assert done.returncode == 1
    [told] = [line for line in done.stderr.splitlines() if line.startswith("error: 1 of the runs failed: ")]
    assert told.endswith("dying (it has not finished)")
    [row] = json.loads((tmp_path / "sweep" / "sweep.json").read_text())
    assert row["virtual.trace"].endswith("living")


def test_a_sweep_tells_what_a_point_may_not_be_before_any_run_starts(programs, tmp_path):
    done = programs.run("sweep", "--sweep=train.steps=12,0", f"--output={tmp_path}/sweep")
    assert_refused(done, "train.steps=0: config.train.steps: ")
    assert not (tmp_path / "sweep").exists()
