"""The site of the committed results: every link leads to a place in the folder, and every time to its row."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lrbench.analysis.derive import without_removed
from lrbench.analysis.report.markup import number
from lrbench.analysis.report.site import PROBLEM, write
from lrbench.results.select import latest_rows, load_results, ok_rows
from lrbench.results.store import committed_results
from lrbench.tests import ROOT
from lrbench.tests.command_line import Lrbench, refused

from .test_page import look


class Page(HTMLParser):
    """What a page names, what it loads, where it leads, and the cells of its rows."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.links: list[tuple[str, str]] = []
        self.rows: list[list[tuple[str, str]]] = [[]]
        self.cells: dict[str, list[str]] = {}
        self.row, self.link = "", ""
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.ids += [named["id"]] if "id" in named else []
        if tag == "tr":
            self.row = named.get("id", "")
            self.rows.append([])
        self.link = named.get("href", "") if tag == "a" else ""
        self.loads += [value for name, value in named.items() if name == "src" or (name == "href" and tag == "link")]

    def handle_endtag(self, tag: str) -> None:
        self.link = "" if tag == "a" else self.link

    def handle_data(self, data: str) -> None:
        if self.link:
            self.links.append((self.link, data))
            self.rows[-1].append((self.link.partition("#")[2], data))
        self.cells.setdefault(self.row, []).append(data.strip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("jinja2")
    return write(committed_results(), tmp_path_factory.mktemp("site")).parent


@pytest.fixture(scope="module")
def pages(folder: Path) -> dict[str, Page]:
    return {file.name: Page(file) for file in folder.glob("*.html")}


def test_every_link_leads_to_a_place_in_the_folder_and_nothing_else_is_loaded(
    folder: Path, pages: dict[str, Page]
) -> None:
    for name, page in pages.items():
        assert len(set(page.ids)) == len(page.ids), name
        for link, _ in page.links:
            to, _, place = link.partition("#")
            assert to in ("", *pages) and (not place or place in pages[to or name].ids), (name, link)
        assert {each for each in page.loads if not each.startswith("data:")} == {"style.css", "tables.js"}
        assert all((folder / each).is_file() for each in ("style.css", "tables.js"))
    reached, new = set(), {"index.html"}
    while new:
        reached |= new
        new = {link.partition("#")[0] or name for name in new for link, _ in pages[name].links} - reached
    assert reached == set(pages)


def test_every_row_is_there_and_times_lead_to_theirs(folder: Path, pages: dict[str, Page]) -> None:
    frame = load_results(committed_results())
    assert {name.removesuffix(".html") for name in pages} == {"index"} | {
        f"{op}{end}" for op in set(frame["op"]) for end in ("", "-rows")
    }
    for op, rows in frame.groupby("op"):
        assert len([row for row in pages[f"{op}-rows.html"].cells if row]) == len(rows)
        at, linked = pages[f"{op}-rows.html"].cells, [row for row in pages[f"{op}.html"].rows if row]
        for (place, time), *others in linked[1:]:
            assert time == at[place][3]
            if len(others) == 3:
                # The newest time, their ratio, and the number of runs.
                (place, newest), *others, _ = others
                assert newest == at[place][3]
            for place, ratio in others:
                slower_ms, ms = (float(each.replace(",", "")) for each in (at[place][3], time))
                assert float(ratio.replace(",", "")) == pytest.approx(slower_ms / ms, rel=0.01)
        assert len(linked) > (10 if len(rows) > 20 else 3)
    assert sum(file.stat().st_size for file in folder.iterdir()) < 5e6


@pytest.mark.parametrize("op", ["gla", "wkv4"])
def test_the_fastest_of_every_problem_is_named(pages: dict[str, Page], op: str) -> None:
    frame = load_results(committed_results())
    rows = ok_rows(without_removed(latest_rows(frame[frame["op"] == op])))
    fastest = rows[rows["suspect"].isna()].groupby(list(PROBLEM), dropna=False)["time_ms"].min()
    shown = [text for link, text in pages[f"{op}.html"].links if "rows.html#" in link]
    assert not {number(each, 4) for each in fastest} - {*shown}
    assert ("index.html", "All operations") in pages[f"{op}.html"].links


def test_a_browser_walks_from_every_operation_to_a_row_behind_a_number(folder: Path, pages: dict[str, Page]) -> None:
    """Every page is styled, shows its images and sorts its tables; none asks for anything else, or has an error."""
    # The policy forbids scripts in the page, so it comes at the end of the file.
    tables = folder / "tables.js"
    usual = tables.read_text()
    tables.write_text(usual + (ROOT / "tests/data/site.js").read_text())
    try:
        dom, asked, complaints = look(folder / "index.html", "--dump-dom", "--virtual-time-budget=100000")
    finally:
        tables.write_text(usual)
    assert (asked, complaints) == ([], [])
    found = dict(re.findall(r'data-(pages|wrong)="([^"]*)"', re.search(r"<body[^>]*>", dom)[0]))
    assert set(found["pages"].split()) == set(pages)
    assert found["wrong"] == ""


def test_a_site_is_of_all_devices_and_needs_a_folder(lrbench: Lrbench, tmp_path: Path) -> None:
    assert "--gpu cannot be given with --site" in refused(lrbench, "report", "--site", tmp_path, "--gpu", "h200")
    (tmp_path / "file").touch()
    results = committed_results("h100_sxm")[0] / "wkv.parquet"
    said = refused(lrbench, "report", results, "--site", tmp_path / "file")
    assert "--site must be a folder that can be written" in said
