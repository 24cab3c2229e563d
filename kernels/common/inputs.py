"""Random numbers of which every operation makes its inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...results.documents import lengths_of
from .arguments import compute_dtype


class Draw:
    """Draws numbers reproducibly.

    On the CPU numbers are drawn in float64 and then rounded, so every dtype gets the same problem; on a GPU they are
    drawn there, in float32, since there may be gigabytes of them. Gates and parameters are float32 beside float32,
    float16 and bfloat16 inputs (float64 beside float64): a forget gate near 1 raised to a chunk length amplifies the
    rounding of its pre-activation. They are rounded to values that the inputs' dtype holds too, so that a package that
    wants its gates in that dtype computes the same problem.

    Args:
        sizes: the problem's sizes; the operation declares which.
        dtype: dtype of the inputs.
        device: device of the inputs.
        seed: of the random numbers.
    """

    def __init__(self, sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self.sizes, self.seed = sizes, seed
        self.dtype, self.gate_dtype, self.device = dtype, compute_dtype(dtype), device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.draw_dtype = torch.float64 if self.generator.device.type == "cpu" else torch.float32

    def noise(self, *shape: int) -> Tensor:
        """Draw from N(0, 1) before any rounding."""
        return torch.randn(shape, generator=self.generator, dtype=self.draw_dtype, device=self.device)

    def uniform(self, *shape: int) -> Tensor:
        """Draw from [0, 1) before any rounding."""
        return torch.rand(shape, generator=self.generator, dtype=self.draw_dtype, device=self.device)

    def normal(self, *shape: int) -> Tensor:
        """Draw from N(0, 1) in the inputs' dtype."""
        return self.noise(*shape).to(self.dtype)

    def round_gate(self, values: Tensor) -> Tensor:
        """Round gates to values that the inputs' dtype holds, in the gates' dtype."""
        return values.to(self.dtype).to(self.gate_dtype)

    @property
    def tokens(self) -> tuple[int, int, int]:
        """(B, T, H) of an operation over heads."""
        return self.sizes["batch"], self.sizes["seq_len"], self.sizes["num_heads"]

    @property
    def keys(self) -> tuple[int, ...]:
        """(B, T, H, K), the shape of keys and queries, which may have fewer heads."""
        batch, seq_len, heads = self.tokens
        return batch, seq_len, self.sizes.get("num_heads_qk", heads), self.sizes["head_dim_qk"]

    @property
    def values(self) -> tuple[int, ...]:
        """(B, T, H, V), the shape of values."""
        return *self.tokens, self.sizes["head_dim_v"]

    @property
    def channels(self) -> tuple[int, int, int]:
        """(B, T, C) of an operation over channels."""
        return self.sizes["batch"], self.sizes["seq_len"], self.sizes["channels"]

    def qkv(self) -> dict[str, Tensor]:
        """Draw q, k [B, T, H, K] and v [B, T, H, V] from N(0, 1)."""
        return {"q": self.normal(*self.keys), "k": self.normal(*self.keys), "v": self.normal(*self.values)}

    def gate(self, mean: float, std: float = 1.0) -> Tensor:
        """Draw a gate [B, T, H] from N(mean, std) in the gates' dtype."""
        return self.round_gate(mean + std * self.noise(*self.tokens))

    def forget_gate(self, low: float = 3.0, high: float = 6.0) -> Tensor:
        """Draw a forget pre-activation [B, T, H]: N(mean, 1), the mean rising from ``low`` to ``high`` over the heads.

        This is how xLSTM initialises the forget-gate biases: each head gets a memory of its own length.
        """
        means = torch.linspace(low, high, self.tokens[2], dtype=self.draw_dtype, device=self.device)
        return self.round_gate(self.noise(*self.tokens) + means)


def bounds_of(documents: str, seq_len: int, device: torch.device | str, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return cu_seqlens [N + 1] of packed documents."""
    lengths = torch.tensor((0, *lengths_of(documents, seq_len)), dtype=dtype)
    return lengths.cumsum(0, dtype=dtype).to(device)
