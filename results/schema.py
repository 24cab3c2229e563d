"""The rows of the results: a case (what to run), a record (one measured case), a measured roof, a profiled case, a
row of a table of errors, a model that was trained.

Columns that several kinds of rows share are stated once, in base classes. Field order is column order; the columns of
the last base class come first, because dataclasses collect fields in that order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STATUSES = ("ok", "oom", "timeout", "crash", "error", "incorrect", "unsupported", "unavailable")
IMPORT_FAILED = "import failed"
"""Beginning of the reason where a package is installed and does not import."""

OWN = "own"
"""Kernel and provider of rows of a user's functions (``lrbench time``)."""

HIDDEN_HOST_MS = 10.0
"""The longest time of the host that a timing on a GPU hides, by work that the GPU does meanwhile. It covers any real
launch; a call that waits for the GPU takes its whole duration to return."""


@dataclass(frozen=True, kw_only=True)
class _Run:
    """Which run measured which case, and when (UTC, ISO 8601)."""

    run_id: str
    case_id: str
    measured_at: str


@dataclass(frozen=True, kw_only=True)
class _Code:
    """Who computes what."""

    kernel: str
    op: str
    impl: str
    provider: str


@dataclass(frozen=True, kw_only=True)
class _Package:
    """The provider's version."""

    provider_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Problem:
    """How it is computed and at which sizes, None where a size does not apply.

    Attributes:
        context: tokens that a decoding step of attention reads from its key-value cache, its own as the last of them.
        num_heads_qk: heads of queries and keys where they are fewer than ``num_heads``, those of values.
        layers: of the model that a training step trains.
        documents: packed into the batch of 1, as :mod:`.documents` writes them; None: the batch is of sequences.
    """

    mode: str
    dtype: str
    state_dtype: str | None = None
    batch: int | None = None
    seq_len: int | None = None
    context: int | None = None
    num_heads: int | None = None
    num_heads_qk: int | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None
    chunk_size: int | None = None
    channels: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    layers: int | None = None
    documents: str | None = None

    @property
    def sizes(self) -> dict[str, Any]:
        """The size columns that apply."""
        return {name: value for name in SIZE_COLUMNS if (value := getattr(self, name)) is not None}

    @property
    def problem_sizes(self) -> tuple[tuple[str, Any], ...]:
        """The same without the chunk size, which is a setting: what cases of one problem share."""
        return tuple((name, size) for name, size in self.sizes.items() if name != "chunk_size")


@dataclass(frozen=True, kw_only=True)
class _Device:
    """What was measured; ``device_accelerator`` is the key of its specification, None where we know of none."""

    device_kind: str | None = None
    device_name: str | None = None
    device_accelerator: str | None = None


@dataclass(frozen=True, kw_only=True)
class DeviceState:
    """What the GPU reports while it works: MHz, degrees Celsius, why clocks are low."""

    sm_clock_mhz: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """A call, and the GPU, after seconds of it without a pause (``lrbench sweep --sustained``), see docs/results.md."""

    sustained_ms: float | None = None
    settled_s: float | None = None
    sustained_clock_mhz: float | None = None
    sustained_throttled: str | None = None
    sustained_power_w: float | None = None
    idle_power_w: float | None = None
    energy_j: float | None = None
    net_energy_j: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Versions:
    """The software that measured."""

    torch_version: str | None = None
    triton_version: str | None = None
    ptxas_version: str | None = None
    fp_fusion: bool | None = None
    cuda_version: str | None = None
    driver_version: str | None = None
    python_version: str | None = None
    lrbench_version: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Case(_Problem, _Code):
    """What to run: an operation, an implementation, a mode, dtypes and sizes."""

    @property
    def gradients(self) -> bool:
        """Whether its mode computes gradients."""
        return self.mode in ("fwbw", "bw")

    @property
    def of_operation(self) -> Case:
        """The case itself; of a training step that of the operation in its blocks, a forward and backward pass."""
        return dataclasses.replace(self, mode="fwbw", layers=None) if self.mode == "train" else self

    @property
    def case_id(self) -> str:
        """First 16 hex digits of the SHA-256 over what is run; no version and no device in it."""
        return case_id({name: getattr(self, name) for name in CASE_COLUMNS})


