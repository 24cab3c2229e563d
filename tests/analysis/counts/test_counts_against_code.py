"""Counted work against what running code does: two independent counters of what torch dispatches.

torch's FlopCounterMode counts the matrix products of the suite's own implementations, :class:`OperationCounter` the
elementwise work of the references, by kind of function. Costs of functions are large primes, so that equal FLOPs mean
equal numbers of every kind. The square is computed whole, so the causal factor is 1. What code does beyond or short of
the count is named and added by hand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from lrbench.analysis.counts import Count, Factors, Problem, Widths, count, count_case, gated_mlp, mlstm, scalar_decay
from lrbench.analysis.counts.operators import flops
from lrbench.kernels import FAMILIES, baselines, get_operation, resolve
from lrbench.kernels.delta_rule.launch import DeltaRequest
from lrbench.tests import ROOT
from lrbench.tests.command_line import ENVIRON, run_python

OPERATIONS = FAMILIES["tfla"]
SIZES = {"batch": 1, "seq_len": 256, "num_heads": 2, "head_dim_qk": 16, "head_dim_v": 32}
HEADS, CELLS = 2, 16 * 32
F = Factors(exp=101, log=1009, sig=10007, max=100003, mask=1000003, abs=10000019)


COSTS = {
    **dict.fromkeys(("add", "sub", "mul", "div", "sqrt", "cumsum", "sum"), 1),
    "exp": F.exp,
    "expm1": 1 + F.exp,
    "log": F.log,
    "sigmoid": F.sig,
    "log_sigmoid_forward": F.log + F.sig,
    "silu": 1 + F.sig,
    "silu_backward": 5 + F.sig,
    "maximum": F.max,
    "amax": F.max,
    "abs": F.abs,
    **dict.fromkeys(("where", "masked_fill"), F.mask),
}
"""Operation of torch -> what it costs for every element, of a reduction's input or any other's (first) output."""

FREE = {
    *("neg", "clone", "zeros", "zeros_like", "new_zeros", "ones_like"),
    *("full_like", "new_full", "stack", "scalar_tensor", "_unsafe_view", "clamp"),
}
"""Operations that move, make or negate numbers; a sign is part of the addition that follows it. A clamp guards a gate
against infinities and is no part of the mathematics."""


class OperationCounter(TorchDispatchMode):
    """Counts the FLOPs of matrix products and of all else, and the bytes that operations read and write.

    An operation it does not know is an error, never left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self.products = self.others = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        name = func.overloadpacket.__name__.rstrip("_")
        if func.is_view or not outputs or name in FREE:
            return result
        if name in ("mm", "bmm"):
            # Where there is nothing to accumulate a product is 1.
            inner = args[1].shape[-2]
            self.products += (2 if inner > 1 else 1) * outputs[0].numel() * inner
        elif name in COSTS:
            counted = inputs[0] if name in ("sum", "amax") else outputs[0]
            self.others += COSTS[name] * counted.numel()
        else:
            raise NotImplementedError(f"no cost is known for {func}")
        for x in (*inputs, *outputs):
            # Elements that a tensor has of its own; broadcast ones are none.
            own = prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride)
            self.bytes += own * x.element_size()
        return result


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
    tensors = operation.make_inputs(SIZES, dtype=torch.float32)
    leaves = [tensors[name].requires_grad_(name in operation.differentiable) for name in operation.arguments]
    keywords = {"chunk_size": chunk_size} if chunk_size else {}
    outputs: list[torch.Tensor] = []
    call = operation.function(impl)
    forward = matrix_flops(lambda: outputs.append(call(*leaves, **keywords)))
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), wanted))
    return forward, backward


def test_the_example_of_the_page_counts_a_first_call() -> None:
    """The operators are registered while a counter is at work."""
    (example,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "counts.md").read_text(), re.M | re.S)
    printed = run_python(f"{example}\nprint(flops)", env={**ENVIRON, "TRITON_INTERPRET": "1"})
    sizes = {"seq_len": 64, "num_heads": 2, "head_dim_qk": 32, "head_dim_v": 32, "chunk_size": 64}
    assert int(printed.split()[-1]) == count("simple_gla", formulation="walk", mode="fwbw", **sizes).flops


def counted(op: str, impl: str, mode: str, chunk_size: int | None) -> Count:
    sizes = SIZES | ({"chunk_size": chunk_size} if chunk_size else {})
    result = count_case(op, impl, mode, "fp32", None, sizes)
    assert result.causal_factor == 1
    return result


