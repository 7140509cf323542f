"""The files by which others find, cite and report to the project."""

import ast
import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).parent.parent


def setup_arguments():
    tree = ast.walk(ast.parse((ROOT / "setup.py").read_text()))
    calls = (node for node in tree if isinstance(node, ast.Call))
    (setup,) = (call for call in calls if getattr(call.func, "id", None) == "setup")
    return {kw.arg: kw.value.value for kw in setup.keywords if isinstance(kw.value, ast.Constant)}


def test_the_citation_has_the_fields_that_its_schema_requires_and_the_packages_version():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0" and cited["type"] == "software"
    assert all(isinstance(cited[name], str) and cited[name] for name in ("message", "title"))
    package = setup_arguments()
    assert (cited["version"], cited["license"]) == (package["version"], package["license"])
    for entry in (cited, *cited["references"]):
        assert entry["title"] and entry["type"]
        for author in entry["authors"]:
            assert author.keys() in ({"name"}, {"family-names", "name-suffix"})
    (paper,) = cited["references"]
    assert re.fullmatch(r"https://arxiv\.org/abs/\d{4}\.\d{5}", paper["url"])
    assert paper["url"] in (ROOT / "README.md").read_text()


def test_every_issue_form_has_fields_of_known_kinds_with_ids_of_their_own():
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert forms
    for path in forms:
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"], path
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids)
        assert any(field.get("validations") == {"required": True} for field in form["body"])
        for field in form["body"]:
            assert field["type"] in ("textarea", "input", "dropdown", "checkboxes"), path
            assert field["attributes"]["label"]
            if field["type"] in ("dropdown", "checkboxes"):
                assert field["attributes"]["options"]
