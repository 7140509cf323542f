"""Climbs on a grid, and what is told of them."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddiloco.settings.experiment import parse
from experiments.cli import program
from experiments.studies import tuning

RATES, MOMENTA = (1, 2, 4, 8, 16), (0.0, 0.3, 0.6, 0.9)


def climbed(loss, axes=(RATES, MOMENTA), start=(4, 0.3), budget=100, together=()):
    """The points in the order in which they were asked for, and the best."""
    climb, asked = tuning.climb(axes, start, budget, together), []
    point = next(climb)
    try:
        while True:
            asked.append(point)
            point = climb.send(loss(point))
    except StopIteration as end:
        return asked, end.value


@given(top=st.tuples(st.sampled_from(RATES), st.sampled_from(MOMENTA)), budget=st.integers(1, 30))
def test_a_climb_finds_the_bottom_of_a_bowl_or_the_best_of_its_budget(top, budget):
    def loss(point):
        return (RATES.index(point[0]) - RATES.index(top[0])) ** 2 + abs(point[1] - top[1])

    asked, best = climbed(loss, budget=budget)
    assert len(set(asked)) == len(asked) <= budget
    assert loss(best) == min(map(loss, asked))
    if len(asked) < budget:
        assert best == top


def test_axes_that_go_together_are_climbed_where_either_alone_leads_up():
    def loss(point):
        rate, momentum = RATES.index(point[0]), MOMENTA.index(point[1])
        return rate + momentum + 3 * abs(rate - momentum)

    start = (4, 0.6)
    assert climbed(loss, start=start)[1] == start
    asked, best = climbed(loss, start=start, together=(0, 1))
    assert best == (1, 0.0) and (2, 0.3) in asked


@given(st.randoms(use_true_random=False), st.sampled_from([(), (0, 1)]))
def test_a_climb_with_room_ends_where_no_neighbour_is_lower(random, together):
    losses = {point: random.random() for point in itertools.product(RATES, MOMENTA)}
    asked, best = climbed(losses.__getitem__, together=together)
    row = tuning.TuningRow("a", "b", {}, {"rate": RATES, "momentum": MOMENTA}, (4, 0.3), None, together)
    assert all(losses[best] <= losses[beside] for beside in tuning.neighbours(row, best))
    ended = tuning.Tuned(row, [tuning.Tried(point, losses[point], 10) for point in asked], best, 100)
    assert not ended.cut_short()
    assert ended.at_edge() == [
        name
        for name, value, ends in (("rate", best[0], (1, 16)), ("momentum", best[1], (0.0, 0.9)))
        if value in ends
    ]


def test_a_budget_that_ends_the_climb_is_told():
    asked, best = climbed(lambda point: -point[0], budget=2)
    row = tuning.TuningRow("a", "b", {}, {"rate": RATES, "momentum": MOMENTA}, (4, 0.3), None)
    ended = tuning.Tuned(row, [tuning.Tried(point, 1.5, 10) for point in asked], best, 2)
    assert ended.cut_short()
    assert "2, cut short" in tuning.choices([ended])
    assert "20" not in tuning.choices([ended]).splitlines()[0]


LONE = {"label": "x", "preset": "tiny", "axes": ["train.steps"], "train.steps": 5}
REFUSED = {
    "a start outside the grid": ([LONE], r"config: 'x': train.steps is 5, not of \(1, 2\)"),
    "no row": ([], r"plan.py: its get_tuning\(\) names no row"),
    "no axes": (
        [{"label": "x", "preset": "tiny"}],
        r"plan.py: its get_tuning\(\), or a row of it, lacks 'axes'",
    ),
    "folders that are one": (
        [{**LONE, "label": label, "axes": []} for label in ("a b", "a?b")],
        r"'a\?b' and 'a b' are too alike",
    ),
    "another row that is none": (
        [{**LONE, "axes": [], "against": "y"}],
        "plan.py: 'x': is held against 'y', which is no row",
    ),
}


@pytest.mark.parametrize(("rows", "told"), REFUSED.values(), ids=REFUSED)
def test_a_plan_that_cannot_be_carried_out_is_refused(rows, told, tmp_path):
    file = tmp_path / "plan.py"
    plan = {"rows": rows, "grid": {"train.steps": (1, 2)}, "budget": 3, "choosing": {}}
    file.write_text(f"def get_tuning():\n    return {plan!r}\n")
    with pytest.raises(program.UsageError, match=told):
        tuning.plan_of(str(file))


@pytest.mark.parametrize(
    "config",
    [
        "merge_rule.py",
        *(f"methods.py:{what}" for what in ("methods", "learners", "tiny", "short", "momentum", "intervals")),
    ],
)
def test_outer_settings_are_tuned_at_equal_tokens_and_global_batch(config):
    plan = tuning.plan_of(f"configs/{config}")
    config = f"configs/{config.partition(':')[0]}"
    found = []
    for row in plan.rows:
        at = zip(row.axes, row.start, strict=True)
        found.append(parse(program.resolve(f"{config}:{row.preset}", [*row.settings.items(), *at])))
        assert row.against is None or row.against in [row.label for row in plan.rows]
    assert len({(e.train.tokens, e.train.steps) for e in found}) == 1
    assert len({e.sync.num_learners * e.batch_size(0) for e in found}) == 1
    assert len({(e.outer, e.sync, e.algorithm) for e in found}) == len(found)


def test_tuned_presets_are_points_of_the_grid_that_they_were_found_on():
    for row in tuning.plan_of("configs/tuned.py").rows:
        e = parse(program.resolve(f"configs/tuned.py:{row.preset}", row.settings.items()))
        preset = {
            "inner.learning_rate": e.inner.learning_rate,
            "train.batch_size": e.train.batch_size,
            "outer.learning_rate": e.outer.learning_rate,
        }
        assert all(preset[name] in values for name, values in row.axes.items())
        assert (e.train.tokens, e.eval.every) == (480 * 32 * 128, 0)


def test_each_value_of_a_row_is_looked_at_before_anything_runs():
    row = tuning.TuningRow("a", "b", {}, {"rate": (1, 2, 4), "momentum": (0.0, 0.3)}, (2, 0.3), None)
    assert tuning.each_value(row) == [(2, 0.3), (1, 0.3), (4, 0.3), (2, 0.0)]
