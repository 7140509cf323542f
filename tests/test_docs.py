"""Pages that lead somewhere: every link and every file that a page names is there."""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = [ROOT, ROOT / "ddiloco", ROOT / "tests"]  # that paths in pages begin from


def test_links_lead_to_files():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:)([^)#\s]+)[^)]*\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert not broken, "\n".join(broken)


def anchors(page: pathlib.Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.S)
    titles = (re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.*)$", text, re.M))
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


def test_links_lead_to_headings():
    broken = [
        f"{page.relative_to(ROOT)}: {target}#{anchor}"
        for page in PAGES
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert not broken, "\n".join(broken)


def test_named_files_exist():
    named = re.compile(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|sh|proto|md))`")
    made = {"models/toy.py", "configs/toy.py", "ddiloco/models/toy.py"}  # docs/your_own.md
    missing = [
        f"{page.relative_to(ROOT)}: {path}"
        for page in PAGES
        for path in named.findall(page.read_text())
        if path not in made
        and not path.startswith("runs/")
        and not any((folder / path).exists() for folder in FOLDERS)
    ]
    assert not missing, "\n".join(missing)
