"""Which point of a study is best, and its page."""

import pandas as pd
import pytest

from experiments.studies import pages, results
from tests.dashboard.test_sheet import Page

NOISE = (0.0, 0.5, -0.25)  # of a seed, for all points alike


def study(losses, seeds=3, of=lambda loss, seed: loss + NOISE[seed], **more):
    """A results table of rates with their losses, times seeds; None: its runs have not finished."""
    records = []
    for rate, loss in losses.items():
        for seed in range(seeds):
            row = {"outer.rate": rate, "seed": seed, "finished": loss is not None}
            if loss is not None:
                end = of(loss, seed)
                history = [
                    {"tokens": 100 * n, "bytes": 10 * n, "seconds": n, "loss": end + 1 / n} for n in (1, 2)
                ]
                row |= {"eval_loss": end, "eval_history": history, "driver": "virtual", **more}
            records.append(row)
    return results.completed(records)


def test_points_are_held_against_the_best_seed_by_seed():
    """What a seed does to all points alike is no error of their difference."""
    best, other = results.ranked(study({0.5: 3.0, 0.7: 2.0}), ["outer.rate"])
    assert (best.name, best.place, best.seeds) == ("outer.rate=0.7", 1, 3)
    assert best.deviation == pytest.approx(pd.Series(NOISE).std())
    assert (other.above, other.error, other.tied) == (pytest.approx(1.0), pytest.approx(0.0), False)


def test_a_difference_within_two_standard_errors_is_no_difference():
    lean = lambda loss, seed: loss + (0.1, -0.1)[seed] * (loss > 2.0)  # noqa: E731
    frame = study({0.5: 2.15, 0.7: 2.0, 0.9: 2.4}, seeds=2, of=lean)
    _, near, far = results.ranked(frame, ["outer.rate"])
    assert near.error == pytest.approx(0.1) and near.tied and not far.tied
    assert results.standing(frame, ["outer.rate"]) == [
        "Best: outer.rate=0.7, held-out loss 2.0000 ± 0.0000 (2 seeds)",
        "Within two standard errors of it, seed by seed: outer.rate=0.5 (+0.1500 ± 0.1000)",
    ]


def test_one_seed_has_no_error_which_is_told():
    lines = results.standing(study({0.5: 3.0, 0.7: 2.0}, seeds=1), ["outer.rate"])
    assert lines == [
        "Best: outer.rate=0.7, held-out loss 2.0000 (1 seed)",
        "Points without two seeds in common with it have no error",
    ]


def test_nothing_is_best_of_one():
    assert results.standing(study({0.5: 3.0, 0.7: None}), ["outer.rate"]) == []


def test_a_sweep_without_seeds_has_a_best_point_too():
    frame = study({0.5: 3.0, 0.7: 2.0}, seeds=1).drop(columns="seed")
    assert [one.name for one in results.ranked(frame, ["outer.rate"])] == ["outer.rate=0.7", "outer.rate=0.5"]


def shown(frame, by=("outer.rate",)):
    names = [f"run-{n}" for n in range(len(frame))]
    return Page(pages.page("rates", frame, by, results.SHOWN, names))


def test_the_page_has_every_point_best_first_and_every_run():
    page = shown(study({0.5: 3.0, 0.7: 2.0, 0.9: None}, tokens_total=200.0, wall_seconds=2.0))
    assert "6 of 9 runs have finished" in page.text
    assert "Best: outer.rate=0.7, held-out loss 2.0833 ± 0.3819 (3 seeds)" in page.text
    points = page.text.partition("best first")[2].partition("Each run")[0]
    assert [points.index(f" {rate} ") for rate in (0.7, 0.5, 0.9)] == sorted(
        points.index(f" {rate} ") for rate in (0.7, 0.5, 0.9)
    )
    assert "best" in points and "+1.0000 ± 0.0000" in points
    assert page.text.count("not finished") == 3 and "run-8" in page.text
    drawn = [svg["aria-label"] for svg in page.of("svg") if svg.get("role") == "img"]
    assert [label.partition(" in ")[0] for label in drawn] == [
        "Against tokens",
        "Against bytes over links",
        "Against virtual seconds",
    ]
    assert "outer.rate=0.7 2.58; outer.rate=0.5 3.58" in drawn[0], "means over seeds, at the end"


def test_of_many_points_the_best_have_colours():
    page = shown(study({n: 12.0 - n for n in range(12)}, seeds=1))
    looks = [path["class"] for path in page.of("path") if path.get("class", "").startswith("curve")]
    assert looks.count("curve many") == 3 * 4  # of three charts
    assert "curve c0" in looks and "outer.rate=11" in page.text


def test_a_page_of_runs_that_have_not_finished_has_no_chart():
    page = shown(study({0.5: None}))
    assert "0 of 3 runs have finished" in page.text and not page.of("figure")
