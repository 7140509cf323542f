"""The page as HTML: well formed, readable without colour or sight, and honest about whoever is in trouble."""

import collections
import dataclasses
import html.parser
import re

import pytest

from ddiloco.dashboard.advice import advice
from ddiloco.dashboard.sheet import (
    WIDTH,
    charts,
    document,
    forms,
    strip,
)
from ddiloco.dashboard.view import read_views
from ddiloco.telemetry.series import StateSpan

EMPTY = {"link", "meta", "input", "br"}


class Page(html.parser.HTMLParser):
    """Elements with their attributes, and the text; fails where tags do not match."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.words = [], [], []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    def of(self, tag):
        return [attributes for name, attributes in self.elements if name == tag]

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.mark.parametrize("name", ["steady", "lives", "nan", "missing_host"])
def test_a_page_is_well_formed_and_its_ids_are_unique(view_of, name):
    page = Page(document([view_of(name)]))
    ids = collections.Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert set(ids.values()) == {1}
    links = [link["href"] for link in page.of("a")]
    assert {link.removeprefix("#") for link in links if link.startswith("#")} <= set(ids)


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "thin_link": "Learner 3: its link to the syncer is too thin.",
        "third_speed": "Learner 3 is slow: 3.0 times the others' time for a step.",
        "nan": "Learner 1: its loss is not a number.",
        "slow_disk": "Learner 2 waits for data: a slow disk, or too few threads.",
        "steady": "No problems",
    }.items(),
)
def test_the_first_section_says_who_is_in_trouble_and_why(view_of, name, said):
    page = Page(document([view_of(name)]))
    assert said in page.text[:400]


def test_scores_stand_at_their_times_also_where_nobody_was_there_as_the_run_began(view_of):
    """A virtual run begins at 0, which is a time like any other."""
    scores = [{"seconds": 70.0, "tokens": 9, "loss": 2.0}]
    view = view_of("steady")
    later = dataclasses.replace(view, started=20.0, summary={"started": 0.0, "eval_history": scores})
    [held_out] = [curve for curve in charts(later, [])[0].curves if curve.look == "curve global"]
    assert held_out.path.startswith(f"M{WIDTH * 50.0 / view.now:.1f} ")


def test_of_many_learners_those_in_trouble_come_first(view_of):
    view = view_of("lives")
    order = lambda text: [int(n) for n in re.findall(r'id="r0-learner-(\d+)"', text)]  # noqa: E731
    assert order(document([view])) == [one.learner for one in view.learners]
    troubled = {one.learner for one in advice(view)} - {None}
    more = [dataclasses.replace(view.learners[0], learner=n) for n in range(100, 160)]
    many = order(document([dataclasses.replace(view, learners=[*more, *view.learners])]))
    assert troubled and set(many[: len(troubled)]) == troubled
    assert many[len(troubled) : len(troubled) + 60] == list(range(100, 160))


def test_each_host_of_a_learner_has_a_row_and_of_many_those_in_trouble(view_of):
    view = view_of("missing_host")
    assert "learner 2, host 2 gone 50 s" in Page(document([view])).text
    three = view.learners[2].hosts
    hosts = [dataclasses.replace(at, host=at.host + 3 * times) for times in range(5) for at in three]
    learners = [dataclasses.replace(one, hosts=hosts) if one.learner == 2 else one for one in view.learners]
    page = Page(document([dataclasses.replace(view, learners=learners)]))
    assert [f"host {host} gone" in page.text for host in (2, 5, 8, 11, 14)] == [True] * 5
    assert "7 more 7 of them are connected" in page.text and "host connected" in page.text


def test_states_differ_by_form_and_not_by_colour_alone():
    from ddiloco.dashboard.sheet import HOST_STATES, STATES, asset

    assert len({(top, height) for top, height, _ in HOST_STATES.values()}) == len(HOST_STATES)
    hatched = {name for name in STATES if re.search(rf"\.is-{name} \{{ fill: url", asset("page.css"))}
    forms = [(top, height, name if name in hatched else "") for name, (top, height, _) in STATES.items()]
    assert len(set(forms)) == len(STATES)


def test_words_of_strangers_do_not_become_elements(view_of):
    view = view_of("lives")
    nasty = "<script>alert(1)</script>"
    events = [dataclasses.replace(view.events[0], text=nasty, alarm=True)]
    page = Page(document([dataclasses.replace(view, events=events, name='"><b>')]))
    assert page.of("script") == [] and page.of("b") != [] and nasty in page.text


def test_several_runs_stand_side_by_side_with_what_differs(view_of):
    page = Page(document([view_of("steady"), view_of("third_speed")]))
    assert "Settings that differ" in page.text and "virtual.step_seconds" in page.text
    assert "sync.interval" not in page.text.split("Settings that differ")[1].split("steady")[0]
    assert [article["aria-label"] for article in page.of("article")] == ["run steady", "run third_speed"]


def test_a_baseline_has_no_syncer(view_of):
    steady = view_of("steady")
    page = Page(document([dataclasses.replace(steady, learners=steady.learners[:1], fragments=())]))
    assert " · one job · " in page.text and "fragments" not in page.text.split("Lost time by cause")[0]
    assert "The syncer against its limits" not in page.text


def test_a_report_is_one_file_that_asks_for_nothing(view_of):
    text = document([view_of("lives")], inline=True)
    page = Page(text)
    assert (
        not page.of("script") and not page.of("link") and not re.search(r"""(src|href)=["']?https?:""", text)
    )


def test_a_folder_without_a_run_has_a_page(tmp_path):
    assert "no step yet" in Page(document(read_views([tmp_path]))).text


def test_a_lane_has_a_form_for_each_state_and_a_bar_for_each_time_of_merging():
    spans = [StateSpan("stepping", 0.0, 50.0), StateSpan("dead", 50.0, 100.0)]
    drawn = dict(forms(spans, 100.0))
    assert drawn["stepping"] == "M0.0 1h500.0v18h-500.0z" and drawn["dead"].startswith("M500.0 8h500.0")
    merged = strip([1.0, None, 0.0, 0.5], 25.0, 100.0)
    assert merged == "M0.0 22.0h500.0v6.0h-500.0zM750.0 25.0h250.0v3.0h-250.0z"
