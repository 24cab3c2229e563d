"""Plain torch forms of operations, written to be counted: one sequence or chunk of one head, float64.

They follow the equations that the counts' docstrings name, in their order; nothing is arranged for speed. What a pass
recomputes is a function of its own, so that it can be counted apart.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Element = tuple[Tensor, ...]


def accumulate(decay: Tensor, x: Tensor) -> Tensor:
    """Return h_t = decay_t h_{t-1} + x_t along the first dim."""
    h = torch.zeros_like(x[0])
    steps = []
    for t in range(x.shape[0]):
        h = decay[t] * h + x[t]
        steps.append(h)
    return torch.stack(steps)


def shifted(x: Tensor) -> Tensor:
    """Return x_{t-1}, zero before the first."""
    return torch.cat((torch.zeros_like(x[:1]), x[:-1]))


def accumulate_gradient(decay: Tensor, dh: Tensor) -> Tensor:
    """Return g_t = dh_t + decay_{t+1} g_{t+1} along the first dim."""
    ahead = torch.cat((decay[1:], torch.zeros_like(decay[:1])))
    return accumulate(ahead.flip(0), dh.flip(0)).flip(0)


def maps_of_chunks(a: Tensor, b: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return what each chunk of ``size`` steps is to a state: h -> product of its a times h, plus its last h from 0."""
    products, ends = [], []
    for decay, x in zip(a.split(size), b.split(size), strict=True):
        product, end = torch.ones_like(a[0]), torch.zeros_like(b[0])
        for t in range(decay.shape[0]):
            product, end = product * decay[t], decay[t] * end + x[t]
        products.append(product)
        ends.append(end)
    return torch.stack(products), torch.stack(ends)


