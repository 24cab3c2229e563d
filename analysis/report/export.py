"""From the notebook to one file: parameters in, execution, HTML without a link to anything, and a PDF of that.

The HTML comes from a template of its own rather than from one of nbconvert's, whose pages load require.js, MathJax and
mermaid.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...results.store import replacing

if TYPE_CHECKING:
    from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "notebooks" / "report.ipynb"
TEMPLATE = Path(__file__).with_name("template.html.j2")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PACKAGES = ("nbformat", "nbclient", "nbconvert", "ipykernel")
TIMEOUT_S = 600
NOWHERE = "127.0.0.1:1"


def check_extra() -> None:
    """Raise ValueError where the packages of the extra are not installed."""
    import importlib.util

    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(f"a report needs {', '.join(missing)}: pip install 'lrbench[report]'")


def execute(notebook: NotebookNode, *, begins: Callable[[int], None] = lambda _: None) -> NotebookNode:
    """Run a notebook in place with the running Python, in the current folder; RuntimeError names a cell that failed.

    ``begins`` is called with the number of each cell that begins to run.
    """
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import KernelManager
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError

    # The kernel talks over sockets in a folder of its own, not over ports that others on the machine can reach.
    transport = {"transport": "ipc"} if os.name == "posix" else {}
    with tempfile.TemporaryDirectory(prefix="lrbench-") as sockets:
        manager = KernelManager(
            kernel_name="python3",
            # No folders: kernels that are installed elsewhere under the name python3 are not this Python.
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[]),
            connection_file=str(Path(sockets) / "kernel.json"),
            **transport,
        )
        client = NotebookClient(
            notebook,
            km=manager,
            timeout=TIMEOUT_S,
            on_cell_start=lambda cell, cell_index: begins(cell_index),
            # The kernel has nothing to clean up, and a polite shutdown may take seconds.
            shutdown_kernel="immediate",
            extra_arguments=["--InteractiveShellApp.ignore_cwd=True", "--HistoryManager.enabled=False"],
        )
        try:
            # In a clone of the repository its folders must not be imported as packages of their names. The kernel is
            # ours, so the client ends it.
            client.execute(cleanup_kc=True, env={**os.environ, "PYTHONSAFEPATH": "1"})
        except CellExecutionError as error:
            kinds = ([output.output_type for output in cell.get("outputs", ())] for cell in notebook.cells)
            failed = next((n for n, of in enumerate(kinds, start=1) if "error" in of), 0)
            raise RuntimeError(f"cell {failed} of the notebook failed: {error.ename}: {error.evalue}") from error
    return notebook


def to_html(notebook: NotebookNode) -> str:
    """Return an executed notebook as one page that needs nothing beside it."""
    from nbconvert.exporters import HTMLExporter

    nothing = dict.fromkeys(("require_js_url", "mathjax_url", "mermaid_js_url", "jquery_url"), "")
    exporter = HTMLExporter(template_file=str(TEMPLATE), exclude_anchor_links=True, **nothing)
    with warnings.catch_warnings():
        # The exporter looks for alt texts on outputs; those of the report stand in its own HTML.
        warnings.simplefilter("ignore")
        page, _ = exporter.from_notebook_node(notebook)
    return str(page)


def build(parameters: Mapping[str, Any], output: Path, tell: Callable[[str], None] = lambda _: None) -> Path:
    """Execute the report's notebook and write the page; the file appears when it is whole.

    Args:
        parameters: results and gpu; a cell of assignments is inserted after the one tagged ``parameters``.
        tell: called with a line about each section that begins.
    """
    import nbformat

    notebook = nbformat.read(NOTEBOOK, as_version=4)
    tagged = next(n for n, cell in enumerate(notebook.cells) if "parameters" in cell.metadata.get("tags", ()))
    source = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    notebook.cells.insert(tagged + 1, nbformat.v4.new_code_cell(source))
    sections = [n for n, cell in enumerate(notebook.cells) if cell.source.startswith("## ")]

    def begins(cell: int) -> None:
        if cell - 1 in sections:
            heading = notebook.cells[cell - 1].source.partition("\n")[0][3:]
            tell(f"{sections.index(cell - 1) + 1} of {len(sections)}: {heading.lower()}")
        elif notebook.cells[cell].source == "report.opening()":
            tell("findings and first figure")

    page = to_html(execute(notebook, begins=begins))
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
