"""mLSTM with exponential input gate (TFLA paper, section 2): declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="mlstm_exp",
    kernel="tfla",
    label="mLSTMexp",
    summary="mLSTM with exponential input gate, normaliser and max state; the denominator carries no gradient",
    arguments=("q", "k", "v", "i", "f"),
    differentiable=("q", "k", "v", "i", "f"),
    inputs="kernels.mlstm_exp.reference:make_inputs",
    recurrent="kernels.mlstm_exp.reference:recurrent",
    parallel="kernels.mlstm_exp.reference:parallel",
    qk_ratio=0.5,
    implementations=scalar_decay_implementations("mlstm_exp"),
)
