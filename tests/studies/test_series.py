"""What a sweep shows: its axis and lines, means over seeds, gaps to a baseline of the same seed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments.cli import program
from experiments.studies import grid, series, sweep_figure, sweep_report


def points_of(**settings):
    return [
        {"a.x": x, "b.rule": rule, "seed": seed, **settings}
        for seed in (0, 1)
        for x in (2, 4, 8)
        for rule in "pq"
    ]


def test_the_first_number_is_the_axis_and_the_rest_makes_the_lines():
    assert series.axes_of(points_of(fixed=3)) == series.Axes("a.x", ("b.rule",))


def test_a_setting_that_follows_from_another_says_nothing():
    points = [{**point, "batch": 16 // point["a.x"]} for point in points_of()]
    assert series.axes_of(points) == series.Axes("a.x", ("b.rule",))


def test_values_from_the_command_line_are_numbers_too_and_true_and_none_are_not():
    points = [{"on": on, "k": k, "h": h} for on in (True, False) for k in ("1", "None") for h in ("6", "12")]
    assert series.axes_of(points) == series.Axes("h", ("on", "k"))


def test_a_setting_that_some_points_lack_is_no_axis():
    points = [{"kind": "direct"}, {"kind": "nesterov", "rate": 0.7}, {"kind": "nesterov", "rate": 0.5}]
    assert series.axes_of(points) == series.Axes(None, ("kind", "rate"))
    assert [series.line_of(point, series.axes_of(points)) for point in points] == [
        "kind=direct",
        "kind=nesterov, rate=0.7",
        "kind=nesterov, rate=0.5",
    ]


def measured(points, loss):
    return [{**point, "eval_loss": loss(point)} for point in points]


def test_runs_that_differ_in_their_seed_alone_are_one_group():
    rows = measured(points_of(), lambda p: p["a.x"] + 0.1 * p["seed"])
    points = series.points(series.placed(rows, series.axes_of(points_of()), None, points_of()))
    assert list(points) == [(r, x) for x in (2, 4, 8) for r in "pq"]
    first = points["p", 2]
    assert series.values(first, "eval_loss") == [2.0, 2.1] and series.values(first, "unknown") == []


def test_a_gap_is_to_the_baselines_run_of_the_same_seed_and_place():
    rows = measured(points_of(), lambda p: (p["a.x"] + p["seed"]) * (1.05 if p["b.rule"] == "q" else 1.0))
    axes, baseline = series.axes_of(points_of()), {"b.rule": "p"}
    for run in series.placed(rows, axes, baseline, points_of()):
        assert run["gap"] == pytest.approx(0.05 * (run["line"] == "q"))


def test_a_baseline_at_one_place_stands_for_all_of_its_seed():
    points = [{"kind": "base", "m": 1, "seed": s} for s in (0, 1)]
    points += [{"kind": "tried", "m": m, "seed": s} for s in (0, 1) for m in (1, 2, 4)]
    rows = measured(
        points, lambda p: 2.0 + p["seed"] if p["kind"] == "base" else (2.0 + p["seed"]) * (1 + p["m"] / 10)
    )
    runs = series.placed(rows, series.axes_of(points), {"kind": "base"}, points)
    tried = [run for run in runs if run["line"] == "tried"]
    assert [run["gap"] for run in tried] == pytest.approx([run["m"] / 10 for run in tried])


def test_a_baseline_whose_runs_at_other_places_have_failed_does_not_stand_for_them():
    points = [{"kind": kind, "m": m, "seed": 0} for kind in ("base", "tried") for m in (1, 2)]
    rows = measured(points[:1] + points[2:], lambda p: 2.0 / p["m"])
    runs = series.placed(rows, series.axes_of(points), {"kind": "base"}, points)
    assert [run["gap"] for run in runs] == [0.0, 0.0, None]


def test_settings_that_end_alike_are_named_in_full():
    points = [{"inner.rate": 0.5, "outer.rate": 1, "outer.rule": r} for r in "pq"]
    axes = series.Axes(None, ("inner.rate", "outer.rate", "outer.rule"))
    assert series.line_of(points[0], axes) == "inner.rate=0.5, outer.rate=1, rule=p"


def test_a_seed_that_the_baseline_lacks_has_no_gap():
    points = [{"kind": "base", "m": 1, "seed": 0}, *({"kind": "tried", "m": m, "seed": 1} for m in (1, 2))]
    rows = measured(points, lambda p: 2.0)
    runs = series.placed(rows, series.axes_of(points), {"kind": "base"}, points)
    assert [run["gap"] for run in runs] == [0.0, None, None]


@given(st.lists(st.floats(-1e3, 1e3), min_size=2))
def test_mean_and_spread_are_those_of_the_values(values):
    mean, spread = series.mean_and_spread(values)
    assert mean == pytest.approx(sum(values) / len(values), abs=1e-6)
    assert spread**2 * (len(values) - 1) == pytest.approx(
        sum((v - mean) ** 2 for v in values), rel=1e-6, abs=1e-6
    )


def full(points, loss):
    return [{**point, **dict.fromkeys(sweep_report.COLUMNS), "eval_loss": loss(point)} for point in points]


def test_the_table_has_means_gaps_and_every_run_best_first():
    rows = full(points_of(), lambda p: (p["a.x"] + p["seed"]) * (1.05 if p["b.rule"] == "q" else 1.0))
    means, _, runs = sweep_report.report(rows, grid.Sweep(points_of(), {"b.rule": "p"})).partition("\n\n")
    assert means.splitlines()[0] == "| b.rule | a.x | runs | gap | eval_loss |"
    assert "| q | 2 | 2 | +5.00% | 2.625 ± 0.74 |" in means
    assert [line.split("|")[4].strip() for line in runs.splitlines()[2:4]] == ["2", "2.1"]


def test_without_a_second_seed_or_a_baseline_there_is_one_table():
    points = [point for point in points_of() if point["seed"] == 0]
    assert "\n\n" not in sweep_report.report(full(points, lambda p: 2.0), grid.Sweep(points))


def test_what_only_a_later_point_sets_stands_before_the_figures():
    table = sweep_report.table(full([{"kind": "p"}, {"kind": "q", "rate": 0.5}], lambda p: 2.0))
    assert table.splitlines()[0] == "| kind | rate | eval_loss |"


@pytest.mark.parametrize("losses", [lambda p: 2.0 / p["a.x"], lambda p: None])
@pytest.mark.parametrize("axis", ["a.x", None])
def test_a_figure_is_drawn_with_an_axis_and_without_with_losses_and_without(losses, axis, tmp_path):
    points = [{**p, "a.x": p["a.x"] if axis else f"x{p['a.x']}"} for p in points_of()]
    rows = [{**row, "a.x": p["a.x"]} for row, p in zip(full(points_of(), losses), points, strict=True)]
    for i, baseline in enumerate((None, {"b.rule": "p"})):
        sweep_figure.draw(tmp_path / f"{i}.png", rows, grid.Sweep(points, baseline))
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")


def test_a_figure_without_a_loss_says_so(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(sweep_figure, "dress", drawn.append)
    for loss in (2.0, None):
        points = points_of()
        rows = full(points, lambda _, loss=loss: loss)
        sweep_figure.draw(tmp_path / "figure.png", rows, grid.Sweep(points, {"b.rule": "p"}))
    said = [[text.get_text() for text in panel.texts] for panel in drawn]
    assert said == [[], [], ["no run has one"], ["no run has one"]]


def test_long_names_of_points_leave_the_figure_its_room(tmp_path, monkeypatch):
    drawn = []
    sound = sweep_figure.dress
    monkeypatch.setattr(sweep_figure, "dress", lambda panel: (drawn.append(panel), sound(panel)))
    long = [{**point, "b.rule": "a rule with a long name, " * 3 + point["b.rule"]} for point in points_of()]
    long = [{**point, "a.x": f"x{point['a.x']}"} for point in long]
    sweep_figure.draw(tmp_path / "figure.png", full(long, lambda p: 2.0), grid.Sweep(long))
    (panel,) = drawn
    assert panel.get_window_extent().width > 3 * panel.figure.dpi, "inches"


FILE = """
from ddiloco.config import ConfigError

