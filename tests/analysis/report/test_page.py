"""The page of the committed results: whole in itself, and shown by a browser without a network.

A browser requests nothing, shows everything, and its tables sort. The page takes its time, so its tests share it.
"""

from __future__ import annotations

import base64
import csv
import gzip
import io
import os
import re
import socketserver
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lrbench.analysis.report import export
from lrbench.analysis.report.contents import Report
from lrbench.results.select import latest_rows, load_results
from lrbench.tests import ROOT
from lrbench.tests.command_line import full_speed_seconds

COMMITTED = ROOT / "results" / "h200_sxm"
REQUIRED = "LRBENCH_REQUIRE_BROWSER"

OF_THE_BROWSER = (
    "CONNECT accounts.google.com:443 HTTP/1.1",
    "CONNECT optimizationguide-pa.googleapis.com:443 HTTP/1.1",
)
"""What Chromium asks for itself, whatever the page, and no option forbids."""


POLICY = re.compile(r'<meta[^>]*http-equiv="Content-Security-Policy"[^>]*>')


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    """The report of the committed H200 results, and the seconds that it takes a core at full speed."""
    pytest.importorskip("mistune")
    output = tmp_path_factory.mktemp("report") / "report.html"
    return output, full_speed_seconds(lambda: export.build(Report.load([COMMITTED], "h200"), output))


@pytest.fixture(scope="module")
def page(built: tuple[Path, float]) -> Path:
    return built[0]


def test_committed_results_take_less_than_twelve_seconds(built: tuple[Path, float]) -> None:
    assert built[1] < 12


@pytest.fixture(scope="module")
def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def test_page_needs_nothing_beside_it(text: str) -> None:
    """Whatever loads is in the page; links lead within it."""
    loads = re.findall(r"""(?:src|href|srcset|action|poster|data)\s*=\s*["']([^"']{0,40})""", text)
    assert len(loads) > 20
    assert not [each for each in loads if not each.startswith(("data:", "#"))]
    without_data = re.sub(r"data:[\w/+;=,-]*[A-Za-z0-9+/=]{100,}", "", text)
    for banned in ("http://", "https://", "url(", "@import", "require", "MathJax", "mermaid", "jupyter"):
        assert banned.lower() not in without_data.lower(), banned


def test_page_has_every_section_and_no_code(text: str) -> None:
    headings = re.findall(r'<h2 id="([^"]+)">', text)
    assert headings == [
        "at-one-sequence-length", "figures", "best-chunk-length-and-regret", "speed-up-over-baselines", "failures",
        "other-devices", "environment", "methods", "data",
    ]  # fmt: skip
    assert "load_results" not in text
    assert "Report.load" not in text
    assert text.count("<h1>") == 1


def test_every_image_has_words(text: str) -> None:
    images = re.findall(r"<img[^>]*>", text)
    assert len(images) > 20
    alts = [re.search(r'alt="([^"]*)"', image) for image in images]
    assert all(alts)
    figures = [found[1] for found in alts if found]
    assert all("NVIDIA H200" in alt and re.search(r"\d", alt) for alt in figures)
    assert len(set(figures)) == len(figures) - 1, "the first stands among the others again"


def test_data_holds_the_rows(text: str) -> None:
    found = re.search(r'href="data:application/gzip;base64,([^"]+)"', text)
    rows = list(csv.DictReader(io.StringIO(gzip.decompress(base64.b64decode(found[1])).decode())))
    frame = latest_rows(load_results(COMMITTED))
    assert {each["case_id"] for each in rows} == set(frame["case_id"])
    assert len(rows) == len(frame)
    times = sorted(float(each["time_ms"]) for each in rows if each["time_ms"])
    assert times == pytest.approx(sorted(frame["time_ms"].dropna()))


def test_the_page_of_the_committed_results_is_small(text: str) -> None:
    assert len(text.encode()) < 3e6


def browser() -> str:
    """Return the browser; without one the test is skipped, or fails where one is required."""
    found = export.find_browser()
    if found is None:
        said = f"no browser: none of {', '.join(export.BROWSERS)} is on the PATH"
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{said}, and {REQUIRED}=1")
        pytest.skip(said)
    return found


