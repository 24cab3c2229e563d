"""From the notebook to one file: cells run, HTML without a link to anything, and a PDF of that.

The cells run in this process: they call one method a section and need no kernel of Jupyter's.
"""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...results.store import replacing
from .markup import Html, join, templates

if TYPE_CHECKING:
    from .contents import Report

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "report.ipynb"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKAGES = ("jinja2", "mistune")
BESIDE = ("report.opening()", "report.figures()", "report.optimal_chunks()")
"""The cells that need what :meth:`.Report.begin` begins: the last to run."""

TIMEOUT_S = 600
NOWHERE = "127.0.0.1:1"


def check_extra() -> None:
    """Raise ValueError where the packages of the extra are not installed."""
    import importlib.util

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a report needs {', '.join(missing)}: pip install 'lrbench[report]'")


def cells_of(notebook: Path) -> list[tuple[str, str]]:
    """Return the cells of a notebook: markdown, code or parameters, as it is tagged, and the source."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    kinds = ["parameters" if "parameters" in cell["metadata"].get("tags", ()) else cell["cell_type"] for cell in cells]
    return [(kind, "".join(cell["source"])) for kind, cell in zip(kinds, cells, strict=True)]


def run_cell(number: int, source: str, names: dict[str, Any]) -> Any:
    """Run a cell and return the value of its last expression, None without one; RuntimeError names a cell that failed.

    Args:
        names: what cells before it defined; it adds its own.
    """
    code = ast.parse(source)
    last = code.body[-1]
    try:
        if not isinstance(last, ast.Expr):
            return exec(compile(code, f"cell {number}", "exec"), names)
        exec(compile(ast.Module(code.body[:-1], []), f"cell {number}", "exec"), names)
        return eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), names)
    except Exception as error:
        raise RuntimeError(f"cell {number} of the notebook failed: {type(error).__name__}: {error}") from error


def beside(make: Callable[[], T]) -> Callable[[], T]:
    """Begin to make something in a copy of this process, and return what waits for it; outside Linux, what makes it."""
    if sys.platform != "linux":
        return make
    copies = multiprocessing.get_context("fork")
    here, there = copies.Pipe(duplex=False)
    copy = copies.Process(target=lambda: there.send(make()), daemon=True)
    copy.start()
    there.close()

    def wait() -> T:
        try:
            made: T = here.recv()
        except EOFError:
            # It failed: that is said where it fails again.
            made = make()
        copy.join()
        return made

    return wait


def build(report: Report, output: Path) -> Path:
    """Run the report's notebook and write the page; the file appears when it is whole.

    Args:
        report: what the cells show, in place of the notebook's parameters.
    """
    import mistune

    in_html, names = mistune.create_markdown(escape=False), {"report": report}
    cells, parts = list(enumerate(cells_of(NOTEBOOK), start=1)), [("", Html(""))]
    finish = report.begin(beside)
    early = [(n, source) for n, (kind, source) in cells if kind == "code" and source not in BESIDE]
    shown = {n: run_cell(n, source, names) for n, source in early}
    finish()
    for n, (kind, source) in cells:
        if source.startswith("## "):
            heading, _, source = source[3:].partition("\n")
            parts.append((heading, Html("")))
        if kind != "parameters":
            if n not in shown:
                shown[n] = run_cell(n, source, names) if kind == "code" else Html(str(in_html(source)))
            parts[-1] = parts[-1][0], join(parts[-1][1], shown[n])
    page = templates().get_template("template.html.j2").render(parts=parts)
    with replacing(output) as file:
        file.write(page.encode())
    return output


def find_browser() -> str | None:
    """Return the program that prints pages to PDF: LRBENCH_BROWSER, else a Chromium or Chrome on the PATH; or None."""
    named = os.environ.get("LRBENCH_BROWSER")
    return next(filter(None, map(shutil.which, [named] if named else BROWSERS)), None)


def browser_command(browser: str, profile: str | Path, *arguments: str, proxy: str = NOWHERE) -> list[str]:
    """Return the command that runs a Chromium without a window, all of whose requests go to ``proxy``.

    Args:
        profile: an empty folder that the browser may fill.
        arguments: what it is to do, and the page.
        proxy: host and port; by default nobody answers there, so that neither page nor browser reaches a network.
    """
    quiet = ["--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars", "--no-first-run"]
    quiet += ["--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"]
    quiet += [
        "--disable-features=NetworkTimeServiceQuerying,OptimizationHints,PreconnectToSearch,"
        "AimServerRequestOnStartupEnabled",
        "--component-updater=url-source=file:///dev/null",
        "--gcm-checkin-url=file:///dev/null",
    ]
    quiet += [f"--proxy-server=http://{proxy}", "--proxy-bypass-list=<-loopback>", f"--user-data-dir={profile}"]
    # Chromium's sandbox does not run as root, and containers do.
    sandbox = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    return [browser, *quiet, *sandbox, *arguments]


def to_pdf(page: Path, output: Path, browser: str) -> Path:
    """Print a page to PDF; RuntimeError where the browser fails."""
    with tempfile.TemporaryDirectory(prefix="lrbench-") as profile:
        printing = ["--no-pdf-header-footer", f"--print-to-pdf={output.resolve()}", page.resolve().as_uri()]
        try:
            done = subprocess.run(
                browser_command(browser, profile, *printing), capture_output=True, text=True, timeout=TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise RuntimeError(f"{browser} printed no PDF: {error}") from error
    if done.returncode or not output.is_file():
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"{browser} printed no PDF: {last}")
    return output