@pytest.mark.parametrize("op", OPERATIONS)
@pytest.mark.parametrize("chunk_size", [64, 100, 256])
def test_chunkwise_matrix_work_is_exact(op: str, chunk_size: int) -> None:
    forward, backward = run(op, "torch", chunk_size)
    seq_len, dim_qk = SIZES["seq_len"], SIZES["head_dim_qk"]
    ragged = seq_len % chunk_size
    # n is one more column of values to torch; the paper, and so the count, has it among the vector work.
    scores = (seq_len - ragged) * chunk_size + ragged**2
    column = 2 * HEADS * (scores + 2 * seq_len * dim_qk) if op == "mlstm_exp" else 0
    assert forward == counted(op, "torch", "fw", chunk_size).tensor_flops + column
    # No gradient comes from the last chunk's state, which is left out where that chunk is alone in its block.
    alone = ragged or (chunk_size if chunk_size == seq_len else 0)
    unneeded = 4 * alone * HEADS * (CELLS + (dim_qk if column else 0))
    # Autograd stores scores and states: nothing is recomputed.
    assert backward == counted(op, "torch", "bw", chunk_size).tensor_flops + 2 * column - unneeded


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
    rows, of = HEADS * SIZES["seq_len"], counted(op, "torch", "fw", chunk_size)
    # Torch's counter knows no triangular systems; with a decay a column only what is below the diagonal is multiplied.
    above = 2 * (chunk_size + 1) * rows * SIZES["head_dim_qk"] if op == "kda" else 0
    assert forward == of.tensor_flops - of.parts["inverse"] - above
    # Autograd's gradient of the inverse is a product of two squares.
    square = 2 * chunk_size**2 * rows
    assert backward == counted(op, "torch", "bw", chunk_size).tensor_flops - 2 * above + square


@pytest.mark.parametrize("op", FAMILIES["delta"])
def test_a_step_of_the_delta_rule_does_the_counted_work(op: str) -> None:
    sizes = SIZES | {"seq_len": 3}
    # DeltaNet's definition decays by exp(0) = 1.
    named = F.exp + CELLS if op == "delta_net" else 0
    assert work_of(op, "recurrent", sizes) / HEADS == 3 * (
        count(op, mode="step", factors=F, **SIZES).flops / HEADS + named
    )


@pytest.mark.parametrize("mode", ["fw", "bw"])
@pytest.mark.parametrize("op", ["delta_net", "gated_delta_net", "kda"])
def test_torch_counts_whole_state_of_the_delta_rule(op: str, mode: str) -> None:
    sizes = {**SIZES, "num_heads_qk": 1}
    q, k, v, *gates = baselines.get_operation(op).make_inputs(sizes, dtype=torch.float16).values()
    given = (q, k, v, None, *gates) if op == "delta_net" else (q, k, v, *gates)
    case = count_case(op, "whole_state", mode, "fp16", None, sizes, launches=False)
    name = "delta_rule_by_channel" if op == "kda" else "delta_rule"
    assert case is not None and flops(name, mode, DeltaRequest(1.0, want_last=False), given) == case.flops


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
    tensors = operation.make_inputs(sizes, dtype=torch.float64)
    leaves = [tensors[name].requires_grad_() for name in operation.arguments]
    outputs: list[torch.Tensor] = []
    forward = matrix_flops(lambda: outputs.append(resolve(operation.parallel)(*leaves)))
    backward = matrix_flops(lambda: torch.autograd.grad(outputs[0].sum(), leaves))
    assert forward == count("attention", mode="fw", causal_factor=1, **sizes).tensor_flops
    assert backward == count("attention", mode="bw", causal_factor=1, **sizes).tensor_flops


def test_gated_mlp_eager_is_exactly_torch() -> None:
    """Forward and backward pass as torch's autograd dispatches them, work and traffic."""
    layer = Problem(op="gated_mlp", formulation="eager", seq_len=7, d_model=4, d_ff=6, f=F, widths=Widths(qkv=8))
    x, w_up, w_gate = (torch.randn(shape, dtype=torch.float64).requires_grad_() for shape in ((7, 4), (4, 6), (4, 6)))
    with OperationCounter() as forward:
        y = torch.nn.functional.silu(x @ w_gate) * (x @ w_up)
    dy = torch.randn_like(y)
    with OperationCounter() as backward:
        torch.autograd.grad(y, (x, w_up, w_gate), dy)
    for counter, formula in ((forward, gated_mlp.forward), (backward, gated_mlp.backward)):
        tally = formula(layer)
        assert counter.products == tally.matrix_flops
        assert counter.products + counter.others == tally.flops + sum(
            work.flops for work in tally.recomputed_work.values()
        )
        assert counter.bytes == tally.bytes


