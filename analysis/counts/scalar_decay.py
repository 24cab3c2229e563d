"""Counts of the scalar-decay linear RNNs: C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T, h_t = scale C_t^T q_t. Per head.

mLSTM's forward passes are the TFLA paper's (:mod:`.mlstm`). Here are the other operations', counted by the same method,
and the backward pass of all of them, derived from the paper's appendix B.2. b and a are a chunk's inclusive cumulative
and exclusive reverse cumulative log decays (a plus the log input); bars are exponentials. Beside a head's names
(:attr:`.model.Head.names`) formulas have those of a :class:`GateModel`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from . import mlstm
from .model import Formula, Head, Scalar, Tally, value_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GateModel:
    """How an operation makes its log decay a_t and log input u_t, and what that costs.

    Attributes:
        gates: gate tensors ``[B, T, H]`` read, each with a gradient.
        activation: FLOPs per token from what is read to (a_t, u_t).
        activation_gradient: FLOPs per token from (da_t, du_t) to the gradients of what was read.
        has_input: 1 where there is a u_t, else 0.
        cumulative: 1 where the decays are summed over the chunk; a constant decay is multiplied by the position.
        scaled: 1 where the outputs are scaled (by d_qk^-1/2), else 0.
        stable: 1 where a stabiliser and a denominator go with the gates: mLSTMexp.
        head_constants: fp32 numbers per head that are read once (a slope, Mamba-2's A).
    """

    gates: int = 0
    activation: str = ""
    activation_gradient: str = ""
    has_input: int = 0
    cumulative: int = 1
    scaled: int = 1
    stable: int = 0
    head_constants: int = 0

    def names(self, head: Head) -> dict[str, Scalar]:
        """Return the names of formulas: u, scale, sums and stable for the flags, act and dact for the activation."""
        known = head.names
        flags = {"gates": self.gates, "u": self.has_input, "scale": self.scaled, "sums": self.cumulative}
        costs = {"act": value_of(self.activation, known), "dact": value_of(self.activation_gradient, known)}
        return {**known, **flags, **costs, "stable": self.stable}


WALKS = ("walk", "whole_state")
"""Formulations that take a chunk tile by tile with the state on the chip: fused_chunk's and whole_state's."""

# The gradient of log sigmoid is sigmoid(-x) dy: one sigmoid, one product.
_MLSTM: dict[str, Any] = {"gates": 2, "has_input": 1}

GATE_MODELS: Mapping[str, GateModel] = MappingProxyType(
    {
        "mlstm_exp": GateModel(**_MLSTM, activation="log + sig", activation_gradient="sig + 1", stable=1),
        "mlstm_sig": GateModel(**_MLSTM, activation="2*(log + sig)", activation_gradient="2*(sig + 1)"),
        "simple_gla": GateModel(gates=1),
        "gated_retention": GateModel(gates=1, activation="log + sig + 1", activation_gradient="sig + 2"),
        "retention": GateModel(cumulative=0, head_constants=1),
        "lightning": GateModel(cumulative=0, scaled=0, head_constants=1),
        # a = dt A and u = log dt; backward d dt = A da + du / dt, and dA sums dt da over the sequence.
        "mamba2_ssd": GateModel(
            gates=1, activation="1 + log", activation_gradient="5", has_input=1, scaled=0, head_constants=1
        ),
    }
)

_STATE = "(K*V + stable*(K + 1))*s"
_SCORES_AGAIN = ("2*S*K", "S*(1 + scale)")
_GATED = ("2*S*K + 2*L*K*V", "L*K*(2 + scale)")

FORMS: Mapping[str, Formula] = MappingProxyType(
    {
        # Bytes as in the paper's table 9: k, v and gates to make the states, which are stored and loaded once a chunk,
        # then q, k, v and gates again, and h; of mLSTMexp denominators and m as well.
        "chunk_forward": Formula(
            work={
                # The activation of L tokens; b, L products where the decay is constant; a = g - b (+ u); exponentials.
                "inter-chunk gates": (
                    "",
                    "L*act + L*(1 + sums*(L - 1)/2) + L*(1 + u) + (2*L + 1)*exp",
                ),
                # C = g_bar C + (a_bar K)^T V
                "state": ("2*L*K*V", "2*K*V + L*K"),
                # b_i - b_j (+ u_j) and its exponential
                "gate matrix": ("", "S*(1 + u + exp)"),
                "intra-chunk outputs": ("2*S*(K + V)", "S*(1 + scale)"),
                "inter-chunk outputs": ("2*L*K*V", "L*K*(1 + scale)"),
                "combination": ("", "L*V"),
            },
            bytes={
                "recurrent load": "L*(R + V)*w + gates*L*g",
                "recurrent store": _STATE,
                "parallel load": f"L*(2*R + V)*w + gates*L*g + {_STATE}",
                "parallel store": "L*V*w + stable*2*L*s",
            },
        ),
        # Gates, scores, gate matrix and states are made again. C, dC and, stabilised, denominators and m are loaded.
        "chunk_backward": Formula(
            work={
                # dC_{k-1} = g_bar dC_k + Q_bar^T dH
                "state gradient": ("2*L*K*V", "2*K*V"),
                # S_bar^T dH and K_bar dC_k, added
                "value gradient": ("2*S*V + 2*L*K*V", "L*V"),
                # dS_bar = dH V^T, times D
                "score gradient": ("2*S*V", "S"),
                # dS K and dH C^T, gated, scaled, added; dS^T Q and V dC^T, the same
                "query gradient": _GATED,
                "key gradient": _GATED,
                # Row sums of q dq, k dk_intra and k dk_inter in place of those of dD, which would cost 3 S; g_bar
                # <C, dC>, which joins the chunk's end; two cumulative sums; three additions a token; the activation's.
                "gate gradients if gates": ("", "6*L*K + 2*K*V + 2 + L*(L + 1) + 3*L + L*dact"),
                # dH over the denominator, at which the gradient stops
                "output gradient if stable": ("", "L*V"),
            },
            bytes={
                "recurrent load": "L*(R + V)*w + gates*L*g + stable*2*L*s",
                "recurrent store": "K*V*s",
                "parallel load": f"2*L*(R + V)*w + gates*L*g + stable*2*L*s + {_STATE} + K*V*s",
                "parallel store": "L*(2*R + V)*w + gates*L*g",
            },
            recomputed={
                "state": ("2*L*K*V", "2*K*V + L*K"),
                "scores": _SCORES_AGAIN,
                "gate matrix": ("", "S*(1 + u + exp + stable*(1 + max))"),
            },
            reread={"recurrent load": "L*(R + V)*w + gates*L*g", "recurrent store": _STATE},
        ),
        # Over a sequence of L tokens; bytes as in table 11: q, k, v, gates, h once.
        "parallel_forward": Formula(
            work={
                "forget gates": ("", "L*(1 + sums*(L - 1)/2) + L*act"),
                "gate matrix": ("", "L*L*(1 + u + exp + mask)"),
                "scores": _SCORES_AGAIN,
                "outputs": ("2*S*V", ""),
            },
            bytes={"load": "L*(2*R + V)*w + gates*L*g", "store": "L*V*w + stable*2*L*s"},
        ),
        # The intra-chunk part of a chunk's backward pass.
        "parallel_backward": Formula(
            work={
                "value gradient": ("2*S*V", ""),
                "score gradient": ("2*S*V", "S"),
                "query gradient": ("2*S*K", "L*K*scale"),
                "key gradient": ("2*S*K", "L*K*scale"),
                "gate gradients if gates": ("", "4*L*K + L*(L + 1)/2 + L + L*dact"),
                "output gradient if stable": ("", "L*V"),
            },
            bytes={
                "load": "2*L*(R + V)*w + gates*L*g + stable*2*L*s",
                "store": "L*(2*R + V)*w + gates*L*g",
            },
            recomputed={
                "scores": _SCORES_AGAIN,
                "gate matrix": ("", "L*L*(1 + u + exp + mask + stable*(1 + max))"),
            },
        ),
        # The state is loaded and stored, as in decoding: exp(a) C + (exp(u) k) v^T.
        "step": Formula(
            work={
                "gates": ("", "act + exp*(1 + u)"),
                "state": ("", "3*K*V + K*u"),
                "output": ("", "2*K*V + K*scale"),
            },
            bytes={"load": f"(2*R + V)*w + gates*g + {_STATE}", "store": f"V*w + {_STATE}"},
        ),
    }
)
"""One chunk, sequence or step of a head. Inputs and outputs once, in bytes, are in :data:`COMPULSORY`."""

COMPULSORY = {"forward": "L*((2*R + 2*V)*w + gates*g)", "backward": "L*((4*R + 3*V)*w + 2*gates*g)"}
"""q, k, v, gates, h; backward: q, k, v, dh, gates, dq, dk, dv, gate gradients."""


def tally(op: str, form: str, head: Head, *, published: bool = False) -> Tally:
    """Return what one of :data:`FORMS` takes; ``published``: as the TFLA paper prints it, its slips included."""
    formula = FORMS[form]
    work = mlstm.WORK.get((f"{op} as printed" if published else op, form)) or mlstm.WORK.get((op, form))
    return Formula(work=work or formula.work, bytes=formula.bytes, recomputed=formula.recomputed,
                   reread=formula.reread).of(GATE_MODELS[op].names(head))  # fmt: skip


def compulsory(op: str, head: Head, *, backward: bool) -> Scalar:
    """Return the bytes of one head's inputs and outputs, each once."""
    return value_of(COMPULSORY["backward" if backward else "forward"], GATE_MODELS[op].names(head))
