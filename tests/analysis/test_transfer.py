"""The gains of mLSTM are those of its definition."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from lrbench.analysis.transfer import EPSILON, HEAD_DIM, SEQ_LEN, gains, inputs
from lrbench.kernels.mlstm_exp import mlstm_exp
from lrbench.kernels.mlstm_sig import mlstm_sig


@pytest.mark.parametrize(("op", "mlstm"), [("mlstm_sig", mlstm_sig), ("mlstm_exp", mlstm_exp)])
@pytest.mark.parametrize(("input_gate", "forget_gate"), [(-9.0, 12.0), (-6.5, 0.0), (1.0, 5.0), (8.0, -5.0)])
def test_gains_are_those_of_the_parallel_form(
    op: str, mlstm: Callable[..., Tensor], input_gate: float, forget_gate: float
) -> None:
    q, k, v = (torch.from_numpy(each)[None, :, None].contiguous() for each in inputs())
    gates = (torch.full((1, SEQ_LEN, 1), gate, dtype=torch.float64) for gate in (input_gate, forget_gate))
    h = mlstm(q, k, v, *gates, impl="parallel")
    expected = []
    for x in (h, torch.nn.functional.rms_norm(h, (HEAD_DIM,), eps=EPSILON)):
        expected.append(float((x.abs().amax(-1) / v.abs().amax(-1)).mean()))
    assert gains(op, input_gate=input_gate, forget_gate=forget_gate) == pytest.approx(expected, rel=1e-9)


def test_normalisers() -> None:
    """Only a bound that the max state does not move keeps what the input gate does."""
    for op in ("mlstm_sig", "mlstm_exp"):
        depends = {"none": True, "one": True, "stabilised": False, "unbounded": False, "max_state": False}
        for normaliser, moved in depends.items():
            low, high = (gains(op, input_gate=gate, forget_gate=3.0, normaliser=normaliser)[1] for gate in (-12.0, 0.0))
            assert (low != pytest.approx(high)) == moved
    with pytest.raises(ValueError, match="one of none, one, stabilised, unbounded, max_state, got 'two'"):
        gains("mlstm_sig", input_gate=0.0, forget_gate=0.0, normaliser="two")
