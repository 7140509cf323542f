"""Where each result was found: python -m tests.test_results --rewrite puts the marks of pages into tables.

A page of docs/results names its environments in a comment below its title, and a section may name its own
below its heading. The column "found in" of docs/results/README.md and of README.md follows from them.
"""

import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
TABLES = (ROOT / "README.md", RESULTS / "README.md")
ENVIRONMENTS = ("wall clock", "virtual time", "simulation", "GPU", "TPU compiler")
_MARK = re.compile(r"^(#+) ([^\n]+)\n<!-- found in: (.+) -->\n", re.M)
_LINK = re.compile(r"\]\(([^)#]+\.md)(?:#([^)]+))?\)")


def marks(page):
    """The environments by heading, as anchors; the title's is the empty one."""
    found = {}
    for level, heading, named in _MARK.findall(page.read_text()):
        anchor = re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-")
        found["" if level == "#" else anchor] = set(named.split(", "))
    assert "" in found, f"{page.name}: names no environment below its title"
    return found


def found_in(row, folder):
    """The environments of all results that a row of a table links to, in the order of ENVIRONMENTS."""
    named = set()
    for target, anchor in _LINK.findall(row):
        page = (folder / target).resolve()
        if page.parent == RESULTS:
            found = marks(page)
            named |= found.get(anchor, found[""])
    return ", ".join(one for one in ENVIRONMENTS if one in named)


def filled(file):
    """The file's text, with the cells under "found in" as the linked results have it."""
    lines, column = [], None
    for line in file.read_text().splitlines():
        cells = line.split("|")
        if " found in " in cells:
            column = cells.index(" found in ")
        elif len(cells) < 2:
            column = None
        elif column and (named := found_in(line, file.parent)):
            cells[column] = f" {named} "
            line = "|".join(cells)
        lines.append(line)
    return "\n".join(lines) + "\n"


def test_the_tables_of_results_say_of_each_where_it_was_found():
    for file in TABLES:
        text = file.read_text()
        assert "| found in |" in text and text == filled(file), "python -m tests.test_results --rewrite"
    listed = set(re.findall(r"^\| .+? \| \[.+?\]\((\w+\.md)\) \|", TABLES[1].read_text(), re.MULTILINE))
    assert listed == {page.name for page in RESULTS.glob("*.md")} - {"README.md"}


def test_a_page_is_found_where_its_sections_are():
    for page in RESULTS.glob("*.md"):
        if page.name != "README.md":
            of_page, *of_sections = marks(page).values()
            assert of_page <= set(ENVIRONMENTS) and set().union(*of_sections) <= of_page, page.name


def test_a_page_that_names_an_accelerator_says_which_and_only_such_pages_count_as_found_there():
    for page in RESULTS.glob("*.md"):
        if page.name != "README.md":
            text, named = page.read_text(), marks(page)[""]
            assert ("GPU" in named) == bool(re.search(r"\b[HA]100|H200", text)), page.name
            assert ("TPU compiler" in named) == ("libtpu" in text), page.name


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    for file in TABLES:
        file.write_text(filled(file))
