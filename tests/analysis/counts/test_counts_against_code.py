"""Counted matrix work against what torch's FlopCounterMode sees of the suite's own implementations.

The square is computed whole, so the causal factor is 1. What code does beyond or short of the count is named and added
by hand. All other work is proven by the tables of test_totals.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lrbench.analysis.counts import Count, count, count_case
from lrbench.analysis.counts.operators import flops
from lrbench.kernels import FAMILIES, baselines, get_operation
from lrbench.kernels.delta_rule.launch import DeltaRequest
from lrbench.tests import ROOT
from lrbench.tests.command_line import ENVIRON, run_python

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


def test_the_example_of_the_page_counts_a_first_call() -> None:
    """The operators are registered while a counter is at work."""
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "counts.md").read_text(), re.M | re.S)
    printed = run_python(f"{example}\nprint(flops)", env={**ENVIRON, "TRITON_INTERPRET": "1"})
    sizes = {"seq_len": 64, "num_heads": 2, "head_dim_qk": 32, "head_dim_v": 32, "chunk_size": 64}
    assert int(printed.split()[-1]) == count("simple_gla", formulation="walk", mode="fwbw", **sizes).flops


def counted(op: str, mode: str, chunk_size: int) -> Count:
    result = count_case(op, "torch", mode, "fp32", None, SIZES | {"chunk_size": chunk_size})
    assert result.causal_factor == 1
    return result


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("chunk_size", [64, 100, 256])
def test_chunkwise_matrix_work_is_exact(op: str, chunk_size: int) -> None:
    operation = get_operation(op)
    tensors = operation.make_inputs(SIZES, dtype=torch.float32)
    wanted = list(operation.leaves(tensors).values())
    outputs: list[torch.Tensor] = []
    forward = matrix_flops(
        lambda: outputs.append(operation.function("torch")(*tensors.values(), chunk_size=chunk_size))
    )
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), wanted))
    seq_len, dim_qk = SIZES["seq_len"], SIZES["head_dim_qk"]
    ragged = seq_len % chunk_size
    # n is one more column of values to torch; the paper, and so the count, has it among the vector work.
    scores = (seq_len - ragged) * chunk_size + ragged**2
    column = 2 * HEADS * (scores + 2 * seq_len * dim_qk) if op == "mlstm_exp" else 0
    assert forward == counted(op, "fw", chunk_size).tensor_flops + column
    # No gradient comes from the last chunk's state, which is left out where that chunk is alone in its block.
    alone = ragged or (chunk_size if chunk_size == seq_len else 0)
    unneeded = 4 * alone * HEADS * (CELLS + (dim_qk if column else 0))
    # Autograd stores scores and states: nothing is recomputed.
    assert backward == counted(op, "bw", chunk_size).tensor_flops + 2 * column - unneeded


@pytest.mark.parametrize("op", FAMILIES["delta"])
@pytest.mark.parametrize("chunk_size", [64, 256])
def test_delta_rule_matrix_work_is_exact(op: str, chunk_size: int) -> None:
    operation = get_operation(op)
    leaves = [x.requires_grad_() for x in operation.make_inputs(SIZES, dtype=torch.float32).values()]
    keywords = {"chunk_size": chunk_size, "initial_state": torch.zeros(1, HEADS, 16, 32).requires_grad_()}
    results: list[torch.Tensor] = []
    forward = matrix_flops(
        lambda: results.extend(operation.function("torch")(*leaves, **keywords, return_last_state=True))
    )
    wanted = [*leaves, keywords["initial_state"]]
    backward = matrix_flops(lambda: torch.autograd.grad(sum(x.sum() for x in results), wanted))
    rows, of = HEADS * SIZES["seq_len"], counted(op, "fw", chunk_size)
    # Torch's counter knows no triangular systems; with a decay a column only what is below the diagonal is multiplied.
    above = 2 * (chunk_size + 1) * rows * SIZES["head_dim_qk"] if op == "kda" else 0
    assert forward == of.tensor_flops - of.parts["inverse"] - above
    # Autograd's gradient of the inverse is a product of two squares.
    square = 2 * chunk_size**2 * rows
    assert backward == counted(op, "bw", chunk_size).tensor_flops - 2 * above + square


@pytest.mark.parametrize("mode", ["fw", "bw"])
@pytest.mark.parametrize("op", ["delta_net", "gated_delta_net", "kda"])
def test_torch_counts_whole_state_of_the_delta_rule(op: str, mode: str) -> None:
    sizes = {**SIZES, "num_heads_qk": 1}
    q, k, v, *gates = baselines.get_operation(op).make_inputs(sizes, dtype=torch.float16).values()
    given = (q, k, v, None, *gates) if op == "delta_net" else (q, k, v, *gates)
    case = count_case(op, "whole_state", mode, "fp16", None, sizes, launches=False)
    name = "delta_rule_by_channel" if op == "kda" else "delta_rule"
    assert case is not None and flops(name, mode, DeltaRequest(1.0, want_last=False), given) == case.flops
