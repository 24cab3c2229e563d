"""Random inputs that the engine's operations share; gates are drawn by each operation's own make_inputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..common.inputs import Draw


class InputGenerator(Draw):
    """Draws an operation's inputs reproducibly.

    Args:
        sizes: batch, seq_len, num_heads, head_dim_qk, head_dim_v.
        Others: see :class:`Draw`.
    """

    def __init__(self, sizes: Mapping[str, int], *, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        super().__init__(dtype=dtype, device=device, seed=seed)
        self.tokens = (sizes["batch"], sizes["seq_len"], sizes["num_heads"])
        self.dim_qk, self.dim_v = sizes["head_dim_qk"], sizes["head_dim_v"]

    def qkv(self) -> dict[str, Tensor]:
        """Draw q, k [B, T, H, K] and v [B, T, H, V] from N(0, 1)."""
        return {
            "q": self.normal(*self.tokens, self.dim_qk),
            "k": self.normal(*self.tokens, self.dim_qk),
            "v": self.normal(*self.tokens, self.dim_v),
        }

    def gate(self, mean: float, std: float = 1.0) -> Tensor:
        """Draw a gate [B, T, H] from N(mean, std) in the gates' dtype."""
        return self.round_gate(mean + std * self.noise(*self.tokens))

    def forget_gate(self, low: float = 3.0, high: float = 6.0) -> Tensor:
        """Draw a forget pre-activation [B, T, H]: N(mean, 1), the mean rising from ``low`` to ``high`` over the heads.

        This is how xLSTM initialises the forget-gate biases: each head gets a memory of its own length.
        """
        means = torch.linspace(low, high, self.tokens[2], dtype=self.draw_dtype, device=self.device)
        return self.round_gate(self.noise(*self.tokens) + means)
