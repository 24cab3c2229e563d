"""Implementations that misbehave, for tests of what the sweep makes of them.

A planned case carries its implementation's declaration, so a test hands the sweep one whose ``call`` names a function
here; no declaration of the package mentions them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lrbench.bench.plan import PlannedCase
from lrbench.kernels.common.spec import Implementation
from lrbench.kernels.mlstm_sig import mlstm_sig
from lrbench.results.schema import Case


def planned(fault: str, *, module: str = "faults", **fields: Any) -> PlannedCase:
    """Return a small mLSTMsig case, with other fields if given, whose implementation is the function ``fault``."""
    implementation = Implementation(
        name=fault, call=f"tests.bench.{module}:{fault}", devices=("cpu", "cuda"), dtypes=("fp32",)
    )
    small: dict[str, Any] = {
        "kernel": "tfla", "op": "mlstm_sig", "impl": fault, "provider": "lrbench", "mode": "fw", "dtype": "fp32",
        "state_dtype": "fp32", "batch": 1, "seq_len": 32, "num_heads": 1, "head_dim_qk": 16, "head_dim_v": 16,
        "chunk_size": 16,
    }  # fmt: skip
    return PlannedCase(case=Case(**{**small, **fields}), target=implementation)


def describe(worker: Any, text: str) -> dict[str, Any]:
    """Say what a worker was sent, and whether it has imported torch's compiler."""
    return {"device": worker.device, "length": len(text), "compiler": "torch._dynamo" in sys.modules}


def right(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Compute the operation."""
    return mlstm_sig(*tensors, impl="torch", chunk_size=chunk_size, **options)


def slow(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Compute the operation, taking a while."""
    time.sleep(0.05)
    return right(*tensors, chunk_size=chunk_size, **options)


def noisy(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Compute the operation and write to every stream, as autotuners and loggers do."""
    print('{"status": "ok", "columns": {}}')
    os.write(1, b"\x00\xff not text\n" * 1000)
    sys.stderr.write("warning: noise\n")
    sys.stdin.close()
    return right(*tensors, chunk_size=chunk_size, **options)


def wrong(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Be off by one part in a thousand."""
    return 1.001 * right(*tensors, chunk_size=chunk_size, **options)


def wrong_gradient(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Give the right output, and no gradient through v for half of the positions."""
    q, k, v, i, f = tensors
    half = v.shape[1] // 2
    v = torch.cat([v[:, :half].detach(), v[:, half:]], dim=1)
    return right(q, k, v, i, f, chunk_size=chunk_size, **options)


def unwritten(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Leave the last position of the output uninitialised."""
    h = right(*tensors, chunk_size=chunk_size, **options)
    out = torch.empty_like(h)
    out[:, :-1] = h[:, :-1]
    return out


def leaves_a_note(*tensors: Tensor, chunk_size: int, **options: Any) -> Tensor:
    """Compute the operation and write down which GPU the worker sees, its process and the sequence length.

    The first of two workers waits for the other one, which may take seconds longer to start.
    """
    path, ends = Path(os.environ["LRBENCH_TEST_NOTES"]), time.monotonic() + 60
    with path.open("a") as notes:
        notes.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {os.getpid()} {tensors[0].shape[1]}\n")
    while len({line.split()[1] for line in path.read_text().splitlines()}) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    return right(*tensors, chunk_size=chunk_size, **options)


def raises(*tensors: Tensor, **options: Any) -> Tensor:
    """Refuse."""
    raise RuntimeError("this shape is not tuned. Try another")


def hangs(*tensors: Tensor, **options: Any) -> Tensor:
    """Never return, whatever it is sent."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    while True:
        time.sleep(60)


def waits_in_another_module(*tensors: Tensor, **options: Any) -> Tensor:
    """Wait for what nobody does."""
    threading.Event().wait()


def killed(*tensors: Tensor, **options: Any) -> Tensor:
    """Be killed, as by the system's out-of-memory killer."""
    os.kill(os.getpid(), signal.SIGKILL)


def kills_its_node(*tensors: Tensor, **options: Any) -> Tensor:
    """Kill the process that started this worker."""
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def aborts(*tensors: Tensor, **options: Any) -> Tensor:
    """Abort the process as a compiler does."""
    os.write(2, b"LLVM ERROR: operation destroyed but still has uses\nStack dump:\n0. Program arguments\n")
    os.abort()


def exits(*tensors: Tensor, **options: Any) -> Tensor:
    """End the process without a word."""
    os._exit(3)


def exhausts_memory(*tensors: Tensor, **options: Any) -> Tensor:
    """Ask for a petabyte."""
    return torch.empty(2**50, dtype=torch.int8, device=tensors[0].device).float()


def imports_missing(*tensors: Tensor, **options: Any) -> Tensor:
    """Need a package that is not there."""
    import lrbench_has_no_such_module  # noqa: F401
