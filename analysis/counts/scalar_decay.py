"""Derived counts of the scalar-decay linear RNNs: C_t = exp(a_t) C_{t-1} + exp(u_t) k_t v_t^T, h_t = scale C_t^T q_t.

The TFLA paper counts mLSTM's forward pass alone (:mod:`.mlstm`). Here are the other operations' forward passes, counted
in the same way, and the backward pass of all of them, mLSTM included. Per head; L is the chunk length, D = d_qk d_v,
F_causal the share of the L x L square that is computed. b and a are a chunk's inclusive cumulative and exclusive
reverse cumulative log decays (a plus the log input), g their sum; bars are exponentials (paper, appendix B.2). [x] is 1
where the operation has x, else 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .model import Factors, Problem, Scalar, Tally, Work, chunk_traffic, chunk_traffic_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class GateModel:
    """How an operation makes its log decay a_t and log input u_t, and what that costs.

    Attributes:
        gates: gate tensors ``[B, T, H]`` read, each with a gradient.
        activation: FLOPs per token from what is read to (a_t, u_t).
        activation_gradient: FLOPs per token from (da_t, du_t) to the gradients of what was read.
        has_input: 1 where there is a u_t, else 0.
        cumulative: whether the decays are summed over the chunk; a constant decay is multiplied by the position.
        scaled: 1 where the outputs are scaled (by d_qk^-1/2), else 0.
        head_constants: fp32 numbers per head that are read once (a slope, Mamba-2's A).
    """

    gates: int = 0
    activation: Callable[[Factors], Scalar] = lambda f: 0
    activation_gradient: Callable[[Factors], Scalar] = lambda f: 0
    has_input: int = 0
    cumulative: bool = True
    scaled: int = 1
    head_constants: int = 0

    def entry(self, f: Factors, *, stabilised: bool) -> Scalar:
        """Return the FLOPs of an entry of the gate matrix: b_i - b_j (+ u_j), stabilised less m_i, its exponential."""
        return 3 + f.exp + f.max if stabilised else 1 + self.has_input + f.exp


def _log_sigmoid(f: Factors) -> Scalar:
    return f.log + f.sig


def _log_sigmoid_gradient(f: Factors) -> Scalar:
    """Cost of d log sigmoid(x) = sigmoid(-x) dy: one sigmoid, one product."""
    return f.sig + 1


WALKS = ("walk", "whole_state")
"""Formulations that take a chunk tile by tile with the state on the chip: fused_chunk's and whole_state's."""

GATE_MODELS: Mapping[str, GateModel] = {
    "mlstm_exp": GateModel(gates=2, activation=_log_sigmoid, activation_gradient=_log_sigmoid_gradient, has_input=1),
    "mlstm_sig": GateModel(
        gates=2, has_input=1,
        activation=lambda f: 2 * _log_sigmoid(f), activation_gradient=lambda f: 2 * _log_sigmoid_gradient(f),
    ),
    "simple_gla": GateModel(gates=1),
    "gated_retention": GateModel(
        gates=1, activation=lambda f: _log_sigmoid(f) + 1, activation_gradient=lambda f: _log_sigmoid_gradient(f) + 1
    ),
    "retention": GateModel(cumulative=False, head_constants=1),
    "lightning": GateModel(cumulative=False, scaled=0, head_constants=1),
    # a = dt A and u = log dt; backward d dt = A da + du / dt, and dA sums dt da over the sequence.
    "mamba2_ssd": GateModel(
        gates=1, has_input=1, scaled=0, head_constants=1,
        activation=lambda f: 1 + f.log, activation_gradient=lambda f: 5,
    ),
}  # fmt: skip


def chunk_forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes of one chunk; derived, for every operation but mLSTM.

    - gates: the activation of L tokens; b: L(L + 1)/2 additions, or L products where the decay is constant;
      a = g - b (+ u): L(1 + [u]); exponentials of a, b and g
    - state: C = g_bar C + (a_bar K)^T V
    - gate matrix: b_i - b_j (+ u_j) and its exponential

    Bytes are mLSTMsig's (table 9) with the operation's own gates.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    gate, square, cells = GATE_MODELS[problem.op], length * length, d_qk * d_v
    cumulative = length * (length + 1) / 2 if gate.cumulative else length
    work = {
        "inter-chunk gates": Work(
            vector=length * gate.activation(f) + cumulative + length * (1 + gate.has_input) + (2 * length + 1) * f.exp
        ),
        "state": Work(matrix=2 * length * cells, vector=2 * cells + length * d_qk),
        "gate matrix": Work(vector=causal * square * gate.entry(f, stabilised=False)),
        "intra-chunk outputs": Work(
            matrix=causal * 2 * square * (d_qk + d_v), vector=causal * square * (1 + gate.scaled)
        ),
        "inter-chunk outputs": Work(matrix=2 * length * cells, vector=length * d_qk * (1 + gate.scaled)),
        "combination": Work(vector=length * d_v),
    }
    traffic = chunk_traffic(problem, problem.d_qk_read, gate.gates * length * widths.gate)
    return Tally(work=work, traffic=traffic)


def chunk_backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes of one chunk; derived from the paper's appendix B.2 (equations of the backward pass).

    - state gradient: dC_{k-1} = g_bar dC_k + Q_bar^T dH; value gradient: S_bar^T dH and K_bar dC_k, added
    - score gradient: dS_bar = dH V^T, times D
    - query and key gradients: dS K and dH C^T, dS^T Q and V dC^T; each pair gated, scaled, added
    - gate gradients: row sums of q dq, k dk_intra and k dk_inter: 6L d_qk; g_bar <C, dC>, which joins the chunk's end:
      2D + 2; two cumulative sums over the chunk: L(L + 1); three additions a token; and the activation's gradient.
      These row sums replace the row and column sums of dD, which would cost 3 F_causal L^2.
    - mLSTMexp divides dH by its denominator first. The gradient stops at the denominator.

    Recomputed and not counted: gates, scores, gate matrix and states.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    gate, square, cells, exp = GATE_MODELS[problem.op], length * length, d_qk * d_v, problem.stabilised
    tile = causal * 2 * square
    gated = length * d_qk * (2 + gate.scaled)
    work = {
        "state gradient": Work(matrix=2 * length * cells, vector=2 * cells),
        "value gradient": Work(matrix=tile * d_v + 2 * length * cells, vector=length * d_v),
        "score gradient": Work(matrix=tile * d_v, vector=causal * square),
        "query gradient": Work(matrix=tile * d_qk + 2 * length * cells, vector=gated),
        "key gradient": Work(matrix=tile * d_qk + 2 * length * cells, vector=gated),
    }
    if gate.gates:
        a_token = 6 * d_qk + (length + 1) + 3 + gate.activation_gradient(f)
        work["gate gradients"] = Work(vector=length * a_token + 2 * cells + 2)
    if exp:
        work["output gradient"] = Work(vector=length * d_v)

    gate_bytes = gate.gates * length * widths.gate
    traffic, again = chunk_traffic_backward(problem, problem.d_qk_read, gate_bytes)
    recomputed = {
        "state": Work(matrix=2 * length * cells, vector=2 * cells + length * d_qk),
        "scores": Work(matrix=tile * d_qk, vector=causal * square * (1 + gate.scaled)),
        "gate matrix": Work(vector=causal * square * gate.entry(f, stabilised=exp)),
    }
    return Tally(work, traffic, recomputed, again)


def parallel_forward(problem: Problem) -> Tally:
    """Forward FLOPs and bytes of the fully parallel form over a sequence; of mLSTM the paper's tables 10 and 11.

    ``published`` gives mLSTMsig the paper's gate matrix, which is mLSTMexp's (one subtraction and F_max too many).
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    gate, exp = GATE_MODELS[problem.op], problem.stabilised
    square = length * length
    cumulative = length * (length + 1) / 2 if gate.cumulative else length
    work = {
        "forget gates": Work(vector=cumulative + length * gate.activation(f)),
        "gate matrix": Work(vector=square * (gate.entry(f, stabilised=exp or problem.published) + f.mask)),
        "scores": Work(matrix=causal * 2 * square * d_qk, vector=causal * square * (1 + gate.scaled)),
        "outputs": Work(matrix=causal * 2 * square * d_v),
    }
    if exp:
        work["normaliser"] = Work(vector=causal * (square * (3 + f.abs) + length * (f.exp + f.max)))
    traffic = {
        "load": length * (2 * problem.d_qk_read + d_v) * widths.qkv + gate.gates * length * widths.gate,
        "store": length * d_v * widths.qkv + problem.statistics,
    }
    return Tally(work=work, traffic=traffic)


def parallel_backward(problem: Problem) -> Tally:
    """Backward FLOPs and bytes of the fully parallel form: the intra-chunk part of :func:`chunk_backward` with L = T.

    Gate gradients are from row sums of q dq and k dk. Scores and gate matrix are recomputed.
    """
    length, d_qk, d_v, causal, f, widths = problem.per_head
    qk, gate = problem.d_qk_read, GATE_MODELS[problem.op]
    square, exp = length * length, problem.stabilised
    tile = causal * 2 * square
    work = {
        "value gradient": Work(matrix=tile * d_v),
        "score gradient": Work(matrix=tile * d_v, vector=causal * square),
        "query gradient": Work(matrix=tile * d_qk, vector=length * d_qk * gate.scaled),
        "key gradient": Work(matrix=tile * d_qk, vector=length * d_qk * gate.scaled),
    }
    if gate.gates:
        work["gate gradients"] = Work(
            vector=4 * length * d_qk + length * (length + 1) / 2 + length + length * gate.activation_gradient(f)
        )
    if exp:
        work["output gradient"] = Work(vector=length * d_v)
    gate_bytes = gate.gates * length * widths.gate
    traffic = {
        "load": length * 2 * (qk + d_v) * widths.qkv + gate_bytes + problem.statistics,
        "store": length * (2 * qk + d_v) * widths.qkv + gate_bytes,
    }
    recomputed_work = {
        "scores": Work(matrix=tile * d_qk, vector=causal * square * (1 + gate.scaled)),
        "gate matrix": Work(vector=square * (gate.entry(f, stabilised=exp) + f.mask)),
    }
    return Tally(work=work, traffic=traffic, recomputed_work=recomputed_work)


def step(problem: Problem) -> Tally:
    """FLOPs and bytes of one recurrent step, the state loaded and stored as in decoding; every operation but mLSTM.

    Gates: activation, one exponential of the decay and one of the input; state: exp(a) C + (exp(u) k) v^T.
    """
    d_qk, d_v, f, widths = problem.head_dim_qk, problem.head_dim_v, problem.f, problem.widths
    qk, gate = problem.d_qk_read, GATE_MODELS[problem.op]
    cells = d_qk * d_v
    work = {
        "gates": Work(vector=gate.activation(f) + f.exp * (1 + gate.has_input)),
        "state": Work(vector=3 * cells + d_qk * gate.has_input),
        "output": Work(vector=2 * cells + d_qk * gate.scaled),
    }
    traffic = {
        "load": (2 * qk + d_v) * widths.qkv + gate.gates * widths.gate + cells * widths.state,
        "store": d_v * widths.qkv + cells * widths.state,
    }
    return Tally(work=work, traffic=traffic)
