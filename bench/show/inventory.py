"""What is here and what works here: kernels, accelerators, packages and known failures, as rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import itemgetter
from typing import Any

from ... import kernels
from ...analysis.accelerators import cpu, roofs
from ...analysis.accelerators import known as accelerators
from ...analysis.accelerators.known import Accelerator, Roofs
from ...analysis.counts.formulations import FORMULATIONS
from ...kernels import baselines
from ...kernels.baselines.operations import OPERATIONS
from ...kernels.baselines.spec import Baseline
from ...kernels.common.spec import Implementation
from ...results.arguments import one_of
from ...results.schema import ENVIRONMENT_COLUMNS
from ...results.select import grouped, short_size
from ..environment import Environment, version_of
from ..plan import named_family, package_of
from ..presets import Preset, get_preset, presets_for

Row = dict[str, Any]


def counted_operation(kernel: str, op: str | None) -> str:
    """Return the operation to count: one of the family's, or one that only outside packages compute.

    Args:
        kernel: a family, or an operation, which stands for itself.
        op: None is the family's first.

    Raises:
        ValueError: an unknown family or operation, or one that is not counted.
    """
    named, ops = named_family(kernel, None if op is None else (op,))
    resolved = baselines.get_operation(ops[0]).name if ops else kernels.FAMILIES[named][0]
    one_of("op", resolved, tuple(FORMULATIONS))
    family = kernels.FAMILIES.get(kernel, (resolved,))
    if resolved not in (*family, *OPERATIONS):
        raise ValueError(f"op must be one of {', '.join(family)} for {kernel}, got {resolved!r}")
    return resolved


def kernel_rows(name: str | None = None, environment: Environment | None = None) -> list[Row]:
    """Return a row per implementation, ours and outside ones, of every kernel family.

    Args:
        name: a family, or an operation whose implementations alone are wanted.
        environment: of workers; None: what can be seen without one.

    Raises:
        ValueError: an unknown one.
    """
    wanted = None if name is None else named_family(name)[1]
    families = {name: kernels.FAMILIES[name]} if name in kernels.FAMILIES else kernels.FAMILIES
    rows: dict[tuple[str | None, str, str], Row] = {}
    here, versions = accelerators.key_here(), dict[str, str | None](baselines.installed_versions())
    capability = accelerators.get_accelerator(here).capability if here else None
    if environment is not None:
        capability, versions["triton"] = environment.capability, environment.triton_version
    for kernel, ops in families.items():
        targets: list[tuple[str, Implementation | Baseline, str]]
        targets = [(op, impl, impl.summary) for op in ops for impl in kernels.get_operation(op).implementations]
        targets += [(b.op, b, b.settings) for b in baselines.baselines_for(kernel)]
        for each, target, what in targets:
            if wanted and each not in wanted:
                continue
            row = {
                "kernel": kernel,
                "op": each,
                "impl": target.name,
                "provider": package_of(target),
                "devices": "/".join(target.devices),
                "modes": "/".join(dict.fromkeys(baselines.get_operation(each).modes_of(target))),
                "dtypes": "/".join(target.dtypes),
                "documents": "packed" if target.documents else None,
                "what": what,
                "not_here": _why_not_here(target, capability, versions),
            }
            # Of one operation, what several families are compared with is listed once.
            rows.setdefault((None if wanted else kernel, each, target.name), row)
    return list(rows.values())


def brief_kernel_rows(name: str) -> list[Row]:
    """Return a row per implementation: of a family with its operations, of an operation with modes and dtypes."""
    rows = kernel_rows(name)
    if len({row["op"] for row in rows}) == 1:
        return [{column: row[column] for column in ("impl", "devices", "modes", "dtypes", "what")} for row in rows]
    own = [*kernels.FAMILIES[name]]
    merged = []
    for (impl, devices, what), alike in grouped(rows, itemgetter("impl", "devices", "what")).items():
        ops = [row["op"] for row in alike]
        operations = ["all"] if ops == own and len(own) > 1 else ops
        merged.append({"impl": impl, "devices": devices, "operations": operations, "what": what})
    return merged


def kernel_notes(name: str | None) -> list[str]:
    """Return why the faster forms among the implementations of a family or operation do not run here, a line each."""
    rows = (r for r in kernel_rows(name) if r["not_here"])
    faster = (r["not_here"] for r in rows if getattr(baselines.get_implementation(r["op"], r["impl"]), "fallback", ""))
    return list(dict.fromkeys(faster))


def family_rows() -> list[Row]:
    """Return a row per kernel family: its operations, our implementations of them, and packages beside them."""
    return [
        {
            "kernel": kernel,
            "operations": ", ".join(ops),
            "ours": ", ".join(dict.fromkeys(i.name for op in ops for i in kernels.get_operation(op).implementations)),
            "beside them": ", ".join(dict.fromkeys(each.provider for each in baselines.baselines_for(kernel))),
        }
        for kernel, ops in kernels.FAMILIES.items()
    ]


def preset_rows(kernel: str | None = None) -> list[Row]:
    """Return a row per preset of a kernel family, or of every one: its axes and what it is for.

    Raises:
        ValueError: an unknown family; the message lists the known ones.
    """
    rows = []
    for family in kernels.FAMILIES if kernel is None else (named_family(kernel)[0],):
        operations = [kernels.get_operation(op) for op in kernels.FAMILIES[family]]
        sizes = {size for operation in operations for size in operation.sizes}
        modes = {mode for op in operations for each in op.implementations for mode in op.modes_of(each)}
        on_gpu = dataclasses.replace(get_preset("quick", family, "cuda"), name="quick on a GPU")
        for preset in (on_gpu, *presets_for(family).values()):
            widths = {
                "head_dim": preset.head_dims if "head_dim_v" in sizes else (),
                "channels": preset.channels if "channels" in sizes else (),
                "d_model -> d_ff": tuple(f"{a} -> {b}" for a, b in preset.matrices) if "d_model" in sizes else (),
            }
            rows.append(
                {
                    "kernel": family,
                    "preset": preset.name,
                    "modes": "/".join(mode for mode in preset.modes if mode in modes),
                    "seq_len": [short_size(seq_len) for seq_len in preset.seq_lens],
                    # The tokens of an MLP are its seq_len.
                    "batch": "1" if "d_model" in sizes else _batch(preset),
                    "size": "; ".join(f"{name} {', '.join(map(str, w))}" for name, w in widths.items() if w),
                    "what": preset.summary,
                }
            )
    return rows


def brief_preset_rows(rows: list[Row]) -> list[Row]:
    """Return a row per preset and purpose: the families that have it."""
    every = list(dict.fromkeys(row["kernel"] for row in rows))
    brief = []
    for (preset, what), alike in grouped(rows, itemgetter("preset", "what")).items():
        found = [row["kernel"] for row in alike]
        others = [kernel for kernel in every if kernel not in found]
        named = found if len(others) > 1 else " but ".join(["all", *others])
        brief.append({"preset": preset, "kernels": named, "what": what})
    return brief


def _batch(preset: Preset) -> str:
    if preset.modes == ("step",):
        return ", ".join(map(str, preset.step_batches))
    if preset.batch is not None:
        return str(preset.batch)
    return f"{short_size(preset.tokens)} tokens / seq_len"


def gpu_rows() -> list[Row]:
    """Return a row per accelerator that ``--gpu`` takes: specified, the user's own, and this CPU as far as measured.

    Raises:
        ValueError: the user's file is bad.
    """
    own = accelerators.user_accelerators()
    stored = roofs.stored_roofs()
    rows = [
        _gpu_row(a, stored.get(a.key, a.measured), str(accelerators.user_file()) if a.key in own else "lrbench")
        for a in (*accelerators.ACCELERATORS.values(), *own.values())
    ]
    if cpu.recall() is not None:
        here = cpu.local_cpu()
        return [*rows, _gpu_row(here, None, str(cpu.cache_file()))]
    unmeasured = "measured when it is first asked for; lrbench calibrate measures it with torch"
    return [*rows, dict.fromkeys(rows[0]) | {"key": "cpu", "part": "this machine", "source": unmeasured}]


def gpu_tables(rows: list[Row]) -> dict[str, list[Row]]:
    """Return title -> table of accelerators; the first has what most readers look for."""
    rates = {dtype: f"{dtype}_tflops" for dtype in ("bf16", "fp16", "tf32", "fp32", "fp64")}
    vector = {"vector": "vector_tflops", "TB/s": "bandwidth_tb_s", "L2": "l2_mib"}
    tables = {
        "dense TFLOP/s, TB/s, last cache in MiB, memory in GB": {
            "key": "key", "also": "also", "bf16": "bf16_tflops", **vector, "GB": "memory_gb", "SMs": "sms",
            "part": "part",
        },
        "dense TFLOP/s by dtype, shared memory of a block in KiB": {
            "key": "key", **rates, **vector, "smem": "smem_kib",
        },
        "as measured": {
            "key": "key", "bf16": "measured_bf16_tflops", "TB/s": "measured_bandwidth_tb_s", "measured": "measured",
        },
        "where from": {"key": "key", "source": "source", "defined in": "defined_in"},
    }  # fmt: skip
    shown = {}
    for title, columns in tables.items():
        # The measured table leaves out accelerators without measurements.
        here = [row for row in rows if title != "as measured" or row["measured"]]
        shown[title] = [{column: row[name] for column, name in columns.items()} for row in here]
    return shown


def _gpu_row(accelerator: Accelerator, measured: Roofs | None, defined_in: str) -> Row:
    a = accelerator
    also = ", ".join(alias for alias, key in accelerators.ALIASES.items() if key == a.key) or None
    return {
        "key": a.key, "also": also, "part": a.part,
        **{f"{dtype}_tflops": _tera(a.matrix_flops.get(dtype)) for dtype in ("bf16", "fp16", "tf32", "fp32", "fp64")},
        "vector_tflops": _tera(a.vector_flops), "bandwidth_tb_s": _tera(a.bandwidth_bytes_s),
        "memory_gb": a.memory_bytes and a.memory_bytes / 1e9, "l2_mib": a.l2_bytes / 2**20,
        "smem_kib": a.smem_bytes / 2**10, "sms": a.sms,
        "measured_bf16_tflops": measured and _tera(measured.matrix_flops.get("bf16")),
        "measured_bandwidth_tb_s": measured and _tera(measured.bandwidth_bytes_s),
        "measured": measured and measured.source, "source": a.source, "defined_in": defined_in,
    }  # fmt: skip


def _tera(rate: float | None) -> float | None:
    return None if rate is None else rate / 1e12


def doctor_sections(environment: Environment) -> dict[str, list[Row]]:
    """Return by title what is here: device and versions, outside packages, ours that do not run, known failures."""
    names = (*ENVIRONMENT_COLUMNS[:3], "capability", "device_count", "memory_bytes", *ENVIRONMENT_COLUMNS[3:])
    values = ((name, getattr(environment, name)) for name in names)
    return {
        "environment": [{"what": name, "value": None if value is None else str(value)} for name, value in values],
        "packages": package_rows(),
        "ours that do not run here": [
            {"impl": row["impl"], "op": row["op"], "reason": row["not_here"]}
            for row in kernel_rows(environment=environment)
            if row["not_here"] and row["provider"] == "lrbench" and environment.device_kind in row["devices"].split("/")
        ],
        "known failures": known_bad_rows(environment),
    }


def brief_sections(sections: dict[str, list[Row]]) -> dict[str, list[Row]]:
    """Return what of :func:`doctor_sections` concerns this machine: what is known, missing or fails here."""
    environment, packages, unable, failures = sections.values()
    # A function of several operations counts once.
    known = {(row["impl"], row["when"], row["reason"]): row["applies_here"] for row in failures}
    applying = [row for row, applies in known.items() if applies == "yes"]
    excluded = {row["reason"]: row["impl"] for row in unable}
    return {
        "environment": [row for row in environment if row["value"] is not None],
        "packages": [
            {name: row[name] for name in ("package", "version", "tested")} for row in packages if not row["missing"]
        ],
        "missing packages": [
            {"install": row["missing"].partition("installed: ")[2] or row["missing"]}
            for row in packages
            if row["missing"]
        ],
        **({"ours that do not run here": [{"impl": i, "reason": r} for r, i in excluded.items()]} if excluded else {}),
        f"{len(applying)} of {len(known)} known failures apply here": [
            {"impl": ", ".join(impl for impl, *_ in rows), "when": when, "reason": reason}
            for (when, reason), rows in grouped(applying, itemgetter(1, 2)).items()
        ],
    }


def package_rows() -> list[Row]:
    """Return a row per outside package: the version here and the tested one, or the command that brings it."""
    rows: dict[str, Row] = {}
    for baseline in baselines.BASELINES:
        missing = baselines.availability(baseline)
        version = None if missing else version_of(baseline.distribution)
        said = {"tested": baseline.tested, "licence": baseline.licence, "missing": missing}
        rows.setdefault(baseline.distribution, {"package": baseline.distribution, "version": version, **said})
    return [*rows.values()]


def _why_not_here(
    target: Implementation | Baseline, capability: str | None, versions: Mapping[str, str | None]
) -> str | None:
    """Return why this machine does not run an implementation, or None.

    Args:
        capability: its GPU's compute capability; None where there is no GPU, or none that is known.
        versions: installed versions by package.
    """
    if isinstance(target, Baseline):
        return baselines.availability(target)
    elsewhere = target.why_not_on(capability) if capability is not None else None
    return elsewhere or target.why_slower_with(versions) or target.why_not_with(versions)


def known_bad_rows(environment: Environment) -> list[Row]:
    """Return a row per known failure of a baseline, and whether it applies to this machine."""
    versions = baselines.installed_versions()
    rows = []
    for baseline in baselines.BASELINES:
        for known in baseline.known_bad:
            lists = {"compute capability": known.architectures, "mode": known.modes, "dtype": known.dtypes}
            parts = [f"{name} {spec}" for name, spec in known.versions.items()]
            parts += [f"{what} {' or '.join(values)}" for what, values in lists.items() if values]
            rows.append(
                {
                    "impl": baseline.name,
                    "op": baseline.op,
                    "applies_here": "yes" if known.is_of(versions, environment.capability) else "no",
                    "when": ", ".join(parts) or "always",
                    "reason": known.reason,
                    "source": known.source,
                }
            )
    return rows
