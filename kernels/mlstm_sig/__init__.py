"""mLSTM with sigmoid input gate (TFLA paper, section 4): declaration, data only."""

from __future__ import annotations

from ..scalar_decay.declare import scalar_decay_implementations
from ..spec import Operation

OPERATION = Operation(
    name="mlstm_sig",
    kernel="tfla",
    label="mLSTMsig",
    summary="mLSTM with sigmoid input gate, no normaliser and no max state",
    arguments=("q", "k", "v", "i", "f"),
    differentiable=("q", "k", "v", "i", "f"),
    inputs="kernels.mlstm_sig.reference:make_inputs",
    recurrent="kernels.mlstm_sig.reference:recurrent",
    parallel="kernels.mlstm_sig.reference:parallel",
    qk_ratio=0.5,
    implementations=scalar_decay_implementations("mlstm_sig"),
)
