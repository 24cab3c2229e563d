"""Memory of one call, in a pass of its own that is not timed.

On a GPU it is the caching allocator's peak. On a CPU a TorchDispatchMode follows the tensor storages that live during
the call, so the figure is about tensors and not about the process (no RSS), and scratch memory that an operator
allocates inside itself is not seen.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryUse:
    """Bytes of one call.

    Attributes:
        input_bytes: tensors alive before the call: its inputs, and for a backward call what the forward saved.
        peak_memory_bytes: the most bytes alive at once during the call, inputs included.
        workspace_bytes: the peak without inputs, and without outputs and gradients.
    """

    peak_memory_bytes: int
    input_bytes: int
    workspace_bytes: int


class StorageTracker(TorchDispatchMode):
    """Follows every tensor storage that is created while it is active; ``peak_bytes`` is the most alive at once.

    Args:
        inputs: tensors alive beforehand; their storages count from the start and for as long as they live.
    """

    def __init__(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._sizes: dict[int, int] = {}
        for tensor in inputs:
            self._register(tensor.untyped_storage())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
                self._register(leaf.untyped_storage())
        return result

    def _register(self, storage: torch.UntypedStorage) -> None:
        # A storage keeps one Python object for as long as C++ holds it, so that object's finalizer runs when it ends.
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            weakref.finalize(storage, self._release, key).atexit = False
        self._sizes[key] = size
        self.live_bytes += size - (known or 0)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the distinct storages behind the tensors."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def measure_memory(
    call: Callable[[Any], Any],
    *,
    prepare: Callable[[], Any] = lambda: None,
    inputs: Sequence[torch.Tensor],
) -> MemoryUse:
    """Return the memory that ``call(prepare())`` takes; ``prepare`` runs before the measured part.

    Args:
        call: returns a tensor or a nest of tensors: the outputs and gradients.
        prepare: runs beforehand; what it allocates counts as input.
        inputs: the tensors that the call reads; the first one's device is measured.
    """
    if inputs[0].device.type == "cuda":
        return _measure_cuda(call, prepare, inputs)
    return _measure_cpu(call, prepare, inputs)


def _outputs(result: Any, inputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes of the results that are not inputs handed back."""
    known = {t.untyped_storage()._cdata for t in inputs}
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
    return storage_bytes(leaf for leaf in leaves if leaf.untyped_storage()._cdata not in known)


def _measure_cuda(call: Callable[[Any], Any], prepare: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> MemoryUse:
    # What the call would free without having allocated it, the peak would lack.
    gc.collect()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    prepared = prepare()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    input_bytes = storage_bytes(inputs) + before - start
    torch.cuda.reset_peak_memory_stats()
    result = call(prepared)
    torch.cuda.synchronize()
    # Relative to what was allocated before: the cache flush and the reference belong to the benchmark, not the call.
    above = torch.cuda.max_memory_allocated() - before
    return MemoryUse(
        peak_memory_bytes=input_bytes + above,
        input_bytes=input_bytes,
        workspace_bytes=max(0, above - _outputs(result, inputs)),
    )


def _measure_cpu(call: Callable[[Any], Any], prepare: Callable[[], Any], inputs: Sequence[torch.Tensor]) -> MemoryUse:
    tracker = StorageTracker(inputs)
    with tracker:
        prepared = prepare()
        input_bytes = tracker.live_bytes
        tracker.peak_bytes = input_bytes
        result = call(prepared)
    return MemoryUse(
        peak_memory_bytes=tracker.peak_bytes,
        input_bytes=input_bytes,
        workspace_bytes=max(0, tracker.peak_bytes - input_bytes - _outputs(result, inputs)),
    )
