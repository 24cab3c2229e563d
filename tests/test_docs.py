"""The documentation names what the code has: columns, statuses, commands, targets and files."""

from __future__ import annotations

import dataclasses
import pkgutil
import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.core
import typer.main

from lrbench import bench
from lrbench.analysis.accelerators.roofs import RoofRow
from lrbench.bench import drive, show, worker
from lrbench.bench.drive.profiling import ProfileRow
from lrbench.cli import app
from lrbench.kernels import FAMILIES
from lrbench.results.schema import RECORD_COLUMNS, STATUSES
from lrbench.results.select import load_rows
from lrbench.tests import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def table_names(text: str) -> set[str]:
    """Return what stands in code spans in the first cell of a table's rows."""
    cells = re.findall(r"^\| (`[^|]*?) \|", text, re.MULTILINE)
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_results_page_names_every_column_and_status() -> None:
    names = table_names((ROOT / "docs" / "results.md").read_text(encoding="utf-8"))
    assert names == {*RECORD_COLUMNS, *STATUSES}


@pytest.mark.parametrize("row", [RoofRow, ProfileRow], ids=lambda row: row.__name__)
def test_accelerator_page_names_every_column_that_results_do_not_have(row: type) -> None:
    names = table_names((ROOT / "docs" / "accelerators.md").read_text(encoding="utf-8"))
    assert {field.name for field in dataclasses.fields(row)} <= {*names, *RECORD_COLUMNS}


def test_readme_names_every_operation_that_has_results() -> None:
    """One that was just added has none yet, and passes."""
    names = table_names((ROOT / "README.md").read_text(encoding="utf-8"))
    measured = {row["op"] for row in load_rows(ROOT / "results" / "h200_sxm", ["op"])}
    assert {op for operations in FAMILIES.values() for op in operations} & measured <= names


@pytest.mark.parametrize("room", [bench, drive, show, worker], ids=lambda room: room.__name__)
def test_the_table_of_a_room_names_every_module(room: ModuleType) -> None:
    assert {module.name for module in pkgutil.iter_modules(room.__path__)} == table_names(room.__doc__ or "")


def test_format_formats_before_it_lints() -> None:
    """Also where a finding cannot be fixed: the command that fails on it comes last."""
    (recipe,) = re.findall(r"^format:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    commands = [line.split("/", 1)[1] for line in recipe.splitlines()]
    assert commands == ["ruff check --fix-only --quiet .", "ruff format .", "ruff check ."]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_names_files_targets_and_commands_that_exist(page: Path) -> None:
    """Commands are `lrbench COMMAND --option` on a line of its own or in a code span."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    # In code only: prose may "make sure" of something.
    assert set(re.findall(r"(?:^|`)make ([\w-]+)", text, re.MULTILINE)) <= targets
    code = [block for language, block in blocks if not language] + re.findall(r"`([^`\n]+)`", text)
    commands = typer.main.get_group(app).commands
    lines = re.findall(r"^lrbench ((?!COMMAND).+)", "\n".join(code), re.MULTILINE)
    assert lines
    for line in lines:
        name, *arguments = shlex.split(line, comments=True)
        assert name in commands, f"lrbench {line}"
        command = commands[name]
        if isinstance(command, typer.core.TyperGroup):
            assert arguments[0] in command.commands, f"lrbench {line}"
            command = command.commands[arguments[0]]
        known = {option for parameter in command.params for option in parameter.opts} | {"--help"}
        assert {argument for argument in arguments if argument.startswith("-")} <= known, f"lrbench {line}"


def test_examples_of_the_results_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Calibrations, profiles and texts lie beside the sweeps and the bars: the first example passes them over."""
    example, packing = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "results.md").read_text(), re.M | re.S)
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    exec(compile(example, "docs/results.md", "exec"), names)
    rows, fast = names["rows"], names["fast"]
    assert {*rows.kernel} == {"tfla", "lightning", "rglru", "wkv", "delta", "gated-mlp"}
    assert (fast > 0).all()
    assert {"fused_chunk", "flash_attn.v4"} <= set(fast.index.get_level_values("impl"))
    shutil.copytree(ROOT / "results" / "h200_sxm", tmp_path / "results" / "local")
    monkeypatch.chdir(tmp_path)
    exec(compile(packing, "docs/results.md", "exec"), names)
    packed = [[*map(repr, sorted(load_rows(path), key=repr))] for path in (tmp_path / "store.parquet", "results/local")]
    assert packed[0] == packed[1]
