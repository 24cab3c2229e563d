"""The command ``report``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

LOCAL = Path("results/local")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""

    @app.command("report")
    def report_command(
        results: Annotated[
            list[Path] | None,
            typer.Argument(help="Result files or folders [those committed of --gpu, else results/local, else all]."),
        ] = None,
        gpu: Annotated[str, typer.Option(help="Accelerator the report is about; see `lrbench gpus`.")] = "h100",
        output: Annotated[Path, typer.Option("--output", "-o", help="The page: .html.")] = Path("report.html"),
        pdf: Annotated[
            bool | None, typer.Option(help="A PDF beside the page, printed by Chromium or Chrome [where one is here].")
        ] = None,
    ) -> None:
        """Write a report: one HTML file with figures, tables, a summary and the rows; it opens without a network."""
        from . import export
        from .subject import load_subjects

        export.check_extra()
        if output.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"output must end in .html, got {output.name!r}")
        if output.is_dir():
            raise ValueError(f"output must be a file, got the folder {output}")
        _check_writable(output)
        browser = None if pdf is False else export.find_browser()
        if pdf and browser is None:
            raise ValueError(f"pdf needs one of {', '.join(export.BROWSERS)}: install one, or leave --pdf out")
        paths = results or default_results(gpu)
        # Bad input is refused here in a line, before a notebook is run on it.
        load_subjects(paths, gpu)
        page = export.build({"results": [str(path) for path in paths], "gpu": gpu}, output)
        print(page)
        if browser is None:
            if pdf is None:
                print("no PDF: neither Chromium nor Chrome is installed", file=sys.stderr)
            return
        try:
            print(export.to_pdf(page, page.with_suffix(".pdf"), browser))
        except RuntimeError as error:
            # The page is there; only who insisted on a PDF has failed.
            if pdf:
                raise
            print(f"no PDF: {error}", file=sys.stderr)


def _check_writable(output: Path) -> None:
    """Make the folder of ``output``; ValueError where it cannot be made or written."""
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=output.parent).close()
    except OSError as error:
        raise ValueError(f"--output must be a file that can be written, got {output}: {error.strerror}") from error


def default_results(gpu: str) -> list[Path]:
    """Return the results to report where none are named, and say which on stderr.

    Raises:
        ValueError: there are none, or ``gpu`` is unknown.
    """
    from ...results.store import committed_results, holds_results
    from ..accelerators.known import get_accelerator

    key = get_accelerator(gpu).key
    found = [shown(path) for path in committed_results(key)]
    if not found and LOCAL.is_dir() and any(map(holds_results, LOCAL.rglob("*.parquet"))):
        found = [LOCAL]
    found = found or [shown(path) for path in committed_results()]
    if not found:
        raise ValueError("results must be named where none are committed and results/local holds none, got none")
    print(f"results: {', '.join(map(str, found))}", file=sys.stderr)
    return found


def shown(path: Path) -> Path:
    """Return a path relative to the current folder where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path
