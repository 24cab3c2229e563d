"""Where a measurement ran: versions, device, repository, and the device's clocks and power while it ran."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import itertools
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from .. import __version__
from ..analysis.accelerators import cpu
from ..analysis.accelerators import known as accelerators
from ..kernels import FAMILIES, FOLDERS
from ..results.schema import DeviceState, Environment, Record, TritonRow, was_tried
from ..results.select import load_rows
from ..results.store import HERE, files_in
from ..results.toml_tables import read_toml
from .plan import Identity, Triton

ROOT = Path(__file__).resolve().parent.parent
MEASURED_BY = tuple(f":(glob)bench/**/{name}.py" for name in ("worker", "clock", "memory", "autotuning"))
"""The timing code: what a time depends on besides the kernel."""

ENGINE = (*FAMILIES["tfla"], *FAMILIES["lightning"], *FAMILIES["delta"])
"""Operations that kernels/scalar_decay computes, or whose forms use its parts."""


@functools.cache
def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def find_tritons(texts: Sequence[str]) -> tuple[Triton, ...]:
    """Return the Tritons that ``--triton`` names: ``here``, the installed one, or VERSION=FOLDER, one beside it.

    Raises:
        ValueError: neither form, no Triton there, another version than named, or a version twice.
    """
    found: dict[str, Triton] = {}
    for text in texts:
        version, equals, folder = text.partition("=")
        if text != "here" and not (version and equals and folder):
            raise ValueError(f"--triton must be here or VERSION=FOLDER, got {text!r}")
        path = [str(Path(folder).resolve())] if folder else sys.path
        there = next(iter(metadata.distributions(name="triton", path=path)), None)
        if there is None:
            where = f"the folder {folder}" if folder else "what is installed here"
            command = f"pip install --no-deps --target {folder} triton=={version}" if folder else "pip install triton"
            raise ValueError(f"--triton {text}: there is no triton in {where}; {command}")
        if folder and not f"{there.version.partition('+')[0]}.".startswith(f"{version}."):
            raise ValueError(f"--triton {text}: the folder has triton {there.version}, not {version}")
        if there.version in found:
            raise ValueError(f"--triton must name each version once, got {there.version} twice")
        found[there.version] = Triton(version=there.version, folder=path[0] if folder else None)
    return tuple(found.values())


def git_state() -> tuple[str | None, bool | None]:
    """Return (commit, dirty) of the checkout that holds this package, or of what LRBENCH_GIT_COMMIT names.

    Dirty means a tracked file outside results/ differs from the commit. Where the source was carried without its
    repository (a container image, a copy on a cluster) the variables LRBENCH_GIT_COMMIT and LRBENCH_GIT_DIRTY (0 or 1)
    say what it was; without them both are None.
    """
    if commit := os.environ.get("LRBENCH_GIT_COMMIT"):
        return commit, os.environ.get("LRBENCH_GIT_DIRTY", "0") not in ("", "0")
    if not (ROOT / ".git").exists():
        return None, None
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
    except (OSError, subprocess.SubprocessError):
        return None, None
    return head, bool(changed)


def is_of(row: Mapping[str, Any], commit: str | None) -> bool:
    """Return whether a commit has the code that a row was measured with: its kernel, or its package's adapter, and the
    timing.

    So a row of an earlier commit counts where only documents, comments or docstrings changed since, or what
    results/same_code.toml says changes no time. Without a commit every row counts.
    """
    if commit is None:
        return True
    code = _code_of(row["op"], row["provider"])
    own = {row["op"], row["dtype"], *(f"{row['op']} {row.get(name)}" for name in ("impl", "mode"))}
    same = [each for each in rewrites() if not own & {*each.but}]

    def counts(measured: str | None, later: Sequence[Rewrite]) -> bool:
        return _same_code(measured, commit, code) or any(
            _same_code(measured, each.before, code) and counts(each.after, later[n:])
            for n, each in enumerate(later, start=1)
        )

    return counts(row["git_commit"], same)


def rows_of(folder: Path, environment: Environment, row: type[Record] = Record, **wanted: Any) -> list[dict[str, Any]]:
    """Return a folder's rows of the same device, code and state of the tree, clean or dirty.

    Args:
        row: the row set.
        wanted: further columns and their values.
    """
    files = files_in(folder, [row])
    wanted |= {name: getattr(environment, name) for name in ("device_name", "git_dirty")}
    rows = load_rows(files, where=wanted) if files else []
    return [row for row in rows if is_of(row, environment.git_commit)]


def finished_cases(
    folder: Path, environment: Environment, *, failed: bool = False, tritons: bool = False
) -> dict[Identity, Record]:
    """Return identity -> row of the cases that ``--resume`` need not run again, the newest where there are several.

    Those are the cases of :func:`rows_of` with status ok, or with ``failed`` all that were tried.

    Args:
        tritons: look among the rows of sweeps that compare Tritons, whose versions tell their cases apart.
    """
    found = rows_of(folder, environment, TritonRow if tritons else Record, **({} if failed else {"status": "ok"}))
    found = sorted(filter(was_tried, found), key=lambda row: row["measured_at"])
    return {(row["case_id"], row["triton_version"] if tritons else None): Record(**row) for row in found}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """Two commits between which kernels changed, but not what they take.

    Attributes:
        but: what did change: an operation, an operation and an implementation or a mode ("rglru naive", "rglru step"),
            or a dtype ("fp32").
        why: how it is known.
    """

    before: str
    after: str
    why: str
    but: tuple[str, ...] = ()


@functools.cache
def rewrites() -> tuple[Rewrite, ...]:
    """Return the rewrites that results/same_code.toml lists, oldest first."""
    path, form = HERE / "same_code.toml", {"rewrites": tuple[Rewrite, ...]}
    return read_toml(path, form, "rewrites")["rewrites"]


@functools.cache
def _code_of(op: str, provider: str) -> tuple[str, ...]:
    """Return the paths, as git takes them, of a row's kernel: for ours all of kernels/ but what it cannot use."""
    if provider != "lrbench":
        return ("kernels/baselines",)
    folders = {each: FOLDERS.get(each, each) for each in itertools.chain.from_iterable(FAMILIES.values())}
    others = {"baselines", "integrations", *folders.values()} - {folders.get(op)}
    if op not in ENGINE:
        others.add("scalar_decay")
    return ("kernels", *(f":!kernels/{name}*" for name in sorted(others)))


