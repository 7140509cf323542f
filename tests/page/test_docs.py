"""docs/dashboard.md and the Grafana dashboard name what there is."""

import json
import pathlib
import re

from ddiloco.page.advice import RULES
from ddiloco.page.exposition import OF_FRAGMENT, OF_LEARNER, OF_RUN, OTHERS

DOCS = pathlib.Path(__file__).parents[2] / "docs"
METRICS = {metric.name for metric in (*OF_RUN, *OF_LEARNER, *OF_FRAGMENT)} | {
    name for name, _ in OTHERS.values()
}


def test_the_table_of_metrics_is_complete():
    page = (DOCS / "dashboard.md").read_text()
    assert set(re.findall(r"^\| `(ddiloco_\w+)` \|", page, re.M)) == METRICS


def test_the_table_of_advice_is_complete():
    page = (DOCS / "dashboard.md").read_text()
    told = [f"| `{rule.__name__}` | {rule.__doc__.splitlines()[0]} |" for rule in RULES]
    assert [line for line in page.splitlines() if line in told] == told


def test_grafana_asks_for_metrics_that_exist():
    dashboard = json.loads((DOCS / "dashboard" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"ddiloco_\w+", " ".join(asked))) <= METRICS and len(asked) > 12
