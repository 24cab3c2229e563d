"""The command line of the bars."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ...analysis.accelerators.roofs import write_roofs
from . import __doc__ as HELP
from .model import Bar, Setting, Subject
from .verdicts import Verdict, judge, measured_table, overall, verdict_table

SUBJECTS = ("mlstm_gpu", "lightning", "rglru", "gated_mlp", "wkv")
"""Modules of this package with a SUBJECT that is measured on a GPU."""

Rounds = Annotated[int, typer.Option(min=3, help="Samples of every case.")]

app = typer.Typer(add_completion=False, no_args_is_help=True, help=HELP)


@app.callback()
def bars() -> None:
    """Measure the project's speed bars."""


@app.command()
def cpu(
    rounds: Rounds = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Rounds that are not counted.")] = 2,
) -> None:
    """Portable mLSTMexp against mlstm_kernels' native forms: fp32, B=1, 4 heads, T=4096, dqk 128, dv 256."""
    from . import mlstm_cpu

    console, errors = _console(), Console(stderr=True)

    def measured_apart(what: str, measure: Callable[..., Any], *args: Any, **options: Any) -> Any:
        try:
            return measure(*args, **options)
        except ImportError as error:
            reason = f"mlstm_kernels cannot be imported ({error}): pip install --no-deps {mlstm_cpu.PACKAGE} einops"
        except ValueError as error:
            reason = str(error)
        except BrokenProcessPool:
            reason = f"the process that measured {what} died (killed, or out of memory?)"
        errors.print(reason, markup=False)
        raise typer.Exit(2)

    def thread_gain() -> float:
        return measured_apart("two threads beside one", mlstm_cpu.thread_gain)

    verdicts: list[Verdict] = []
    busy: list[Bar] = []
    gains = [thread_gain()]
    try:
        for bar in mlstm_cpu.BARS:
            name = f"{bar.mode}, {bar.ours} beside {bar.theirs}"
            sides = measured_apart(name, mlstm_cpu.measure_apart, bar, rounds=rounds, warmup=warmup)
            console.print(measured_table(sides))
            verdicts += judge([bar], sides)
            gains.append(thread_gain())
            if min(gains[-2:]) < mlstm_cpu.FREE_CORES_GAIN:
                busy.append(bar)
    finally:
        if verdicts:
            console.print(verdict_table(verdicts, undecidable=busy))
    reached = ", ".join(f"{gain:.3g}" for gain in gains)
    console.print(f"{mlstm_cpu.THREADS} threads reached {reached} times one, before and after each bar")
    if busy:
        console.print(
            f"beside a bar that reads below {mlstm_cpu.FREE_CORES_GAIN:g} this machine did not have "
            f"{mlstm_cpu.THREADS} free cores, and a miss is not decidable"
        )
    raise typer.Exit(0 if all(verdict.held for verdict in verdicts) else 1)


def measure_subject(subject: Subject, settings: list[Setting], rounds: int, output: Path) -> bool:
    """Measure and print the settings of a subject, keep the rows in ``output``; return whether every bar is held."""
    from ...results import store
    from . import gpu

    console, errors = _console(), Console(stderr=True)
    for line in store.recovered_notes(store.recover(output)):
        errors.print(line, markup=False)
    console.print(f"{subject.summary} {_device_name()}, {rounds} rounds")
    verdicts = []
    name = f"{store.BARS_PREFIX}{subject.name}-{datetime.now(timezone.utc):%Y%m%dT%H%M%SZ}-{uuid.uuid4().hex[:8]}"
    with store.RunWriter(output, name) as writer:
        for setting, measured in gpu.measure(
            subject,
            settings,
            rounds=rounds,
            measured_case=writer.append,
            measured_copy=lambda row: write_roofs([row], writer.path.with_suffix(".copies.parquet")),
            started=lambda item: errors.print(f"{item.case.impl}, {item.case.mode}", markup=False),
        ):
            here = judge(setting.bars, measured)
            console.print(f"{setting.label}, {setting.dtype}")
            console.print(measured_table(measured))
            console.print(verdict_table(here))
            verdicts += here
        together = overall(subject.overall, verdicts)
        if together:
            console.print(verdict_table(together))
    console.print(f"{len(writer.records)} rows in {writer.path}")
    return all(verdict.held for verdict in (*verdicts, *together))


def _command(subject: Subject) -> Callable[..., None]:
    def measure(
        rounds: Rounds = 20,
        only: Annotated[str | None, typer.Option(help="Only settings whose label contains this text.")] = None,
        output: Annotated[Path, typer.Option(help="Folder for the rows.")] = Path("results/local"),
    ) -> None:
        import torch

        errors = Console(stderr=True)
        settings = [setting for setting in subject.settings if only is None or only in setting.label]
        if not settings:
            labels = "; ".join(setting.label for setting in subject.settings)
            errors.print(f"only must be part of one of these labels: {labels}; got {only!r}", markup=False)
            raise typer.Exit(2)
        if not torch.cuda.is_available():
            errors.print("these bars need an NVIDIA GPU, and none is here")
            raise typer.Exit(2)
        raise typer.Exit(0 if measure_subject(subject, settings, rounds, output) else 1)

    measure.__doc__ = subject.summary
    return measure


def load_subject(name: str) -> Subject:
    """Return the subject that a module of this package declares."""
    return importlib.import_module(f".{name}", __package__).SUBJECT


def _device_name() -> str:
    import torch

    return torch.cuda.get_device_name()


def _console() -> Console:
    options: dict[str, Any] = {} if sys.stdout.isatty() else {"width": 160}
    return Console(**options)


for _name in SUBJECTS:
    _subject = load_subject(_name)
    app.command(_subject.name, help=_subject.summary)(_command(_subject))