BASELINE = {"algorithm": "data_parallel"}


def get_sweep(which="all"):
    if which == "none":
        return []
    if which != "all":
        raise ConfigError(f"no part {which!r}")
    return [{"algorithm": "data_parallel"}, {"algorithm": "decoupled"}]
"""


def test_a_sweep_file_has_points_an_argument_and_a_baseline(tmp_path):
    (tmp_path / "s.py").write_text(FILE)
    loaded = grid.load(f"{tmp_path}/s.py:all")
    assert (len(loaded.points), loaded.baseline) == (2, {"algorithm": "data_parallel"})
    assert grid.load("a.b=1,2;config=c.py:x").points == [
        {"a.b": "1", "config": "c.py:x"},
        {"a.b": "2", "config": "c.py:x"},
    ]
    assert [point["a"] for point in grid.load("a=(1, 2),(3,),4").points] == ["(1, 2)", "(3,)", "4"]


@pytest.mark.parametrize(
    ("text", "baseline", "told"),
    [
        ("FILE:some", None, "no part 'some'"),
        ("FILE:none", None, "s.py:none: names no point"),
        ("FILE", "algorithm=streaming", "baseline: no point of the sweep has algorithm=streaming"),
        ("a=1,2", "a", "baseline: 'a' is not of the form setting=value"),
        ("a", None, "sweep: 'a' is not of the form setting=value,value"),
        (";", None, "sweep: ';' is not of the form setting=value,value"),
        ("nowhere.py", None, "sweep: nowhere.py: no such file"),
        ("a=1,2,1", None, "sweep: 2 of its points are a=1"),
    ],
)
def test_what_is_no_sweep_is_told_in_one_line(text, baseline, told, tmp_path):
    (tmp_path / "s.py").write_text(FILE)
    with pytest.raises(program.UsageError) as caught:
        grid.load(text.replace("FILE", f"{tmp_path}/s.py"), baseline)
    assert told in str(caught.value)


def test_a_setting_for_all_points_is_theirs_but_not_one_in_which_they_differ():
    sweep = grid.load("a=1,2;b=3;config=c.py")
    assert grid.with_settings(sweep, [("b", "4"), ("d", "5")]).points == [
        {"a": a, "b": "4", "config": "c.py"} for a in "12"
    ]
    with pytest.raises(
        program.UsageError, match=r"^config\.a: is set for all points of the sweep, but they differ"
    ):
        grid.with_settings(sweep, [("a", "1")])


def test_a_point_of_which_one_seed_has_no_baseline_is_drawn(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(sweep_figure, "dress", drawn.append)
    points = points_of()
    rows = full(points, lambda p: p["a.x"] * (1.05 if p["b.rule"] == "q" else 1.0))
    rows = [row for row in rows if (row["b.rule"], row["seed"]) != ("p", 1)]
    sweep_figure.draw(tmp_path / "figure.png", rows, grid.Sweep(points, {"b.rule": "p"}))
    heights = [y for line in drawn[1].get_lines() for y in line.get_ydata()]
    assert sum(height == pytest.approx(5.0) for height in heights) >= 3


def test_the_tokens_with_which_the_baseline_has_a_loss_lie_on_its_curve_in_logarithms():
    def row(kind, steps, seed, loss):
        length = {"train.steps": steps, "tokens_total": 10 * steps}
        return {"kind": kind, "seed": seed, "eval_loss": loss, **length}

    curve = {100: 4.0, 200: 2.0, 400: 1.0}  # in each doubling to a half, but for the seed's factor
    rows = [row("base", t, seed, loss * (1 + seed)) for t, loss in curve.items() for seed in (0, 1)]
    rows += [row("new", 400, 0, 2**0.5), row("new", 400, 1, 4.0)]
    rows += [row("new", 200, 0, 9.0), row("new", 200, 1, 1.0)]
    axes, baseline = series.Axes("train.steps", ("kind",)), {"kind": "base"}
    points = series.points(series.placed(rows, axes, baseline, rows))
    found = {point: series.values(runs, "match") for point, runs in points.items()}
    assert found["new", 400] == pytest.approx([2**-0.5, 0.5])
    assert found["new", 200] == []  # 9 is above all, and 1 below all of the other seed's
    assert found["base", 200] == pytest.approx([1.0, 1.0])


def test_the_tokens_are_those_of_a_baseline_with_the_runs_own_model_and_settings():
    def row(kind, steps, rate, params, loss):
        point = {"kind": kind, "train.steps": steps, "rate": rate, "seed": 0}
        return {**point, "num_params": params, "eval_loss": loss, "tokens_total": steps}

    rows = [row("base", 100, 1, 7, 4.0), row("base", 400, 1, 7, 1.0), row("base", 200, 2, 7, 2.0)]
    rows += [row("base", 200, 1, 9, 2.5), row("new", 400, 1, 7, 2.0), row("new", 400, 2, 7, 2.0)]
    axes = series.Axes("train.steps", ("kind", "rate"))
    runs = series.placed(rows, axes, {"kind": "base"}, rows)
    assert [run["match"] for run in runs[4:]] == [pytest.approx(0.5), None]


def test_the_table_tells_with_which_tokens_the_baseline_has_the_same_loss_where_it_has_several_lengths():
    def row(kind, steps, loss):
        return {"kind": kind, "train.steps": steps, "seed": 0, "eval_loss": loss, "tokens_total": steps}

    rows = [row("base", 100, 4.0), row("base", 400, 1.0), row("new", 400, 2.0)]
    points = [{name: r[name] for name in ("kind", "train.steps", "seed")} for r in rows]
    told = sweep_report.means_table(rows, grid.Sweep(points, {"kind": "base"}))
    assert "| same loss at |" in told and "| new | 400 | 1 | +100.00% | 50% |" in told
    points, rows = points[1:], rows[1:]
    assert "same loss" not in sweep_report.means_table(rows, grid.Sweep(points, {"kind": "base"}))
