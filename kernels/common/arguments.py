"""Checks of arguments that several families make; messages name the argument, what was expected and what came."""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from .sizes import INTERPRETED_DTYPES, REMEMBERED

CASE_DTYPES = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}
"""Dtype of inputs -> what a case calls it."""
INPUT_DTYPES = tuple(CASE_DTYPES)
TRITON_DTYPES = INPUT_DTYPES[1:]
"""Dtypes of inputs that the Triton kernels take: all but float64."""

P = ParamSpec("P")
R = TypeVar("R")


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function's results, and let torch.compile take them as constants instead of tracing the function.

    For functions of sizes, dtypes and devices that return a constant, such as the reason for an error.
    """
    remembered: Callable[..., R] = lru_cache(REMEMBERED)(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return remembered(*args, **kwargs)

    # torch.compiler.assume_constant_result sets this too, but imports the compiler, which would double our import time.
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return call


@constant
def is_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter; ModuleNotFoundError where there is no Triton."""
    try:
        import triton
    except ModuleNotFoundError as error:
        expected = 'the kernels need triton, which is not installed: pip install triton, or take impl="torch"'
        raise ModuleNotFoundError(expected, name=error.name) from error
    return bool(triton.knobs.runtime.interpret)


_warning = threading.RLock()


def warn_once(message: str) -> None:
    """Issue a RuntimeWarning, each message once a process, whatever thread asks.

    Call it in a :func:`constant` function: torch.compile cannot trace it.
    """
    with _warning:
        _warn(message)


@cache
def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=2)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gates, states and accumulators for inputs of ``dtype``: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(function: Callable[..., Any], x: Tensor, *arguments: Any, **keywords: Any) -> Any:
    """Call ``function`` with autocast off for x's device, so that torch's products inside it keep their dtypes."""
    kind = x.device.type
    # torch has no autocast, nor an answer, for tensors without values.
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return function(*arguments, **keywords)
    with torch.autocast(kind, enabled=False):
        return function(*arguments, **keywords)


def dtype_name(dtype: torch.dtype) -> str:
    """Return "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def check_dimensions(name: str, x: object, dims: str) -> None:
    """Raise unless ``x`` is a tensor of dimensions such as "[B, T, C]"."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    count = dims.count(",") + 1
    if x.dim() != count:
        raise ValueError(f"{name} must have {count} dimensions {dims}, got shape {tuple(x.shape)}")


def check_dtype(name: str, x: Tensor, dtypes: Sequence[torch.dtype] = INPUT_DTYPES) -> None:
    """Raise unless ``x`` is of one of the dtypes."""
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")


def check_not_empty(name: str, x: Tensor, tokens: int = 2) -> None:
    """Raise if ``x`` is empty in a dimension other than the first ``tokens``, which are batch and time."""
    if 0 in x.shape[tokens:]:
        raise ValueError(f"{name} must have no empty dimension but those of tokens, got shape {tuple(x.shape)}")


def without_tokens(
    output: Tensor, tensors: Iterable[Tensor | None], state: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Any]:
    """Return what an operation does of a batch or a time of 0.

    Args:
        output: of the output's shape and dtype, empty.
        tensors: the arguments, whose gradients are zero.
        state: the state before the first token: a tensor, or three, of which the last one has no gradient.

    Returns:
        The output, and a copy of the state.
    """
    zero = sum(0 * x.sum() for x in tensors if x is not None)
    if isinstance(state, Tensor):
        return output + zero, state.clone()
    *parts, top = state
    return output + zero, (*(x.clone() for x in parts), top.detach().clone())


