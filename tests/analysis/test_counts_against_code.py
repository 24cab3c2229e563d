"""Counted matrix work against what running code does, counted by torch's FlopCounterMode as it dispatches.

The portable implementations compute whole squares, so they are compared at a causal factor of 1, exactly. What they do
beyond or short of the count is named and added by hand.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lrbench.analysis.counts import Count, count, count_case
from lrbench.bench import baselines
from lrbench.kernels import FAMILIES, get_operation, resolve

OPERATIONS = FAMILIES["tfla"]
SIZES = {"batch": 1, "seq_len": 256, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}
HEADS, CELLS = 2, 16 * 32


def matrix_flops(call: Callable[[], object]) -> int:
    """Return the FLOPs of the matrix products that ``call`` dispatches, in-place ones included."""

    def baddbmm(_: object, a: torch.Size, b: torch.Size, *__: object, **___: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.baddbmm_: baddbmm}) as counter:
        call()
    return counter.get_total_flops()


def run(op: str, impl: str, chunk_size: int | None) -> tuple[int, int]:
    """Return the matrix FLOPs of an implementation's forward and backward pass."""
    operation = get_operation(op)
    tensors = resolve(operation.inputs)(SIZES, dtype=torch.float32, device="cpu", seed=0)
    leaves = [tensors[name].requires_grad_(name in operation.differentiable) for name in operation.arguments]
    keywords = {"chunk_size": chunk_size} if chunk_size else {}
    outputs: list[torch.Tensor] = []
    call = resolve(operation.implementation(impl).call)
    forward = matrix_flops(lambda: outputs.append(call(*leaves, **keywords)))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), wanted))
    return forward, backward


def counted(op: str, impl: str, mode: str, chunk_size: int | None) -> Count:
    sizes = SIZES | ({"chunk_size": chunk_size} if chunk_size else {})
    result = count_case(op, impl, mode, "fp32", None, sizes)
    assert result is not None
    assert result.causal_factor == 1
    return result


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("chunk_size", [64, 100, 256])
def test_chunkwise_matrix_work_is_exact(op: str, chunk_size: int) -> None:
    forward, backward = run(op, "torch", chunk_size)
    # mLSTMexp's n^T q is a product to torch; the paper, and so the count, has it among the vector work.
    normaliser = 2 * SIZES["seq_len"] * 16 * HEADS if op == "mlstm_exp" else 0
    assert forward == counted(op, "torch", "fw", chunk_size).tensor_flops + normaliser
    expected = counted(op, "torch", "bw", chunk_size)
    # The last chunk's state is the only one that no gradient needs, so it is not recomputed.
    ragged = SIZES["seq_len"] % chunk_size
    last_chunk = ragged or chunk_size
    # A ragged last chunk is a group of its own, and the state that enters a group is kept from the forward pass.
    kept = chunk_size if ragged else 0
    unneeded = 2 * (last_chunk + kept) * CELLS * HEADS
    recomputed = expected.recomputed_tensor_flops + normaliser - unneeded
    assert backward == expected.tensor_flops + recomputed


@pytest.mark.parametrize("op", OPERATIONS)
def test_parallel_matrix_work_is_exact(op: str) -> None:
    forward, backward = run(op, "parallel", None)
    # The reference also multiplies q with its initial state of zeros.
    initial_state = 2 * SIZES["seq_len"] * CELLS * HEADS
    assert forward == counted(op, "parallel", "fw", None).tensor_flops + initial_state
    # Autograd stores the scores: nothing is recomputed.
    assert backward == counted(op, "parallel", "bw", None).tensor_flops


def test_attention_matrix_work_is_exact() -> None:
    operation = baselines.get_operation("attention")
    sizes = {"batch": 2, "seq_len": 128, "num_heads": 3, "head_dim_qk": 16, "head_dim_v": 16}
    tensors = resolve(operation.inputs)(sizes, dtype=torch.float64, device="cpu", seed=0)
    leaves = [tensors[name].requires_grad_() for name in operation.arguments]
    outputs: list[torch.Tensor] = []
    forward = matrix_flops(lambda: outputs.append(resolve(operation.parallel)(*leaves)))
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), leaves))
    assert forward == count("attention", mode="fw", causal_factor=1, **sizes).tensor_flops
    assert backward == count("attention", mode="bw", causal_factor=1, **sizes).tensor_flops