@contextmanager
def recorder() -> Iterator[tuple[int, list[str]]]:
    """Listen on a port as a proxy that serves nothing; yield it and the first lines of what was asked of it."""
    asked: list[str] = []

    class Handler(socketserver.StreamRequestHandler):
        timeout = 10

        def handle(self) -> None:
            asked.append(self.rfile.readline().decode("latin-1").strip())
            self.wfile.write(b"HTTP/1.1 502 Nothing here\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield server.server_address[1], asked
        finally:
            server.shutdown()


def look(page: Path, *arguments: str) -> tuple[str, list[str], list[str]]:
    """Open a page without a window and without a network.

    Args:
        arguments: what Chromium is to do: --dump-dom, --screenshot=FILE, --window-size=W,H.

    Returns:
        what it printed, the requests that it made of anything but files, and what its console says.
    """
    found = browser()
    with recorder() as (port, asked), tempfile.TemporaryDirectory(prefix="lrbench-browser-") as profile:
        wanted = ["--enable-logging=stderr", "--virtual-time-budget=5000", *arguments, page.resolve().as_uri()]
        command = export.browser_command(found, profile, *wanted, proxy=f"127.0.0.1:{port}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, [line for line in asked if line not in OF_THE_BROWSER], console


def with_script(page: Path, script: str, to: Path) -> Path:
    """Write the page with a script at its end; what the script leaves in the body's data is in the DOM."""
    text = page.read_text(encoding="utf-8")
    to.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    return to


def test_recorder_sees_what_a_page_asks_for(tmp_path: Path) -> None:
    """Else the tests below would pass on any page."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        '<img src="http://example.com/x.png"><script src="https://cdn.example.com/require.js"></script><script>lost()</script>'
    )
    _, asked, console = look(bad, "--dump-dom")
    # A slow machine's browser opens a second connection to what it asks for, and closes it without a word.
    assert {line.split()[1] for line in asked if line} == {"http://example.com/x.png", "cdn.example.com:443"}
    assert any("lost" in line for line in console)


def test_page_asks_for_nothing(page: Path, tmp_path: Path) -> None:
    """Neither as it is nor without the policy that would keep it from asking."""
    text, found = POLICY.subn("", page.read_text(encoding="utf-8"))
    assert found == 1
    free = tmp_path / "free.html"
    free.write_text(text, encoding="utf-8")
    for each in (page, free):
        dom, asked, console = look(each, "--dump-dom")
        assert (asked, console) == ([], [])
        assert dom.count("<figure>") >= 10


def test_policy_keeps_the_page_from_asking(page: Path, tmp_path: Path) -> None:
    text = page.read_text(encoding="utf-8").replace("</main>", '<img src="http://example.com/x.png"></main>')
    bad = tmp_path / "bad.html"
    bad.write_text(text, encoding="utf-8")
    assert look(bad, "--dump-dom")[1] == []


@pytest.fixture(scope="module")
def acted(page: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The DOM after scripts that count images, sort a table and go through what takes the focus."""
    scripts = (ROOT / "tests/data/page.js").read_text()
    acting = with_script(page, scripts, tmp_path_factory.mktemp("acted") / "page.html")
    return look(acting, "--dump-dom", "--window-size=500,800")[0]


def test_every_image_is_drawn(acted: str) -> None:
    """A broken image has no natural width; on a narrow screen whole ones keep theirs, and only they scroll."""
    counts = {name: int(value) for name, value in re.findall(r'data-(drawn|images|full|sideways)="(\d+)"', acted)}
    assert counts["drawn"] == counts["images"] == counts["full"] >= 20
    assert counts["sideways"] == 0


def test_no_figure_cuts_off_its_text(acted: str) -> None:
    """Labels, legends and titles lie within their picture, in a slightly wider font too."""
    counts = {name: int(value) for name, value in re.findall(r'data-(texts|whole)="(\d+)"', acted)}
    assert counts["texts"] == counts["whole"] > 1000


def test_sizes_stand_above_the_table_and_small_labels_keep_their_digits(text: str) -> None:
    assert text.index("tfla: T = 8,192") < text.index("<caption>Their time over ours")
    pictures = [base64.b64decode(each).decode() for each in re.findall(r'"data:image/svg\+xml;base64,([^"]+)"', text)]
    ticks = [re.findall(r"<text[^>]*>(0\.\d+)</text>", each) for each in pictures]
    assert any("0.003" in each for each in ticks) and not any("0.00" in each for each in ticks)


def test_tables_sort_by_their_buttons(acted: str) -> None:
    """Numbers as numbers, in both directions, empty cells last; the header says how."""
    for name, order, sign in (("up", "ascending", 1), ("down", "descending", -1)):
        found = re.search(rf'data-{name}="([^"]*)"', acted)
        said, *values = found[1].split()
        numbers = [sign * float(value) for value in values if value != "none"]
        assert said == order
        assert len(numbers) > 10
        assert numbers == sorted(numbers)
        assert values[len(numbers) :] == ["none"] * (len(values) - len(numbers)) != []


def test_everything_that_acts_can_be_focused(acted: str) -> None:
    """Sorting, what scrolls sideways and what opens take the keyboard's focus; ids that links name exist."""
    counts = {name: int(value) for name, value in re.findall(r'data-(acts|focused|dangling)="(\d+)"', acted)}
    assert counts["focused"] == counts["acts"] > 100
    assert counts["dangling"] == 0


def test_pdf_is_printed(page: Path, tmp_path: Path) -> None:
    pdf = export.to_pdf(page, tmp_path / "report.pdf", browser())
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF-")
    assert len(re.findall(rb"/Type\s*/Page\b", content)) >= 5
