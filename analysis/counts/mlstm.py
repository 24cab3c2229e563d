"""mLSTM's forward work as the TFLA paper tabulates it (appendix F, tables 8, 10, 12 and 14), with every factor kept.

Cumulative sums are counted as the paper counts them, L(L + 1)/2. In a step nothing runs on matrix units: every product
is a rank-one update or a matrix-vector product. Bytes (tables 9, 11, 13) are those of :data:`.scalar_decay.FORMS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from .model import Works

OPERATIONS = ("mlstm_exp", "mlstm_sig")

_SUM = "L*(L + 1)/2"
_EXP_GATES = f"2*L + {_SUM} + L*(1 + exp + log + sig) + 3 + max + exp"

_EXP_CHUNK: Works = {
    "inter-chunk gates": ("", _EXP_GATES),
    "state": ("2*L*K*V", "2*K*V + L*K"),
    "intra-chunk forget gates": ("", f"{_SUM} + L*(log + sig)"),
    "gate matrix": ("", "c*(L*L*(3 + exp + max) + L*(1 + max))"),
    "intra-chunk outputs": ("2*S*(K + V)", "3*S"),
    "inter-chunk outputs": ("2*L*K*V", "3*L*K"),
    "combination": ("", "2*L*V + L*(1 + max + abs + exp)"),
    "normaliser state": ("", "2*K + 2*L*K"),
}
_SIG_CHUNK: Works = {
    "inter-chunk gates": ("", f"2*L + {_SUM} + L*exp + exp + 2*L*(log + sig)"),
    "state": ("2*L*K*V", "2*K*V + L*K"),
    "intra-chunk forget gates": ("", f"{_SUM} + 2*L*(log + sig)"),
    "gate matrix": ("", "S*(2 + exp)"),
    "intra-chunk outputs": ("2*S*(K + V)", "3*S"),
    "inter-chunk outputs": ("2*L*K*V", "L*K"),
    "combination": ("", "L*V"),
}
_EXP_PARALLEL: Works = {
    "forget gates": ("", f"{_SUM} + L*(log + sig)"),
    "gate matrix": ("", "L*L*(3 + exp + max + mask)"),
    "scores": ("2*S*K", "2*S"),
    "outputs": ("2*S*V", ""),
    "normaliser": ("", "c*(L*L*(3 + abs) + L*(exp + max))"),
}
_SIG_PARALLEL: Works = {
    "forget gates": ("", f"{_SUM} + 2*L*(log + sig)"),
    "gate matrix": ("", "L*L*(2 + exp + mask)"),
    "scores": ("2*S*K", "2*S"),
    "outputs": ("2*S*V", ""),
}

WORK: Mapping[tuple[str, str], Works] = MappingProxyType(
    {
        ("mlstm_exp", "chunk_forward"): _EXP_CHUNK,
        ("mlstm_sig", "chunk_forward"): _SIG_CHUNK,
        # The paper's total of mLSTMsig (eq. 118) carries mLSTMexp's gate row: with every F at 1 the operation's own
        # parts are that total + L - 4. Table 10 gives it mLSTMexp's gate matrix, a subtraction and F_max too many.
        ("mlstm_sig as printed", "chunk_forward"): {**_SIG_CHUNK, "inter-chunk gates": ("", _EXP_GATES)},
        ("mlstm_exp", "parallel_forward"): _EXP_PARALLEL,
        ("mlstm_sig", "parallel_forward"): _SIG_PARALLEL,
        ("mlstm_sig as printed", "parallel_forward"): {**_SIG_PARALLEL, "gate matrix": _EXP_PARALLEL["gate matrix"]},
        ("mlstm_exp", "step"): {
            "gates": ("", "4 + 2*exp + log + sig + max"),
            "state": ("", "4*K*V"),
            "output": ("", "2*K*V + K"),
            "normaliser": ("", "6*K + V + 1 + abs + max"),
        },
        ("mlstm_sig", "step"): {"gates": ("", "2*sig"), "state": ("", "4*K*V"), "output": ("", "2*K*V + K")},
    }
)
"""Operation and form -> its parts on matrix units and on vector units."""
