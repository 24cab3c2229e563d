"""A report to look at, and a headless Chromium that looks at it and records every request it makes."""

from __future__ import annotations

import functools
import os
import socketserver
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lrbench.analysis.report import export

ROOT = Path(__file__).resolve().parents[3]
COMMITTED = ROOT / "results" / "h200_sxm"
REQUIRED = "LRBENCH_REQUIRE_BROWSER"

OF_THE_BROWSER = (
    "CONNECT accounts.google.com:443 HTTP/1.1",
    "CONNECT optimizationguide-pa.googleapis.com:443 HTTP/1.1",
)
"""What Chromium asks for itself, whatever the page, and no option forbids."""


@functools.cache
def committed_page() -> tuple[Path, float]:
    """Build the report of the committed H200 results once; return the file and the seconds it took."""
    pytest.importorskip("nbconvert")
    folder = Path(tempfile.mkdtemp(prefix="lrbench-report-"))
    start = time.monotonic()
    page = export.build({"results": [str(COMMITTED)], "gpu": "h200"}, folder / "report.html")
    return page, time.monotonic() - start


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


def look(page: Path, *arguments: str) -> tuple[str, list[str]]:
    """Open a page without a window and without a network.

    Args:
        arguments: what Chromium is to do: --dump-dom, --screenshot=FILE, --window-size=W,H.

    Returns:
        what it printed, and the requests that it made of anything but the file itself.
    """
    found = browser()
    with recorder() as (port, asked), tempfile.TemporaryDirectory(prefix="lrbench-browser-") as profile:
        wanted = ["--virtual-time-budget=5000", *arguments, page.resolve().as_uri()]
        command = export.browser_command(found, profile, *wanted, proxy=f"127.0.0.1:{port}")
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in asked if line not in OF_THE_BROWSER]