def check_on_gpu(name: str, x: Tensor) -> None:
    """Raise unless kernels can run on ``x``'s dtype and device, and no transform of torch.func is active."""
    refuse_transforms(name)
    check_dtype(name, x, TRITON_DTYPES)
    if is_interpreted() and CASE_DTYPES[x.dtype] not in INTERPRETED_DTYPES:
        expected = " or ".join(dtype_name(t) for t, short in CASE_DTYPES.items() if short in INTERPRETED_DTYPES)
        raise ValueError(f"{name} must be {expected} under TRITON_INTERPRET=1, got {dtype_name(x.dtype)}")
    if x.device.type not in (("cpu", "cuda") if is_interpreted() else ("cuda",)):
        needed = "hold values" if x.is_meta else "be on a GPU"
        raise ValueError(f'{name} must {needed}, got a tensor on {x.device}: impl="torch" takes any device')


def refuse_transforms(name: str) -> None:
    """Raise inside a transform of torch.func: its tensors have no memory that a kernel could read, and autograd
    functions have no rule for it."""
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            f"{name} must not be inside a transform of torch.func (vmap, grad, ...): use a batch dimension "
            "instead of vmap, and torch.autograd instead of grad"
        )


def check_tensor(name: str, x: object, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless ``x`` is a tensor of this shape and dtype on this device."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(x).__name__}")
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"{name} must be {dtype_name(dtype)}, got {dtype_name(x.dtype)}")
    if x.device != device:
        raise ValueError(f"{name} must be on {device}, got {x.device}")


def check_first(name: str, x: Tensor, dims: str) -> None:
    """Raise unless an operation's first tensor, to which the others are compared, is floating and has dimensions such
    as "[B, T, C]", of which only batch and time may be 0."""
    check_dimensions(name, x, dims)
    check_dtype(name, x)
    check_not_empty(name, x)


def check_chunk_size(chunk_size: int, *, minimum: int = 1, power_of_two: bool = False) -> None:
    """Raise unless chunk_size is an int of at least ``minimum`` (and a power of two where asked)."""
    valid = isinstance(chunk_size, int) and not isinstance(chunk_size, bool) and chunk_size >= minimum
    if not valid or (power_of_two and chunk_size & (chunk_size - 1)):
        kind = "a power of two" if power_of_two else "an integer"
        raise ValueError(f"chunk_size must be {kind} >= {minimum}, got {chunk_size!r}")


def check_three(initial_state: Any, names: str) -> None:
    """Raise unless a state is a tuple or list of three; ``names`` are what the message calls them."""
    is_list = isinstance(initial_state, tuple | list)
    if not is_list or len(initial_state) != 3:
        given = f"{len(initial_state)} of them" if is_list else type(initial_state).__name__
        raise ValueError(f"initial_state must be three tensors ({names}), got {given}")


def check_state_dtype(state_dtype: torch.dtype, allowed: Sequence[torch.dtype] = (torch.float32,)) -> None:
    """Raise unless state_dtype is one that the implementation can hold states in."""
    if state_dtype not in allowed:
        expected = " or ".join(map(dtype_name, allowed))
        given = dtype_name(state_dtype) if isinstance(state_dtype, torch.dtype) else repr(state_dtype)
        raise ValueError(f"state_dtype must be {expected}, got {given}")


def resolve_scale(scale: float | None, dim_qk: int) -> float:
    """Return ``scale``, or dim_qk^-1/2 for None; raise unless it is a finite number."""
    if scale is None:
        return dim_qk**-0.5
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not -math.inf < scale < math.inf:
        raise ValueError(f"scale must be a finite number or None, got {scale!r}")
    return float(scale)


def score_headroom(scale: float, dim_qk: int, dtype: torch.dtype) -> float:
    """Return the power of two, at least 1, by which ``scale`` exceeds dim_qk^-1/2; 1 unless ``dtype`` is float16.

    Kernels round scores, scale q^T k times a weight, to the inputs' dtype. With a scale divided by this power they fit
    into float16 where those of the usual scale do; what is linear in the scale is multiplied by it in float32.
    """
    if dtype != torch.float16 or scale == 0:
        return 1.0
    return 2.0 ** max(0, round(math.log2(abs(scale) * dim_qk**0.5)))