@functools.cache
def _same_code(one: str | None, other: str, code: tuple[str, ...]) -> bool:
    """Return whether two commits have the same statements at ``code`` and in the timing; no if git cannot tell."""
    if one is None or one == other:
        return one == other
    differ = ("diff", "--name-only", "--no-renames", "--end-of-options", one, other, "--", *code, *MEASURED_BY)
    try:
        return all(_statements(one, name) == _statements(other, name) for name in _git(*differ).splitlines())
    except (OSError, subprocess.SubprocessError, SyntaxError):
        return False


@functools.cache
def _statements(commit: str, name: str) -> str:
    """Return what a file of a commit does, whatever its comments and docstrings say; raises where it is not there."""
    return ast.dump(_WithoutTexts().visit(ast.parse(_git("show", f"{commit}:{name}"))))


class _WithoutTexts(ast.NodeTransformer):
    """Leaves out strings that nothing uses, as docstrings are."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        unused = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if unused else node


def _git(*arguments: str) -> str:
    command = ("git", "-C", str(ROOT), *arguments)
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return result.stdout.strip()


def current_environment(device_kind: str | None = None) -> Environment:
    """Return this process's environment; imports torch, and on a GPU opens a CUDA context.

    Args:
        device_kind: "cpu" for that of the CPU where there is a GPU too.
    """
    import torch

    if device_kind == "cpu" or not torch.cuda.is_available():
        threads = torch.get_num_threads()
        return _of_processor(torch.__version__, torch.version.cuda, f", {threads} thread{'s' * (threads != 1)}")
    import pynvml

    driver, properties = None, torch.cuda.get_device_properties(0)
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    return dataclasses.replace(
        _of_processor(torch.__version__, torch.version.cuda),
        device_kind="cuda",
        device_name=properties.name,
        device_accelerator=accelerators.match_device(properties.name),
        capability=f"{properties.major}.{properties.minor}",
        device_count=torch.cuda.device_count(),
        memory_bytes=properties.total_memory,
        driver_version=driver,
        **_compiler(properties.major * 10 + properties.minor),
    )


def without_gpu() -> Environment | None:
    """Return the environment, but for threads and CUDA's version, where NVML finds no GPU; else None.

    It takes no worker, so it is there in no time.
    """
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        if pynvml.nvmlDeviceGetCount():
            return None
    return _of_processor(metadata.version("torch"))


def _of_processor(torch_version: str, cuda: str | None = None, threads: str = "") -> Environment:
    commit, dirty = git_state()
    return Environment(
        device_kind="cpu",
        device_name=f"{cpu.model_name()}{threads}",
        device_accelerator="cpu",
        capability=None,
        device_count=0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        torch_version=torch_version,
        triton_version=version_of("triton"),
        cuda_version=cuda,
        driver_version=None,
        python_version=platform.python_version(),
        lrbench_version=__version__,
        git_commit=commit,
        git_dirty=dirty,
    )


def _compiler(capability: int) -> dict[str, Any]:
    """Return the version of the assembler that Triton takes for a GPU, and whether it fuses products and sums unasked.

    Nothing of a Triton that says it elsewhere, or that is not there.
    """
    with contextlib.suppress(Exception):
        from triton import knobs
        from triton.backends.nvidia.compiler import get_ptxas

        return {"ptxas_version": get_ptxas(capability).version, "fp_fusion": knobs.language.default_fp_fusion}
    return {}


def environment_here(worker: object) -> dict[str, Any]:
    """Return a worker's environment as JSON holds it."""
    return dataclasses.asdict(current_environment())