def gradient_maps_of_chunks(a: Tensor, dh: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the same of w_t = a_t (dh_t + w_{t+1}), which step t passes to the one before; the last chunk first."""
    products, ends = [], []
    for decay, grad in zip(reversed(a.split(size)), reversed(dh.split(size)), strict=True):
        product, end = torch.ones_like(a[0]), torch.zeros_like(dh[0])
        for t in reversed(range(decay.shape[0])):
            product, end = product * decay[t], decay[t] * (grad[t] + end)
        products.append(product)
        ends.append(end)
    return torch.stack(products), torch.stack(ends)


def states_between(a: Tensor, b: Tensor) -> Tensor:
    """Return the state before every chunk of the maps a, b; that behind the last is made too, and not stored."""
    state, states = torch.zeros_like(b[0]), []
    for n in range(a.shape[0]):
        states.append(state)
        state = a[n] * state + b[n]
    return torch.stack(states)


# RG-LRU


def rglru_gates(r: Tensor, i: Tensor) -> tuple[Tensor, Tensor]:
    """Return sigma(r), sigma(i)."""
    return r.sigmoid(), i.sigmoid()


def rglru_decay(gate: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return softplus(c) and a."""
    softplus = (1 + c.exp()).log()
    return softplus, -8.0 * gate * softplus


def rglru_input(x: Tensor, gate: Tensor, log_a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a^2, sigma(i) x and sqrt(1 - a^2)."""
    squared = (2 * log_a).exp()
    return squared, x * gate, (1 - squared).sqrt()


def rglru_forward(x: Tensor, r: Tensor, i: Tensor, c: Tensor) -> Tensor:
    """Return h [T, C] of x, r, i [T, C] and c [C]."""
    gate_a, gate_x = rglru_gates(r, i)
    _, log_a = rglru_decay(gate_a, c)
    _, y, s = rglru_input(x, gate_x, log_a)
    return accumulate(log_a.exp(), s * y)


def rglru_recompute(x: Tensor, r: Tensor, i: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """Return what the fused backward pass makes again: sigma(r), sigma(i), softplus(c), a, a^2, y and s."""
    gate_a, gate_x = rglru_gates(r, i)
    softplus, log_a = rglru_decay(gate_a, c)
    return gate_a, gate_x, softplus, log_a.exp(), *rglru_input(x, gate_x, log_a)


def rglru_backward(x: Tensor, c: Tensor, h: Tensor, dh: Tensor, again: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return dx, dr, di, dc."""
    gate_a, gate_x, softplus, a, squared, y, s = again
    g = accumulate_gradient(a, dh)
    d_log_a = g * shifted(h) * a - g * y * squared / s
    eighth = -8.0 * d_log_a
    dr = eighth * softplus * (gate_a * (1 - gate_a))
    dc = (eighth * gate_a).sum(0) * c.sigmoid()
    dy = g * s
    di = dy * x * (gate_x * (1 - gate_x))
    return dy * gate_x, dr, di, dc


# WKV


def wkv_forward(k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, ...]:
    """Return y [T, C] step by step, and what backward needs: largest exponentials and denominators of the outputs."""
    num = den = torch.zeros_like(w)
    top = torch.full_like(w, -1e30)
    ys, tops, dens, states = [], [], [], []
    for t in range(k.shape[0]):
        states.append((num, den, top))
        new = u + k[t]
        q = torch.maximum(top, new)
        before, now = (top - q).exp(), (new - q).exp()
        numerator, denominator = before * num + now * v[t], before * den + now
        ys.append(numerator / denominator)
        tops.append(q)
        dens.append(denominator)
        decayed = top - w
        top = torch.maximum(decayed, k[t])
        before, now = (decayed - top).exp(), (k[t] - top).exp()
        num, den = before * num + now * v[t], before * den + now
    return torch.stack(ys), torch.stack(tops), torch.stack(dens), *(torch.stack(x) for x in zip(*states, strict=True))


def wkv_parameter_sweep(k: Tensor, v: Tensor, w: Tensor, u: Tensor, dy: Tensor, kept: tuple[Tensor, ...]) -> Element:
    """Return dw, du and P = dy / den, forward in time. ``weights`` are exponentials that recomputation makes."""
    ys, dens, states, decays, before, now = kept
    nums, dens_before = states
    d_num = d_den = dw = du = torch.zeros_like(w)
    ps = []
    for t in range(k.shape[0]):
        p = dy[t] / dens[t]
        dw = dw + (d_num - ys[t] * d_den) * before[t] * p
        du = du + (v[t] - ys[t]) * now[t] * p
        d_num, d_den = decays[t] * (d_num - nums[t]), decays[t] * (d_den - dens_before[t])
        ps.append(p)
    return dw, du, torch.stack(ps)


def wkv_kept(k: Tensor, w: Tensor, u: Tensor, forward: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return what the forward pass computes on the way, as the parameter sweep wants it."""
    ys, tops, dens, nums, dens_before, states_top = forward
    after = torch.maximum(states_top - w, k)
    decays, before, now = (states_top - w - after).exp(), (states_top - tops).exp(), (u + k - tops).exp()
    return ys, dens, (nums, dens_before), decays, before, now


def wkv_input_sweep(k: Tensor, v: Tensor, w: Tensor, u: Tensor, ys: Tensor, ps: Tensor, tops: Tensor) -> Element:
    """Return dk, dv, backward in time: (S, D) e^o are the gradients of num and den after the step."""
    s = d = torch.zeros_like(w)
    o = torch.full_like(w, -1e30)
    dks, dvs = [], []
    for t in range(k.shape[0] - 1, -1, -1):
        r = -ps[t] * ys[t]
        mine, later = (u + k[t] - tops[t]).exp(), (k[t] + o).exp()
        dvs.append(mine * ps[t] + later * s)
        dks.append(mine * (ps[t] * v[t] + r) + later * (s * v[t] + d))
        decayed = o - w
        o = torch.maximum(decayed, -tops[t])
        old, new = (decayed - o).exp(), (-tops[t] - o).exp()
        s, d = old * s + new * ps[t], old * d + new * r
    return torch.stack(dks[::-1]), torch.stack(dvs[::-1])


def associative_scan(combine: Callable[[Element, Element], Element], elements: Element) -> Element:
    """Return the inclusive scan along the first dim, work-efficient: pairs, their scan, the elements between."""

    def cut(part: slice, of: Element) -> Element:
        return tuple(x[part] for x in of)

    length = len(elements[0])
    if length < 2:
        return elements
    pairs = associative_scan(combine, combine(cut(slice(0, length - 1, 2), elements), cut(slice(1, None, 2), elements)))
    left = pairs if length % 2 else cut(slice(0, -1), pairs)
    between = combine(left, cut(slice(2, None, 2), elements)) if length > 2 else cut(slice(0, 0), elements)
    out = []
    for first, even, odd in zip(elements, between, pairs, strict=True):
        whole = first.new_empty(first.shape)
        whole[0] = first[0]
        whole[1::2], whole[2::2] = odd, even
        out.append(whole)
    return tuple(out)


def log_add(t1: Tensor, v1: Tensor, t2: Tensor, v2: Tensor) -> tuple[Tensor, Tensor]:
    """Add v1 e^t1 and v2 e^t2: log weight and value of the sum."""
    t = torch.maximum(t1, t2) + torch.log1p((-(t1 - t2).abs()).exp())
    return t, (t1 - t).exp() * v1 + (t2 - t).exp() * v2


def wkv_scan(k: Tensor, v: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return (log weight, value) of every prefix relative to its last position."""

    def combine(earlier: Element, later: Element) -> Element:
        (n1, t1, v1), (n2, t2, v2) = earlier, later
        t, value = log_add(t1 - n2[:, None] * w, v1, t2, v2)
        return n1 + n2, t, value

    _, log_weight, value = associative_scan(combine, (torch.ones(len(k), dtype=torch.int64), k, v))
    return log_weight, value


def wkv_scan_outputs(k: Tensor, v: Tensor, u: Tensor, log_weight: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Return log of the denominators and y of the tokens after the first, whose output is v[0]."""
    return log_add(log_weight[:-1], value[:-1], u + k[1:], v[1:])


def wkv_scan_back(dy: Tensor, r: Tensor, log_den: Tensor, w: Tensor) -> Element:
    """Return (log weight, S, D): the gradients of num and den at every position, from outputs at and after it."""

    def combine(later: Element, earlier: Element) -> Element:
        (n1, t1, s1, d1), (n2, t2, s2, d2) = later, earlier
        moved = t1 - n2[:, None] * w
        t = torch.maximum(moved, t2)
        far, near = (moved - t).exp(), (t2 - t).exp()
        return n1 + n2, t, far * s1 + near * s2, far * d1 + near * d2

    ones = torch.ones(len(dy), dtype=torch.int64)
    elements = (ones, *(x.flip(0) for x in (-log_den, dy, r)))
    _, *scanned = associative_scan(combine, elements)
    return tuple(x.flip(0) for x in scanned)


def wkv_token_gradients(
    k: Tensor, v: Tensor, u: Tensor, w: Tensor, dy: Tensor, r: Tensor, log_den: Tensor, prefix: Element, suffix: Element
) -> Element:
    """Return dk, dv, dw, du from (log weight, value) before and (log weight, S, D) after every position."""
    o, s, d = suffix
    t, value = prefix
    mine, later = (u + k - log_den).exp(), (k + o).exp()
    dv = mine * dy + later * s
    now = mine * (dy * v + r)
    dk = now + later * (s * v + d)
    dw = -((t + o - w).exp() * (s * value + d)).sum(0)
    return dk, dv, dw, now.sum(0)


# Gated MLP


def activation_gradient(dy: Tensor, up: Tensor, gate: Tensor, sigma: Tensor, silu: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of up and gate, given sigma(gate) and silu(gate)."""
    return dy * silu, dy * up * (sigma * (1 + gate * (1 - sigma)))


# Lightning Attention


def lightning_decays(slope: Tensor, length: int) -> tuple[Tensor, ...]:
    """Return M [L, L], Lambda [L], lambda^L Lambda^-1 [L] and lambda^L of a block."""
    i = torch.arange(1, length + 1, dtype=slope.dtype)
    mask = (-slope * (i[:, None] - i[None, :])).exp().tril()
    return mask, (-slope * i).exp(), (-slope * (length - i)).exp(), (-slope * torch.full((), float(length))).exp()


def lightning_forward(q: Tensor, k: Tensor, v: Tensor, decays: tuple[Tensor, ...], block: int) -> Tensor:
    """Return o of the source's algorithm 1; T is a multiple of the block."""
    mask, to_row, to_end, whole = decays
    kv = q.new_zeros(q.shape[1], v.shape[1])
    out = []
    for start in range(0, len(q), block):
        qi, ki, vi = (x[start : start + block] for x in (q, k, v))
        out.append(((qi @ ki.T) * mask) @ vi + (to_row[:, None] * qi) @ kv)
        kv = whole * kv + (to_end[:, None] * ki).T @ vi
    return torch.cat(out)


def lightning_dq(k: Tensor, v: Tensor, do: Tensor, decays: tuple[Tensor, ...], block: int) -> Tensor:
    """Return dq: the first loop of algorithm 2."""
    mask, to_row, to_end, whole = decays
    kv = k.new_zeros(k.shape[1], v.shape[1])
    out = []
    for start in range(0, len(k), block):
        ki, vi, doi = (x[start : start + block] for x in (k, v, do))
        out.append(((doi @ vi.T) * mask) @ ki + (to_row[:, None] * doi) @ kv.T)
        kv = whole * kv + (to_end[:, None] * ki).T @ vi
    return torch.cat(out)


def lightning_dkv(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, decays: tuple[Tensor, ...], block: int
) -> tuple[Tensor, Tensor]:
    """Return dk, dv: the second loop of algorithm 2."""
    mask, to_row, to_end, whole = decays
    dkv = k.new_zeros(k.shape[1], v.shape[1])
    dks, dvs = [], []
    for start in range(len(k) - block, -1, -block):
        qi, ki, vi, doi = (x[start : start + block] for x in (q, k, v, do))
        dks.append(((doi @ vi.T) * mask).T @ qi + (to_end[:, None] * vi) @ dkv.T)
        dvs.append(((qi @ ki.T) * mask).T @ doi + (to_end[:, None] * ki) @ dkv)
        dkv = whole * dkv + (to_row[:, None] * qi).T @ doi
    return torch.cat(dks[::-1]), torch.cat(dvs[::-1])


def lightning_quadratic(q: Tensor, k: Tensor, v: Tensor, decay: Tensor) -> Tensor:
    """Return o [T, V] from the matrix of decays [T, T]."""
    return ((q @ k.T) * decay) @ v


def lightning_quadratic_backward(q: Tensor, k: Tensor, v: Tensor, do: Tensor, decay: Tensor, scores: Tensor) -> Element:
    """Return dq, dk, dv; ``scores`` are the decayed ones."""
    d_scores = (do @ v.T) * decay
    return d_scores @ k, d_scores.T @ q, scores.T @ do


# Scalar decay, one chunk: C' = exp(g) C + (exp(a) K)^T V, h = scale (D * Q K^T) V + scale exp(b) Q C


def decay_gates(b: Tensor, u: Tensor | None) -> tuple[Tensor, ...]:
    """Return exp(b), exp(a) and exp(g) of a chunk with cumulative log decays b [L] and log inputs u [L]."""
    g = b[-1:]
    a = g - b if u is None else g - b + u
    return b.exp(), a.exp(), g.exp()


def decay_matrix(b: Tensor, u: Tensor | None) -> Tensor:
    """Return exp(b_i - b_j + u_j) [L, L], not masked yet."""
    exponent = b[:, None] - b[None, :]
    return (exponent if u is None else exponent + u[None, :]).exp()


def decay_scores(q: Tensor, k: Tensor, d: Tensor, scale: float | None) -> Tensor:
    """Return the gated, masked and scaled scores."""
    scores = (q @ k.T) * d.tril()
    return scores if scale is None else scores * scale


def decay_state(c: Tensor, k: Tensor, v: Tensor, a_bar: Tensor, g_bar: Tensor) -> Tensor:
    """Return the state after the chunk."""
    return g_bar * c + (a_bar[:, None] * k).T @ v


def decay_outputs(q: Tensor, v: Tensor, c: Tensor, scores: Tensor, b_bar: Tensor, scale: float | None) -> Tensor:
    """Return h of the chunk."""
    gated = b_bar[:, None] * q
    return scores @ v + (gated if scale is None else gated * scale) @ c


def decay_state_gradient(dc: Tensor, gated_q: Tensor, dh: Tensor, g_bar: Tensor) -> Tensor:
    """Return the gradient of the state before the chunk from that of the state after it."""
    return g_bar * dc + gated_q.T @ dh


def decay_input_gradients(
    q: Tensor, k: Tensor, v: Tensor, dh: Tensor, c: Tensor, dc: Tensor, scores: Tensor, d: Tensor, gated_k: Tensor,
    b_bar: Tensor, a_bar: Tensor, scale: float | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk, dv and dk's parts from within the chunk and through the state; d is masked."""

    def scaled(x: Tensor) -> Tensor:
        return x if scale is None else x * scale

    dv = scores.T @ dh + gated_k @ dc
    d_scores = (dh @ v.T) * d
    dq = scaled(d_scores @ k + b_bar[:, None] * (dh @ c.T))
    dk_intra, dk_inter = scaled(d_scores.T @ q), a_bar[:, None] * (v @ dc.T)
    return dq, dk_intra + dk_inter, dv, dk_intra, dk_inter


def decay_gate_gradients(
    q: Tensor, k: Tensor, dq: Tensor, dk_intra: Tensor, dk_inter: Tensor, c: Tensor, dc: Tensor, g_bar: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the log decays and log inputs of the chunk.

    A step's decay reaches what lies at and after it, and the chunk's end from the state before and the steps before it.
    """
    row, within, through = (q * dq).sum(1), (k * dk_intra).sum(1), (k * dk_inter).sum(1)
    after = row - within
    after[-1:] += g_bar * (c * dc).sum()
    return after.flip(0).cumsum(0).flip(0) + shifted(through.cumsum(0)), within + through


# Gated linear attention, one chunk


def gla_gates(g: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return exp(b), exp(-b), exp(b_L - b) [L, K] and exp(b_L) [K] of log decays g [L, K]."""
    b = g.cumsum(0)
    return b.exp(), (-b).exp(), (b[-1:] - b).exp(), b[-1].exp()


def gla_operands(q: Tensor, k: Tensor, gates: tuple[Tensor, ...], scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gated and scaled q, k for the scores and k for the state."""
    return q * gates[0] * scale, k * gates[1], k * gates[2]


def gla_forward(v: Tensor, c: Tensor, operands: tuple[Tensor, ...], whole: Tensor) -> tuple[Tensor, Tensor]:
    """Return h of the chunk and the state after it."""
    q, k, k_end = operands
    h = (q @ k.T).tril() @ v + q @ c
    return h, whole[:, None] * c + k_end.T @ v


def gla_backward(
    q: Tensor, k: Tensor, v: Tensor, dh: Tensor, c: Tensor, dc: Tensor, operands: tuple[Tensor, ...],
    gates: tuple[Tensor, ...], scores: Tensor, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return dq, dk, dv, the gradient of C before the chunk and the gradient of g."""
    gated_q, gated_k, k_end = operands
    to_row, from_row, to_end, whole = gates
    d_c = whole[:, None] * dc + gated_q.T @ dh
    dv = scores.T @ dh + k_end @ dc
    d_scores = (dh @ v.T).tril()
    dq = (d_scores @ gated_k + dh @ c.T) * to_row * scale
    dk_end = (v @ dc.T) * to_end
    dk = (d_scores.T @ gated_q) * from_row + dk_end
    dg_end = whole * (c * dc).sum(1) + (k * dk_end).sum(0)
    db = q * dq - k * dk
    return dq, dk, dv, d_c, db.flip(0).cumsum(0).flip(0) + dg_end


# Attention and selective scan


def attention_forward(q: Tensor, k: Tensor, v: Tensor, scale: float, masked: bool) -> tuple[Tensor, Tensor]:
    """Return o and the log of the softmax's denominators, as one tile of FlashAttention."""
    scores = (q @ k.T) * scale
    if masked:
        scores = scores.masked_fill(torch.ones(scores.shape, dtype=torch.bool).triu(1), -torch.inf)
    top = scores.amax(1)
    weights = (scores - top[:, None]).exp()
    total = weights.sum(1)
    return (weights @ v) / total[:, None], top + total.log()


def attention_backward(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, do: Tensor, weights: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv from the softmax's weights [T, T]."""
    delta = (do * o).sum(1)
    d_scores = weights * (do @ v.T - delta[:, None])
    return (d_scores @ k) * scale, (d_scores.T @ q) * scale, weights.T @ do


def selective_states(u: Tensor, dt: Tensor, rates: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dt u, the states x [T, D, N] and their decays of u, dt [T, D], rates A [D, N] and B [T, N]."""
    decay, gated = (dt[:, :, None] * rates).exp(), dt * u
    return gated, accumulate(decay, gated[:, :, None] * b[:, None, :]), decay


def selective_backward(
    u: Tensor, dt: Tensor, rates: Tensor, b: Tensor, c: Tensor, dy: Tensor, gated: Tensor, states: Tensor, decay: Tensor
) -> tuple[Tensor, ...]:
    """Return du, d dt, dA, dB, dC; ``gated`` is dt u."""
    dx = accumulate_gradient(decay, c[:, None, :] * dy[:, :, None])
    d_log = dx * shifted(states) * decay
    d_input = (dx * b[:, None, :]).sum(2)
    d_dt = (d_log * rates).sum(2) + d_input * u
    d_rates = (d_log * dt[:, :, None]).sum(0)
    d_b = (dx * gated[:, :, None]).sum(1)
    d_c = (states * dy[:, :, None]).sum(1)
    return d_input * dt, d_dt, d_rates, d_b, d_c
