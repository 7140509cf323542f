"""What a page may have the run do: only with the token, only from the page itself, and never by accident."""

import json
import subprocess
import threading

import httpx
import pytest

from ddiloco.page import sheet
from ddiloco.page.actions import Actions
from ddiloco.page.server import PageServer
from ddiloco.page.visitors import Visitors
from ddiloco.remote.wire.management import Answer
from tests.page.test_browser import CHROMIUM, QUIET

TOKEN = "the token of the operator"


class Page:
    """A page with actions, what they have asked for, and who asks."""

    def __init__(self, workdir, actions, attached=True):
        self.asked = []
        self.done = threading.Event()
        if attached:
            actions.attach(self._do)
        self.server = PageServer("127.0.0.1:0", [workdir], Visitors(actions=actions))
        self.server.start()
        self.client = httpx.Client(base_url=self.server.url, trust_env=False)

    def _do(self, verb, learner, host):
        self.asked.append((verb, learner, host))
        self.done.set()
        return Answer(learner != 7, f"{verb} it is")

    def act(self, verb, learner=None, token=TOKEN, **more):
        return self.client.post("/act", json={"verb": verb, "learner": learner, "token": token}, **more)

    def close(self):
        self.client.close()
        self.server.stop()


@pytest.fixture
def page(run_of):
    made = []

    def make(*args, **more):
        made.append(Page(run_of("steady"), *args, **more))
        return made[-1]

    yield make
    for one in made:
        one.close()


def of_token():
    return Actions(lambda token: token == TOKEN)


def test_with_the_token_it_is_done_and_said(page):
    page = page(of_token())
    answer = page.act("drain", 1)
    assert (answer.status_code, answer.json()) == (200, {"done": True, "line": "drain it is"})
    assert page.act("evict", 7).status_code == 409
    assert page.act("snapshot").status_code == page.act("stop").status_code == 200
    verbs = [("drain", 1), ("evict", 7), ("snapshot", None), ("stop", None)]
    assert page.asked == [(*verb, "127.0.0.1") for verb in verbs]


def test_without_it_nothing_is(page):
    page = page(of_token())
    for token in ("", "another", TOKEN + "x", "ä"):
        answer = page.act("stop", token=token)
        assert (answer.status_code, answer.json()["done"]) == (403, False)
    assert page.client.get("/act").status_code == 405
    assert page.asked == [] and TOKEN not in page.client.get("/").text


def test_another_site_can_ask_for_nothing(page):
    page = page(of_token())
    asked = json.dumps({"verb": "stop", "token": TOKEN})
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data"):
        assert page.client.post("/act", content=asked, headers={"content-type": kind}).status_code == 415
    assert page.act("stop", headers={"origin": "https://evil.example"}).status_code == 403
    assert page.act("stop", headers={"host": "evil.example"}).status_code == 400
    assert page.client.options("/act", headers={"origin": "https://evil.example"}).status_code == 405
    assert page.asked == []
    own = page.server.url.rstrip("/")
    assert page.act("stop", headers={"origin": own}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[",
        b"[" * 4000,
        b"[]",
        b'{"verb": "stop"}',
        b'{"verb": "add", "token": "x"}',
        b'{"verb": ["stop"], "token": "x"}',
        b'{"verb": "drain", "token": "x"}',
        b'{"verb": "drain", "learner": -1, "token": "x"}',
        b'{"verb": "drain", "learner": true, "token": "x"}',
        b'{"verb": "stop", "learner": 1, "token": "x"}',
        b'{"verb": "stop", "token": 5}',
    ],
)
def test_what_is_no_request_is_told(page, body):
    page = page(of_token())
    answer = page.client.post("/act", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and page.asked == []


def test_what_is_too_long_is_not_read(page):
    assert page(of_token()).act("stop", token="x" * 5000).status_code == 413


def test_before_the_run_has_begun_it_says_so(page):
    assert page(of_token(), attached=False).act("stop").status_code == 503


def test_a_run_without_credentials_takes_the_page_s_own_secret(page):
    first, second = page(Actions()), page(Actions())
    secrets = [one.client.get("/").text.split('data-secret="')[1].split('"')[0] for one in (first, second)]
    assert secrets[0] != secrets[1]
    assert first.act("stop", token=secrets[0]).status_code == 200
    assert first.act("stop", token=secrets[1]).status_code == 403
    assert "password" not in first.client.get("/").text


def test_a_page_without_actions_has_none(serve_plain):
    page = serve_plain
    assert "managing" not in page.get("/").text and page.post("/act", json={}).status_code == 404


@pytest.fixture
def serve_plain(run_of):
    server = PageServer("127.0.0.1:0", [run_of("steady")])
    server.start()
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        yield client
    server.stop()


DRIVE = """
addEventListener("load", () => {
  const dialog = document.getElementById("managing"), form = dialog.querySelector("form");
  const seen = {closed: !dialog.open};
  document.getElementById("manage").click();
  seen.opened = dialog.open && dialog.contains(document.activeElement);
  form.requestSubmit();
  seen.unchosen = form.querySelector("[type=submit]").textContent;
  form.elements.verb.value = "drain";
  form.dispatchEvent(new Event("input"));
  form.elements.token.value = "%s";
  form.requestSubmit();
  seen.unnamed = form.querySelector("[type=submit]").textContent;
  document.getElementById("whom").value = "1";
  form.requestSubmit();
  seen.sure = form.querySelector("[type=submit]").textContent;
  seen.nameless = [...form.querySelectorAll("input")].filter(one => !one.labels.length).length;
  form.requestSubmit();
  const told = document.getElementById("managed");
  new MutationObserver(() => {
    document.title = JSON.stringify({...seen, told: told.textContent});
  }).observe(told, {childList: true});
});
""".replace("%s", TOKEN)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_the_dialog_asks_once_more_before_it_acts(page, tmp_path, monkeypatch):
    files = sheet.asset
    monkeypatch.setattr(sheet, "asset", lambda name: files(name) + (DRIVE if name == "actions.js" else ""))
    page = page(of_token())
    flags = [f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    asked = [CHROMIUM, *QUIET, *flags, page.server.url]
    browser = subprocess.Popen(asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert page.done.wait(60.0)
    finally:
        page.server.stop()
        dom, _ = browser.communicate(timeout=60)
    assert page.asked == [("drain", 1, "127.0.0.1")]
    seen = json.loads(dom.split("<title>")[1].split("</title>")[0].replace("&quot;", '"'))
    assert seen == {
        "closed": True,
        "opened": True,
        "unchosen": "Go on",
        "unnamed": "Go on",
        "sure": "Yes, drain learner 1",
        "nameless": 0,
        "told": "drain it is",
    }
