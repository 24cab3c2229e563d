"""The moving sum obeys the laws; in Triton's interpreter here, so small and in float32."""

from __future__ import annotations

import pytest
import torch

from lrbench.kernels.ema.scan import scan
from lrbench.tests.kernels import laws

pytestmark = pytest.mark.interpret


def case(seq_len: int, dim: int) -> laws.Case:
    sizes = {"batch": 2, "seq_len": seq_len, "num_heads": 3, "head_dim_v": dim}
    return laws.Case(op="ema", impl="scan", dtype=torch.float32, sizes=sizes)


@pytest.mark.parametrize(("seq_len", "dim", "splits"), [(1, 16, ()), (7, 72, (4,)), (33, 24, (11,))])
def test_matches_the_definition(seq_len: int, dim: int, splits: tuple[int, ...]) -> None:
    laws.check_matches_reference(case(seq_len, dim), splits=splits)


def test_bad_input_fails_clearly() -> None:
    v, slope = torch.zeros(2, 5, 3, 16), torch.zeros(3)
    with pytest.raises(ValueError, match="slope must have shape"):
        scan(v, slope[:2])
