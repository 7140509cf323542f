"""What a sweep shows: its axis and lines, means over seeds, gaps to a baseline of the same seed."""

import pytest

from experiments.cli import program
from experiments.studies import figures, results, sweeps


def points_of(**settings):
    return [
        {"a.x": x, "b.rule": rule, "seed": seed, **settings}
        for seed in (0, 1)
        for x in (2, 4, 8)
        for rule in "pq"
    ]


def test_the_first_number_is_the_axis_and_the_rest_makes_the_lines():
    assert sweeps.axes_of(points_of(fixed=3)) == sweeps.Axes("a.x", ("b.rule",))


def test_a_setting_that_follows_from_another_says_nothing():
    points = [{**point, "batch": 16 // point["a.x"]} for point in points_of()]
    assert sweeps.axes_of(points) == sweeps.Axes("a.x", ("b.rule",))


def test_values_from_the_command_line_are_numbers_too_and_true_and_none_are_not():
    points = [{"on": on, "k": k, "h": h} for on in (True, False) for k in ("1", "None") for h in ("6", "12")]
    assert sweeps.axes_of(points) == sweeps.Axes("h", ("on", "k"))


def test_a_setting_that_some_points_lack_is_no_axis():
    points = [{"kind": "direct"}, {"kind": "nesterov", "rate": 0.7}, {"kind": "nesterov", "rate": 0.5}]
    assert sweeps.axes_of(points) == sweeps.Axes(None, ("kind", "rate"))
    assert [sweeps.line_of(point, sweeps.axes_of(points)) for point in points] == [
        "kind=direct",
        "kind=nesterov, rate=0.7",
        "kind=nesterov, rate=0.5",
    ]


def measured(points, loss, sweep=None):
    """The results table of the points' runs with these losses."""
    rows = [{**point, "finished": True, "eval_loss": loss(point)} for point in points]
    return results.completed(rows, lambda frame: sweeps.place(frame, sweep or sweeps.Sweep(points)))


def gaps(runs, loss, points=None, **baseline):
    """The gap of each run to the baseline's, None where it has none."""
    found = measured(runs, loss, sweeps.Sweep(points or runs, baseline)).gap
    return [None if gap != gap else pytest.approx(gap) for gap in found]


def fifth(point):
    return (point["a.x"] + point["seed"]) * (1.05 if point["b.rule"] == "q" else 1.0)


def test_a_gap_is_to_the_baselines_run_of_the_same_seed_and_place():
    found = gaps(points_of(), fifth, **{"b.rule": "p"})
    assert found == [0.05 * (point["b.rule"] == "q") for point in points_of()]


def test_a_baseline_at_one_place_stands_for_all_of_its_seed():
    points = [{"kind": "base", "m": 1, "seed": s} for s in (0, 1)]
    points += [{"kind": "tried", "m": m, "seed": s} for s in (0, 1) for m in (1, 2, 4)]
    loss = lambda p: (2.0 + p["seed"]) * (1 if p["kind"] == "base" else 1 + p["m"] / 10)  # noqa: E731
    assert gaps(points, loss, kind="base")[2:] == [point["m"] / 10 for point in points[2:]]


def test_a_baseline_whose_runs_at_other_places_have_failed_does_not_stand_for_them():
    points = [{"kind": kind, "m": m, "seed": 0} for kind in ("base", "tried") for m in (1, 2)]
    assert gaps(points[:1] + points[2:], lambda p: 2.0 / p["m"], points, kind="base") == [0.0, 0.0, None]


def test_a_seed_that_the_baseline_lacks_has_no_gap():
    points = [{"kind": "base", "m": 1, "seed": 0}, *({"kind": "tried", "m": m, "seed": 1} for m in (1, 2))]
    assert gaps(points, lambda p: 2.0, kind="base") == [0.0, None, None]


def test_settings_that_end_alike_are_named_in_full():
    points = [{"inner.rate": 0.5, "outer.rate": 1, "outer.rule": r} for r in "pq"]
    axes = sweeps.Axes(None, ("inner.rate", "outer.rate", "outer.rule"))
    assert sweeps.line_of(points[0], axes) == "inner.rate=0.5, outer.rate=1, rule=p"


def test_the_table_has_a_row_for_each_point_with_means_and_gaps():
    sweep = sweeps.Sweep(points_of(), {"b.rule": "p"})
    frame = measured(points_of(), fifth, sweep)
    head, _, *rows = results.table(frame, sweeps.axes_of(sweep.points).settings).splitlines()
    assert [title.strip() for title in head.split("|")[1:-1]] == [
        "b.rule",
        "a.x",
        "runs",
        "held-out loss",
        "gap",
    ]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in rows]
    assert cells[1] == ["q", "2", "2", "2.6250 ± 0.7425", "+5.00% ± 0.00%"] and len(rows) == 6


def test_a_sweep_of_one_point_has_a_table_too():
    [_, _, row] = results.table(measured([{"a": 1}], lambda p: 2.0), []).splitlines()
    assert row == "| 1    | 2.0000        |"
    assert results.table(measured([{"a": 1}], lambda p: None), []).splitlines()[2] == "| 1    |"


@pytest.mark.parametrize(
    ("loss", "axis", "baseline"),
    [(lambda p: 2.0 / p["seed"], "a.x", {"b.rule": "p"}), (lambda p: None, None, None)],
)
def test_a_figure_is_drawn_with_an_axis_and_without_with_losses_and_without(loss, axis, baseline, tmp_path):
    points = [{**p, "a.x": p["a.x"] if axis else f"x{p['a.x']}", "seed": 1 + p["seed"]} for p in points_of()]
    sweep = sweeps.Sweep(points, baseline)
    frame = measured(points, loss, sweep)
    missing = frame[(frame["b.rule"] != "p") | (frame.seed != 1)]  # of which one seed has no baseline
    for i, shown in enumerate((frame, missing)):
        figures.draw_sweep(tmp_path / f"{i}.png", shown, sweep)
        assert (tmp_path / f"{i}.png").read_bytes().startswith(b"\x89PNG")


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
    loaded = sweeps.load(f"{tmp_path}/s.py:all")
    assert (len(loaded.points), loaded.baseline) == (2, {"algorithm": "data_parallel"})
    assert sweeps.load("a.b=1,2;config=c.py:x").points == [
        {"a.b": "1", "config": "c.py:x"},
        {"a.b": "2", "config": "c.py:x"},
    ]
    assert [point["a"] for point in sweeps.load("a=(1, 2),(3,),4").points] == ["(1, 2)", "(3,)", "4"]


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
        sweeps.load(text.replace("FILE", f"{tmp_path}/s.py"), baseline)
    assert told in str(caught.value)


def test_a_setting_for_all_points_is_theirs_but_not_one_in_which_they_differ():
    sweep = sweeps.load("a=1,2;b=3;config=c.py")
    assert sweeps.with_settings(sweep, [("b", "4"), ("d", "5")]).points == [
        {"a": a, "b": "4", "config": "c.py"} for a in "12"
    ]
    with pytest.raises(
        program.UsageError, match=r"^config\.a: is set for all points of the sweep, but they differ"
    ):
        sweeps.with_settings(sweep, [("a", "1")])


LENGTHS = {100: 4.0, 200: 2.0, 400: 1.0}  # loss of the baseline: in each doubling to a half


def long(kind, steps, loss, seed=0, rate=1, params=7):
    point = {"kind": kind, "train.steps": steps, "rate": rate, "seed": seed}
    return point, {**point, "finished": True, "num_params": params, "eval_loss": loss, "tokens_total": steps}


def lengths(runs):
    """The results table of runs of several lengths, and its sweep."""
    points, rows = zip(*runs, strict=True)
    sweep = sweeps.Sweep([*points], {"kind": "base"})
    return results.completed(rows, lambda frame: sweeps.place(frame, sweep)), sweep


def matches(runs):
    return [None if match != match else pytest.approx(match) for match in lengths(runs)[0].match]


def test_the_tokens_with_which_the_baseline_has_a_loss_lie_on_its_curve_in_logarithms():
    runs = [long("base", t, loss * (1 + seed), seed) for t, loss in LENGTHS.items() for seed in (0, 1)]
    new = [long("new", 400, 2**0.5), long("new", 400, 4.0, seed=1)]
    new += [long("new", 200, 9.0), long("new", 200, 1.0, seed=1)]  # above all, and below all
    assert matches([*runs, *new]) == [*[1.0] * 6, 2**-0.5, 0.5, None, None]


def test_the_tokens_are_those_of_a_baseline_with_the_runs_own_model_and_settings():
    runs = [long("base", 100, 4.0), long("base", 400, 1.0), long("base", 200, 2.0, rate=2)]
    runs += [long("base", 200, 2.5, params=9), long("new", 400, 2.0), long("new", 400, 2.0, rate=2)]
    assert matches(runs)[4:] == [0.5, None]


def test_the_table_tells_with_which_tokens_the_baseline_has_the_same_loss_where_it_has_several_lengths():
    runs = [long("base", 100, 4.0), long("base", 400, 1.0), long("new", 400, 2.0)]
    told = results.table(lengths(runs)[0], ["kind"], ["match"])
    assert "| same loss at |" in told and "| 50% " in told
    assert "same loss" not in results.table(lengths(runs[1:])[0], ["kind"], ["match"])
