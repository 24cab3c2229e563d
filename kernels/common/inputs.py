"""Random numbers for the inputs that every operation draws for itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .arguments import compute_dtype


class Draw:
    """Draws numbers reproducibly.

    On the CPU numbers are drawn in float64 and then rounded, so every dtype gets the same problem; on a GPU in float32,
    where they are needed, which is fast for gigabytes of them. Gates and parameters are float32 beside float32, float16
    and bfloat16 inputs (float64 beside float64): a forget gate near 1 raised to a chunk length amplifies the rounding
    of its pre-activation. Their values are ones that the inputs' dtype holds too, so that a package that wants its
    gates in that dtype computes the same problem.

    Args:
        dtype: dtype of the inputs.
        device: where the tensors are put.
        seed: of the generator.
    """

    def __init__(self, *, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
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