def worker_settings(extra: Mapping[str, str] | None = None, first: str | None = None) -> dict[str, str]:
    """Return the environment variables that a worker process needs whatever this process has.

    The folder of the package must not be on sys.path (PYTHONSAFEPATH): ``import kernels`` would find ours, and
    transformers asks for a package of that name. What the parent can import, the worker can. What autotuners choose is
    kept in Triton's cache, so that a search which takes minutes is made once: a case that ran out of time finds the
    kernels done before. What the folder ``first`` has is imported before what the parent would import.
    """
    folders = [Path(entry).resolve() for entry in [first, *sys.path] if entry and os.path.isdir(entry)]
    path = os.pathsep.join(str(folder) for folder in folders if folder != ROOT)
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "TRITON_CACHE_AUTOTUNING": "1", **(extra or {})}


def gpu_uuids(names: Sequence[str]) -> dict[str, str]:
    """Return name in CUDA_VISIBLE_DEVICES -> UUID of GPUs; none where NVML does not work."""
    import pynvml

    uuids = {}
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        for name in names:
            uuids[name] = name
            if name.isdigit():
                uuids[name] = str(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetHandleByIndex(int(name))))
    return uuids


_THROTTLE_REASONS = {
    "software power cap": "nvmlClocksThrottleReasonSwPowerCap",
    "hardware slowdown": "nvmlClocksThrottleReasonHwSlowdown",
    "software thermal slowdown": "nvmlClocksThrottleReasonSwThermalSlowdown",
    "hardware thermal slowdown": "nvmlClocksThrottleReasonHwThermalSlowdown",
    "hardware power brake": "nvmlClocksThrottleReasonHwPowerBrakeSlowdown",
}


def nvml_handle() -> Any:
    """Return NVML's handle of torch's current GPU; pynvml.NVMLError where it has none."""
    import pynvml
    import torch

    pynvml.nvmlInit()
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}")


def total_energy_j() -> float:
    """Return the energy that torch's current GPU took since its driver was loaded; pynvml.NVMLError as NVML says."""
    import pynvml

    return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(nvml_handle())) / 1000


def device_state() -> DeviceState:
    """Return the clocks, temperature and throttle reasons of torch's current GPU; empty where NVML has none."""
    import pynvml

    try:
        handle = nvml_handle()
        reasons = pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        return DeviceState(
            sm_clock_mhz=float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)),
            temperature_c=float(pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)),
            throttled=", ".join(name for name, flag in _THROTTLE_REASONS.items() if reasons & getattr(pynvml, flag))
            or None,
        )
    except pynvml.NVMLError:
        return DeviceState()
