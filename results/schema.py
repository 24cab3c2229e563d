"""A case (what to run) and a record (one row of the results). Field order is column order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass

SCHEMA_VERSION = 1

STATUSES = ("ok", "oom", "timeout", "crash", "error", "incorrect", "unsupported", "unavailable")

SIZE_COLUMNS = (
    "batch",
    "seq_len",
    "num_heads",
    "head_dim_qk",
    "head_dim_v",
    "chunk_size",
    "channels",
    "d_model",
    "d_ff",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What to run: an operation, an implementation, a mode, dtypes and sizes (None where a size does not apply)."""

    kernel: str
    op: str
    impl: str
    provider: str
    mode: str
    dtype: str
    state_dtype: str | None = None
    batch: int | None = None
    seq_len: int | None = None
    num_heads: int | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None
    chunk_size: int | None = None
    channels: int | None = None
    d_model: int | None = None
    d_ff: int | None = None

    @property
    def sizes(self) -> dict[str, int]:
        """The size columns that apply."""
        return {name: value for name in SIZE_COLUMNS if (value := getattr(self, name)) is not None}

    @property
    def case_id(self) -> str:
        """First 16 hex digits of the SHA-256 over what is run; no version and no device in it."""
        keys = ("op", "impl", "mode", "dtype", "state_dtype", *SIZE_COLUMNS)
        text = json.dumps({key: getattr(self, key) for key in keys}, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One row of the results. Null where a column does not apply; units are in the names."""

    run_id: str
    case_id: str
    measured_at: str
    kernel: str
    op: str
    impl: str
    provider: str
    provider_version: str | None = None
    same_math: bool | None = None
    mode: str
    dtype: str
    state_dtype: str | None = None
    batch: int | None = None
    seq_len: int | None = None
    num_heads: int | None = None
    head_dim_qk: int | None = None
    head_dim_v: int | None = None
    chunk_size: int | None = None
    channels: int | None = None
    d_model: int | None = None
    d_ff: int | None = None
    status: str
    reason: str | None = None
    time_ms: float | None = None
    time_p20_ms: float | None = None
    time_p80_ms: float | None = None
    time_ci_low_ms: float | None = None
    time_ci_high_ms: float | None = None
    time_samples_ms: list[float] | None = None
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
    device_kind: str | None = None
    device_name: str | None = None
    device_accelerator: str | None = None
    accelerator: str | None = None
    model_time_ms: float | None = None
    sm_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    throttled: str | None = None
    torch_version: str | None = None
    triton_version: str | None = None
    cuda_version: str | None = None
    driver_version: str | None = None
    python_version: str | None = None
    lrbench_version: str | None = None
    git_commit: str | None = None
    git_dirty: bool | None = None
    schema_version: int = SCHEMA_VERSION


RECORD_COLUMNS = tuple(field.name for field in dataclasses.fields(Record))
