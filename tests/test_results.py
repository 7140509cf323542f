"""Where each result was found: python -m tests.test_results --rewrite puts the pages' marks into their table.

A page of docs/results names its environments in a comment below its title, from which the table of
docs/results/README.md follows.
"""

import pathlib
import re
import sys

RESULTS = pathlib.Path(__file__).parent.parent / "docs/results"
ENVIRONMENTS = ("wall clock", "virtual time", "simulation", "GPU", "TPU compiler")
_MARK = re.compile(r"# [^\n]+\n<!-- found in: (.+) -->\n")


def environments(page):
    """The environments that a page names."""
    mark = _MARK.match(page.read_text())
    assert mark, f"{page.name}: names no environment below its title"
    named = mark[1].split(", ")
    assert set(named) <= set(ENVIRONMENTS), f"{page.name}: {named}"
    return named


def table(readme):
    """The README's table of pages, with the marks as they are in the pages."""

    def row(line):
        found = re.match(r"\| (.+?) \| \[(.+?)\]\((\w+\.md)\) \|", line)
        if not found:
            return line
        named = environments(RESULTS / found[3])
        marks = " | ".join("yes" if one in named else "" for one in ENVIRONMENTS)
        return f"| {found[1]} | [{found[2]}]({found[3]}) | {marks} |"

    header = f"| question | page | {' | '.join(ENVIRONMENTS)} |"
    lines = list(map(row, readme.splitlines()))
    at = next(i for i, line in enumerate(lines) if line.startswith("| question | page |"))
    lines[at : at + 2] = [header, "|---" * (2 + len(ENVIRONMENTS)) + "|"]
    return "\n".join(lines) + "\n"


def test_the_table_of_results_says_of_each_page_where_its_figures_were_found():
    readme = (RESULTS / "README.md").read_text()
    assert readme == table(readme), "python -m tests.test_results --rewrite"
    listed = set(re.findall(r"^\| .+? \| \[.+?\]\((\w+\.md)\) \|", readme, re.MULTILINE))
    assert listed == {page.name for page in RESULTS.glob("*.md")} - {"README.md"}


def test_a_page_that_names_an_accelerator_says_which_and_only_such_pages_count_as_found_there():
    for page in RESULTS.glob("*.md"):
        if page.name != "README.md":
            text, named = page.read_text(), environments(page)
            assert ("GPU" in named) == bool(re.search(r"\b[HA]100|H200", text)), page.name
            assert ("TPU compiler" in named) == ("libtpu" in text), page.name


if __name__ == "__main__" and sys.argv[1:] == ["--rewrite"]:
    file = RESULTS / "README.md"
    file.write_text(table(file.read_text()))