def work_of(op: str, form: str, sizes: dict[str, int]) -> float:
    """Return the FLOPs of a reference: its definition (recurrent) or its quadratic form (parallel)."""
    operation = baselines.get_operation(op)
    tensors = operation.make_inputs(sizes, dtype=torch.float64)
    with torch.no_grad(), OperationCounter() as counter:
        resolve(getattr(operation, form))(*(tensors[name] for name in operation.arguments))
    return counter.products + counter.others


def triangle(length: int) -> int:
    """Return what the paper's L(L + 1)/2 for a cumulative sum has beyond its L additions."""
    return length * (length + 1) // 2 - length


@pytest.mark.parametrize("op", OPERATIONS)
def test_recurrent_references_do_the_counted_work(op: str) -> None:
    """A step of every operation against its definition."""
    gate, d_qk = scalar_decay.GATE_MODELS[op], SIZES["head_dim_qk"]
    head = Problem(op=op, formulation="recurrent", seq_len=1, head_dim_qk=d_qk, head_dim_v=SIZES["head_dim_v"], f=F)
    if op == "mlstm_sig":
        # Gates go through their logarithms; sigma(i) scales k, where the paper's table scales k v^T.
        named = 2 * F.log + 2 * F.exp + d_qk - CELLS
    elif op == "mlstm_exp":
        # The same; the table has exp(-m) at 1, and one product by d_qk more for each of n and n^T q.
        named = d_qk - CELLS - 2 * d_qk + F.exp - 1
    else:
        # The definition scales every k and q, by one where the operation has no gate or scale.
        named = (0 if gate.has_input else F.exp + d_qk) + (0 if gate.scaled else d_qk)
    step = (mlstm if op in mlstm.OPERATIONS else scalar_decay).step(head)
    # The last m is compared with its least value, which the caller gets as minus infinity.
    once = F.mask if op == "mlstm_exp" else 0
    # A slope is negated once a head; Mamba-2's dt A and log dt are activations.
    assert work_of(op, "recurrent", SIZES | {"seq_len": 3}) / HEADS == 3 * (step.flops + named) + once


@pytest.mark.parametrize("op", OPERATIONS)
def test_parallel_references_do_the_counted_work(op: str) -> None:
    """The quadratic form of every operation against the reference's."""
    gate, length, d_qk, d_v = scalar_decay.GATE_MODELS[op], 5, SIZES["head_dim_qk"], SIZES["head_dim_v"]
    head = Problem(op=op, formulation="parallel", seq_len=length, head_dim_qk=d_qk, head_dim_v=d_v, causal=1, f=F)
    tally = scalar_decay.parallel_forward(head)
    square = length * length
    # The reference also makes the last state, and a weight for a state before the first token.
    named = 2 * length * d_qk * d_v + 2 * length * d_qk + length * F.exp
    # It adds an input gate and applies a scale whether the operation has one or not.
    named += square * ((0 if gate.has_input else 1) + (0 if gate.scaled else 1))
    # A constant decay is summed over time as any other; the paper's triangle is no work that code does.
    named -= triangle(length) if gate.cumulative else 0
    if op == "mlstm_exp":
        # It divides the outputs, where the table divides (and takes the magnitude of) every score; n is made as well,
        # and the last m is compared with its least value.
        named += length * (F.abs + d_v + d_qk) - square * (2 + F.abs) + F.mask
    assert work_of(op, "parallel", SIZES | {"seq_len": length}) / HEADS == tally.flops + named


N, CHANNELS = 2 * 5 * 3, 3


@pytest.mark.parametrize(
    ("op", "named"),
    [
        ("linear_scan", 0),
        ("selective_scan", 0),
        # It adds a token as a weighted sum of its value and 1, twice.
        ("wkv4", 2 * N),
        # It guards the root for a = 1; -8 softplus(c) is a product of channels alone, and softplus a log sigmoid.
        ("rglru", N * (2 * F.mask - 1) + CHANNELS * (F.sig - F.exp)),
    ],
)
def test_references_without_heads_do_the_counted_work(op: str, named: int) -> None:
    sizes = {"batch": 2, "seq_len": 5, "channels": CHANNELS, "head_dim_qk": 4}
    assert work_of(op, "recurrent", sizes) == count(op, factors=F, **sizes).flops + named