def case_id(row: Mapping[str, Any]) -> str:
    """Return the id of a row's case; null values of columns that early versions did not have are left out."""
    later = ("context", "num_heads_qk", "layers", "documents")
    named = {name: row[name] for name in CASE_COLUMNS if name not in later or row[name] is not None}
    return hashlib.sha256(json.dumps(named, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Environment(_Versions, _Device):
    """The device and the versions that a row carries.

    Attributes:
        device_name: the driver's name of the GPU, or the CPU's model with the number of threads torch uses.
        device_accelerator: key of the measured device's specification, None when it is not one we know.
        capability: CUDA compute capability such as "9.0"; None on a CPU.
        device_count: GPUs visible to this process.
        memory_bytes: the device's memory.
    """

    device_kind: str
    device_name: str
    capability: str | None = None
    device_count: int
    memory_bytes: int

    def columns(self) -> dict[str, object]:
        """The fields that are columns of a row."""
        return {name: getattr(self, name) for name in ENVIRONMENT_COLUMNS}


@dataclass(frozen=True, kw_only=True)
class _SameMath(_Package):
    same_math: bool | None = None


@dataclass(frozen=True, kw_only=True)
class _Measured:
    """What came of a case, and what was counted of it then.

    Rows with the same ``pair_id`` were timed in turn, their n-th samples in the same round; None: it was timed alone.
    """

    status: str
    reason: str | None = None
    time_ms: float | None = None
    time_p20_ms: float | None = None
    time_p80_ms: float | None = None
    time_ci_low_ms: float | None = None
    time_ci_high_ms: float | None = None
    time_samples_ms: list[float] | None = None
    pair_id: str | None = None
    tuning: str | None = None
    host_ms: float | None = None
    noise: str | None = None
    yardstick_ms: float | None = None
    peak_memory_bytes: int | None = None
    input_bytes: int | None = None
    workspace_bytes: int | None = None
    compile_s: float | None = None
    rel_error: float | None = None
    checked: str | None = None
    suspect: str | None = None
    flops: float | None = None
    tensor_flops: float | None = None
    bytes: float | None = None
    intensity: float | None = None
    causal_factor: float | None = None
    tflops: float | None = None
    gbps: float | None = None
    roofline_fraction: float | None = None


@dataclass(frozen=True, kw_only=True)
class _Target:
    """What ``--gpu`` named, and the runtime model's time on it."""

    accelerator: str | None = None
    model_time_ms: float | None = None


@dataclass(frozen=True, kw_only=True)
class Record(_Versions, Sustained, DeviceState, _Target, _Device, _Measured, _Problem, _SameMath, _Code, _Run):
    """One row of the results, see docs/results.md. Null where a column does not apply; units are in the names."""

    schema_version: int = 5


@dataclass(frozen=True, kw_only=True)
class TritonRow(Record):
    """A row of a sweep that measured its cases with several Tritons; kept apart, since a case has a row for each."""


@dataclass(frozen=True, kw_only=True)
class _Rate:
    run_id: str
    measured_at: str
    quantity: str
    dtype: str | None = None
    size: int
    unit: str
    rate: float
    best_rate: float
    spec_rate: float | None = None
    short: bool
    beside: str | None = None
    time_ms: float
    time_p20_ms: float
    time_p80_ms: float
    time_ci_low_ms: float
    time_ci_high_ms: float
    time_samples_ms: list[float]


@dataclass(frozen=True, kw_only=True)
class RoofRow(_Versions, _Device, DeviceState, _Rate):
    """One measured rate of a device, see "Measured roofs" in docs/accelerators.md."""

    roofs_version: int = 1


@dataclass(frozen=True, kw_only=True)
class _Counters:
    status: str
    reason: str | None = None
    launches: int | None = None
    kernel_names: list[str] | None = None
    kernel_tensor_flops: list[float] | None = None
    kernel_dram_bytes: list[float] | None = None
    measured_tensor_flops: float | None = None
    executed_tensor_flops: float | None = None
    tensor_flops: float | None = None
    tensor_flops_ratio: float | None = None
    dram_read_bytes: float | None = None
    dram_write_bytes: float | None = None
    l2_bytes: float | None = None
    executed_bytes: float | None = None
    bytes: float | None = None
    bytes_ratio: float | None = None
    compulsory_bytes: float | None = None
    last_cache_bytes: int | None = None
    causal_factor: float | None = None
    explanation: str | None = None
    ncu_version: str | None = None


@dataclass(frozen=True, kw_only=True)
class ProfileRow(_Versions, _Device, _Counters, _Problem, _Package, _Code, _Run):
    """One profiled case, see "Hardware counters" in docs/accelerators.md."""

    profile_version: int = 4


@dataclass(frozen=True, kw_only=True)
class _Differences:
    against: str
    draws: int
    max_abs_mean: float
    max_abs_std: float
    mean_abs_mean: float
    mean_abs_std: float
    relative_mean: float
    relative_std: float


@dataclass(frozen=True, kw_only=True)
class ErrorsRow(_Versions, _Device, _Differences, _Problem, _Code, _Run):
    """The errors of one implementation of the gated MLP on square matrices; its sizes are those of the matrices.

    Attributes:
        against: what the results are compared with, see :mod:`..bench.drive.mlp_errors`.
        draws: of all matrices; mean and standard deviation are over them.
        max_abs, mean_abs: largest and mean absolute difference.
        relative: norm of the difference over the norm of the results compared with.
    """

    errors_version: int = 3


@dataclass(frozen=True, kw_only=True)
class _Trained:
    input_gate_bias: float
    seed: int
    losses: list[float]
    gradient_norms: list[float]


@dataclass(frozen=True, kw_only=True)
class TrainingRow(_Versions, _Device, _Trained, _Problem, _Code, _Run):
    """A model that examples/train_block.py trained.

    Attributes:
        input_gate_bias: where the bias of the input gates started.
        seed: what the weights and the data were drawn from.
        losses, gradient_norms: at each step; the norms are from before clipping.
    """

    training_version: int = 2


def _names(row: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(row))


RECORD_COLUMNS, RETIRED_COLUMNS = _names(Record), {"power_w"}
"""The second are of earlier versions, and left out when rows are read."""

SIZE_COLUMNS = _names(_Problem)[3:]
PROBLEM_SIZES = tuple(name for name in SIZE_COLUMNS if name != "chunk_size")
"""The chunk size is a setting to choose."""

NUMERIC_SIZES = tuple(name for name in SIZE_COLUMNS if name != "documents")
"""Packed documents are named by a text."""

CASE_COLUMNS = ("op", "impl", *_names(_Problem))
"""What a case_id is made of."""

ENVIRONMENT_COLUMNS = (*_names(_Device), *_names(_Versions))


def was_tried(row: Mapping[str, Any]) -> bool:
    """Return whether the case of a row was run."""
    return row["status"] not in ("unsupported", "unavailable")
