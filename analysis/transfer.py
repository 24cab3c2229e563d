"""Transfer behaviour of mLSTM: how much of a value its gates let through, before and after the norm that follows.

    G_before = mean_t max|h_t| / max|v_t|        G_after = mean_t max|NORM(h_t)| / max|v_t|
    NORM(x) = x / sqrt(mean(x^2) + epsilon)                                                          (RMS norm)

for q, k, v ~ N(0, 1), one head, and gates that are constant over the sequence. Then the input gate is a factor g of the
sums U = (S * F) V and w = (S * F) 1, with S = Q K^T / sqrt(d_qk) and F_ij = sigma(f)^(i - j) for i >= j. By the
normaliser h = g U / n:

    none          n = 1                       mlstm_sig
    one           n = max(|g w|, 1)           mlstm_exp, whose max state cancels
    stabilised    n = max(|g w|, exp(m))      a bound of 1 on what is divided by exp(m_t), as without the max state
    unbounded     n = |g w|
    max_state     n = exp(m)                  no normaliser on what is divided by exp(m_t)

m_t = max(log sigma(f) + m_{t-1}, log g) is log g here. Source: TFLA paper, section 4.2, eq. 26, and appendix D.2.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..results.arguments import one_of

SEQ_LEN = 512
HEAD_DIM = 128
EPSILON = 1e-6
NORMALISERS = {"mlstm_sig": "none", "mlstm_exp": "one"}
"""Operation -> its own normaliser."""

Array = np.ndarray[Any, np.dtype[np.float64]]


@functools.cache
def gains(
    op: str, *, input_gate: float, forget_gate: float, normaliser: str | None = None, epsilon: float = EPSILON
) -> tuple[float, float]:
    """Return G_before and G_after; ValueError for an unknown name.

    Args:
        op: mlstm_sig or mlstm_exp, which have sigma and exp for an input gate.
        input_gate, forget_gate: pre-activations.
        normaliser: none, one, stabilised, unbounded or max_state; None is the operation's own.
    """
    one_of("op", op, NORMALISERS)
    normaliser = normaliser or NORMALISERS[op]
    one_of("normaliser", normaliser, ("none", "one", "stabilised", "unbounded", "max_state"))
    u, w, v_max = _sums(forget_gate)
    gate = np.exp(input_gate) if op == "mlstm_exp" else 1 / (1 + np.exp(-input_gate))
    fixed = {"none": 1.0, "max_state": gate}
    bound = {"one": 1.0, "stabilised": gate, "unbounded": 0.0}
    h = gate * u / (fixed[normaliser] if normaliser in fixed else np.maximum(np.abs(gate * w), bound[normaliser]))
    normed = h / np.sqrt(np.mean(h * h, axis=1, keepdims=True) + epsilon)
    before, after = (float(np.mean(np.abs(x).max(axis=1) / v_max)) for x in (h, normed))
    return before, after


@functools.lru_cache(maxsize=64)
def _sums(forget_gate: float) -> tuple[Array, Array, Array]:
    """Return U [T, d], w [T, 1] and max|v_t| [T] of one draw."""
    q, k, v = inputs()
    age = np.subtract.outer(np.arange(SEQ_LEN), np.arange(SEQ_LEN))
    log_decay = -np.log1p(np.exp(-forget_gate))
    weights = q @ k.T / np.sqrt(HEAD_DIM) * np.exp(np.where(age < 0, -np.inf, age * log_decay))
    return weights @ v, weights.sum(axis=1, keepdims=True), np.abs(v).max(axis=1)


def inputs() -> tuple[Array, Array, Array]:
    """Return q, k and v [T, d], the same at every call."""
    q, k, v = np.random.default_rng(0).standard_normal((3, SEQ_LEN, HEAD_DIM))
    return q, k, v
