"""From a problem's sizes to the tallies of its passes: formulas added up over chunks, heads and the batch."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from . import baselines, gated_mlp, lightning, mlstm, rglru, scalar_decay, wkv
from .formulations import TILE
from .model import Factors, Head, Layer, Scalar, Tally, Widths

Passed = tuple[Tally, Scalar]
"""The tally of one pass and its compulsory bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem: all heads and sequences, every size checked. ``causal`` is 1 where there is no square."""

    op: str
    formulation: str
    published: bool
    batch: int
    seq_len: int
    num_heads: int
    head_dim_qk: int
    head_dim_v: int
    channels: int
    d_model: int
    d_ff: int
    chunk_size: int
    qk_share: float
    causal: float
    f: Factors
    widths: Widths

    def passed(self, direction: str) -> Passed:
        """Return one pass (forward, backward, step) of the whole problem."""
        families: dict[str, Callable[[str], Passed]] = {
            "rglru": self._rglru,
            "rglru_layer": self._rglru,
            "linear_scan": self._linear_scan,
            "wkv4": self._wkv,
            "gated_mlp": self._gated_mlp,
            "projections": self._gated_mlp,
            "selective_scan": self._selective_scan,
        }
        if self.op in families:
            return families[self.op](direction)
        heads = self.batch * self.num_heads
        by_head = {"attention": self._attention, "gla": self._gla}.get(self.op, self._scalar_decay)
        tally, least = by_head(direction)
        return self._with_constants(tally * heads, least * heads)

    @property
    def head(self) -> Head:
        """One head over the whole sequence; of a selective scan all channels."""
        return Head(
            length=self.seq_len,
            d_qk=self.head_dim_qk,
            d_v=self.channels if self.op == "selective_scan" else self.head_dim_v,
            causal=self.causal,
            f=self.f,
            widths=self.widths,
            qk_share=self.qk_share,
        )

    def _layer(self, direction: str) -> Layer:
        return Layer(
            batch=self.batch,
            length=1 if direction == "step" else self.seq_len,
            channels=self.d_ff if self.op in ("gated_mlp", "projections") else self.channels,
            d_model=self.d_model,
            f=self.f,
            widths=self.widths,
        )

    def _with_constants(self, tally: Tally, least: Scalar) -> Passed:
        """Add what is read once per head and problem, in fp32: slopes and Mamba-2's A."""
        model = scalar_decay.GATE_MODELS.get(self.op)
        if model is None or not model.head_constants:
            return tally, least
        constants = 4 * self.num_heads * model.head_constants
        return tally + Tally(traffic={"per-head constants": constants}), least + constants

    def _chunks(self, chunk: Callable[[Head], Tally]) -> Tally:
        """Add up whole chunks and a ragged last one; the published counting has T / L chunks, whole or not."""
        of_length = functools.partial(dataclasses.replace, self.head)
        if self.published:
            return chunk(of_length(length=self.chunk_size)) * (self.seq_len / self.chunk_size)
        whole, rest = divmod(self.seq_len, self.chunk_size)
        tally = chunk(of_length(length=self.chunk_size)) * whole if whole else Tally()
        return tally + chunk(of_length(length=rest)) if rest else tally

    def _scalar_decay(self, direction: str) -> Passed:
        op, head, backward = self.op, self.head, direction == "backward"
        paper = op in mlstm.OPERATIONS
        compulsory = scalar_decay.compulsory_backward if backward else scalar_decay.compulsory_forward
        least = compulsory(op, head)
        if self.formulation == "recurrent":
            step = mlstm.step(op, head) if paper else scalar_decay.step(op, head)
            return (step, step.bytes) if direction == "step" else (step * head.length, least)
        if self.formulation == "lightning1":
            return (lightning.quadratic_backward if backward else lightning.quadratic_forward)(head), least
        if self.formulation == "lightning2":
            blocks = self._chunks(lightning.block_backward if backward else lightning.block_forward)
            one_block = dataclasses.replace(head, length=min(self.chunk_size, self.seq_len))
            return blocks + lightning.decays(one_block), least
        if self.formulation == "parallel":
            if backward:
                return scalar_decay.parallel_backward(op, head), least
            if paper:
                return mlstm.parallel(op, head, published=self.published), least
            return scalar_decay.parallel_forward(op, head), least

        def chunk(piece: Head) -> Tally:
            if backward:
                return scalar_decay.chunk_backward(op, piece)
            if paper:
                return mlstm.chunk(op, piece, published=self.published)
            return scalar_decay.chunk_forward(op, piece)

        tally = self._chunks(chunk)
        if self.formulation == "walk":
            return self._walk(chunk, tally, least), least
        return (_one_pass(tally, least) if self.formulation == "fused" else tally), least

    def _walk(self, chunk: Callable[[Head], Tally], chunks: Tally, least: Scalar) -> Tally:
        """Return the work of tiles with the traffic of ``chunks``; a single chunk needs no states outside the chip.

        With several chunks, their first states come from a pass of their own, which the walk then repeats tile by tile:
        recomputation, so it is kept apart.
        """
        tiles = dataclasses.replace(self, chunk_size=min(TILE, self.chunk_size))._chunks(chunk)
        if self.seq_len <= self.chunk_size:
            return _one_pass(tiles, least)
        made = {**tiles.recomputed_work, **tiles.work}
        repeated = {f"{name}, of chunks": work for name, work in made.items() if name in ("state", "state gradient")}
        states = Tally(recomputed_work=repeated)
        return dataclasses.replace(chunks, work=tiles.work, recomputed_work=tiles.recomputed_work) + states

    def _attention(self, direction: str) -> Passed:
        if direction == "step":
            step = baselines.attention_step(self.head)
            return step, step.bytes
        backward = direction == "backward"
        formula = baselines.attention_backward if backward else baselines.attention_forward
        return formula(self.head), baselines.attention_compulsory(self.head, backward=backward)

    def _gla(self, direction: str) -> Passed:
        backward = direction == "backward"
        tally = self._chunks(baselines.gla_chunk_backward if backward else baselines.gla_chunk_forward)
        least = baselines.gla_compulsory(self.head, backward=backward)
        return (_one_pass(tally, least) if self.formulation == "fused" else tally), least

    def _selective_scan(self, direction: str) -> Passed:
        backward = direction == "backward"
        formula = baselines.selective_scan_backward if backward else baselines.selective_scan_forward
        tally = formula(self.head) * self.batch
        return tally, tally.bytes

    def _rglru(self, direction: str) -> Passed:
        layer = self._layer(direction)
        if direction == "step":
            step = rglru.step(layer)
            return step, step.bytes
        formulation = "fused" if self.formulation in ("recurrent", "chunked") else self.formulation
        if direction == "backward":
            tally = self._reduced(rglru.backward(layer, formulation), layer, gated=True, backward=True)
            return tally, rglru.compulsory(layer, formulation, backward=True)
        covered = "layer" if self.published else formulation
        tally = rglru.forward(layer, formulation, published=self.published)
        least = rglru.compulsory(layer, covered, backward=False)
        return self._reduced(tally, layer, gated=True, backward=False), least

    def _reduced(self, tally: Tally, layer: Layer, *, gated: bool, backward: bool) -> Tally:
        """Return a fused pass as it is, or for the formulation chunked as reduce, then scan."""
        if self.formulation != "chunked":
            return tally
        return rglru.chunked(tally, layer, -(-self.seq_len // self.chunk_size), gated=gated, backward=backward)

    def _linear_scan(self, direction: str) -> Passed:
        layer = self._layer(direction)
        formula = {"step": rglru.scan_step, "backward": rglru.scan_backward}.get(direction, rglru.scan_forward)
        tally = formula(layer)
        return self._reduced(tally, layer, gated=False, backward=direction == "backward"), tally.bytes

    def _wkv(self, direction: str) -> Passed:
        layer = self._layer(direction)
        if direction == "step":
            step = wkv.step(layer)
            return step, step.bytes
        backward = direction == "backward"
        if self.formulation == "scan":
            tally = (wkv.scan_backward if backward else wkv.scan_forward)(layer)
        else:
            tally = (wkv.recurrent_backward if backward else wkv.recurrent_forward)(layer)
        return tally, wkv.compulsory(layer, backward=backward)

    def _gated_mlp(self, direction: str) -> Passed:
        layer, backward = self._layer(direction), direction == "backward"
        tally = (gated_mlp.backward if backward else gated_mlp.forward)(layer, self.formulation)
        return tally, gated_mlp.compulsory(layer, self.formulation, backward=backward)


def _one_pass(tally: Tally, least: Scalar) -> Tally:
    """Return the tally with the traffic of a kernel that keeps states on the chip: inputs and outputs once."""
    return dataclasses.replace(tally, traffic={"inputs and outputs": least}, recomputed_traffic={})
