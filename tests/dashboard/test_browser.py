"""The page in a real browser: it lays out, it shows news, and the keyboard reaches everything."""

import dataclasses
import html
import importlib.resources
import json
import shutil
import subprocess
import threading

import pytest

from ddiloco.dashboard import server as board
from ddiloco.dashboard import study
from ddiloco.dashboard.server import PageServer
from ddiloco.dashboard.sheet import document
from tests.dashboard.planted import as_processes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
QUIET = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--hide-scrollbars",
]
QUIET += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
PROBE = """<script>
addEventListener("load", () => setTimeout(() => {
  const inside = ".scroll, pre, .spoken, svg";
  const wide = [...document.querySelectorAll("main *")].filter(one => !one.closest(inside) &&
    one.getBoundingClientRect().right > innerWidth + 1).map(one => one.tagName + "." + one.className);
  if (document.documentElement.scrollWidth > innerWidth) wide.push("words");
  const lane = document.querySelector(".lane").getBoundingClientRect();
  const names = [...document.querySelectorAll("a, summary, input, [role=group], [role=img]")]
    .filter(one => !(one.getAttribute("aria-label") || one.textContent.trim() || one.labels?.length));
  const colours = getComputedStyle(document.body);
  document.title = JSON.stringify({wide, lane: [lane.width, lane.height], nameless: names.length,
    paper: colours.backgroundColor, ink: colours.color});
}, 50));
</script></body>"""


@pytest.fixture
def browse(tmp_path):
    """Starts a browser of this width that prints what has become of the page."""

    def start(url, *flags, width=1300):
        flags = [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1200", *flags]
        asked = [CHROMIUM, *QUIET, *flags, "--virtual-time-budget=2000", "--dump-dom", url]
        return subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    return start


@pytest.mark.parametrize(("width", "dark"), [(1300, False), (500, True)])
def test_nothing_is_cut_off_and_everything_has_a_name(browse, view_of, tmp_path, width, dark):
    page, sweeps = (
        tmp_path / "page.html",
        "config=configs-micro.py-dense,sync.num_learners=4,train.steps=" * 4,
    )
    view = dataclasses.replace(view_of("lives"), name=sweeps)
    page.write_text(document([view], inline=True).replace("</body>", PROBE))
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    dom, _ = browse(page.as_uri(), scheme, width=width).communicate(timeout=60)
    told = json.loads(html.unescape(dom.split("<title>")[1].split("</title>")[0]))
    assert told["wide"] == [] and told["nameless"] == 0
    assert told["lane"][0] > 250 and told["lane"][1] == 28
    light = sum(map(int, told["paper"].removeprefix("rgb(").removesuffix(")").split(",")))
    assert (light < 200) is dark


AXE = """<script>
addEventListener("load", async () => {
  const found = await axe.run();
  document.title = JSON.stringify({
    passed: found.passes.map(rule => rule.id),
    wrong: found.violations.map(rule => [rule.id, rule.nodes.map(node => node.target.join(" ")).slice(0, 3)]),
    seen: found.passes.find(rule => rule.id === "color-contrast").nodes.map(node => node.target.join(" ")),
  });
});
</script></body>"""


@pytest.fixture
def judged(browse, tmp_path):
    """What axe says of a page."""
    axe = (importlib.resources.files("axe_core_python") / "axe.min.js").read_text()

    def judge(text, width, dark):
        page = tmp_path / "page.html"
        page.write_text(text.replace("</body>", f"<script>{axe}</script>{AXE}"))
        scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
        dom, _ = browse(page.as_uri(), scheme, width=width).communicate(timeout=60)
        return json.loads(html.unescape(dom.split("<title>")[1].split("</title>")[0]))

    return judge


LOOKS = pytest.mark.parametrize(("width", "dark"), [(1300, True), (500, False)])


@LOOKS
def test_axe_finds_nothing_wrong(judged, view_of, width, dark):
    views = [view_of("lives"), view_of("missing_host"), as_processes(view_of("hang"))]
    told = judged(document(views, inline=True), width, dark)
    assert told["wrong"] == [] and {"region", "aria-roles"} <= set(told["passed"])
    assert any("code" in place for place in told["seen"])


@LOOKS
def test_axe_finds_nothing_wrong_with_a_study(judged, width, dark):
    curves = [study.LossCurve(f"rate={n}", [1.0, 2.0], [3.0, 2.0 + n]) for n in range(10)]
    rows = [["rate", "held-out loss"], *([f"{n}", "2.0000 ± 0.1000"] for n in range(10))]
    charts = [study.losses("tokens", curves)]
    shown = study.StudyView("rates", "2 of 2 runs", ["Best: rate=0", "Within"], charts, rows, rows)
    told = judged(study.document(shown), width, dark)
    assert told["wrong"] == [] and {"region", "svg-img-alt"} <= set(told["passed"])


def test_news_reach_the_reader_and_so_does_the_end(browse, run_of, tmp_path, monkeypatch):
    monkeypatch.setattr(board, "EVERY", 0.05)
    workdir, seen = tmp_path / "run", threading.Event()
    shutil.copytree(run_of("steady"), workdir)

    class Burning(board.Board):
        """Something burns once somebody watches."""

        def look(self):
            news = super().look()
            if seen.is_set():
                return news
            if news and "something burns" in self.content:
                seen.set()
            with (workdir / "events.jsonl").open("a") as file:
                file.write(json.dumps({"time": 299.0, "event": "alarm", "alarm": "something burns"}) + "\n")
            return news

    monkeypatch.setattr("ddiloco.dashboard.server.Board", Burning)
    server = PageServer("127.0.0.1:0", [workdir])
    server.start()
    browser = browse(server.url)
    try:
        assert seen.wait(60.0)
    finally:
        server.stop()  # else the browser waits for more news
    dom, _ = browser.communicate(timeout=60)
    assert "something burns" in dom and "The run does not answer" in dom
