"""docs/dashboard.md and the Grafana dashboard name what there is."""

import io
import json
import pathlib
import re

from ddiloco.dashboard.exposition import METRICS
from ddiloco.goodput.accounting import CAUSES
from ddiloco.telemetry.json_lines import JsonLines

DOCS = pathlib.Path(__file__).parents[2] / "docs"
NAMES = {metric.name for metric in METRICS}


def test_every_cause_of_lost_time_has_its_word():
    page = (DOCS / "dashboard.md").read_text()
    page = page.split("| cause | what chips do | Google's name |")[1].split("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == [cause.value for cause in CAUSES]


def test_the_page_names_the_fields_of_a_line_of_logs():
    stream = io.StringIO()
    labels = {"run": "mine", "role": "syncer", "learner": 1, "round": 2, "stream": "stdout"}
    print("all is well", file=JsonLines(stream, labels))
    page = (DOCS / "dashboard.md").read_text().split("## Logs")[1]
    fields = list(json.loads(stream.getvalue()))
    assert [name for name in re.findall(r"`(\w+)`", page) if name in fields] == fields


def test_grafana_asks_for_metrics_that_exist():
    dashboard = json.loads((DOCS / "dashboard" / "grafana.json").read_text())
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert set(re.findall(r"ddiloco_\w+", " ".join(asked))) <= NAMES and len(asked) > 12
