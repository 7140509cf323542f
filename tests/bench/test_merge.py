"""The merge benchmark's rows: what tools read from them."""

import pytest

from experiments.bench import merge as bench_merge


def test_rows_compare_every_rule_with_the_same_plain_average():
    rows = {row["name"]: row for row in bench_merge.run(quick=True)}
    assert {"rda", "direct", "rda_new_memory", "direct_new_memory", "global_model_rda"} <= set(rows)
    assert len({(row["reference"], row["limit"], row["unit"]) for row in rows.values()}) == 1
    for row in rows.values():
        assert row["ratio"] == pytest.approx(row["measured"] / row["reference"])
        assert row["measured"] > 0
        assert row["limit"] > 0
