"""Lightning Attention: the definition is Retention without its scale; launches of its own kernels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lrbench.kernels import get_operation, resolve
from lrbench.kernels.lightning import OPERATION
from lrbench.kernels.lightning.config import select_lightning1, select_lightning2

SMALL = {"batch": 2, "seq_len": 45, "num_heads": 4, "head_dim_qk": 16, "head_dim_v": 24}


def test_it_is_retention_without_its_scale() -> None:
    inputs = resolve(OPERATION.inputs)(SMALL, dtype=torch.float64, device="cpu", seed=0)
    ours = resolve(OPERATION.recurrent)(*inputs.values())
    retention = resolve(get_operation("retention").recurrent)(*inputs.values())
    torch.testing.assert_close(ours, retention * SMALL["head_dim_qk"] ** 0.5, rtol=1e-12, atol=0)


def test_inputs_keep_scores_of_order_one_and_slopes_are_those_of_alibi() -> None:
    sizes = {**SMALL, "num_heads": 8, "seq_len": 512, "head_dim_qk": 128}
    inputs = resolve(OPERATION.inputs)(sizes, dtype=torch.bfloat16, device="cpu", seed=0)
    assert tuple(inputs) == OPERATION.arguments
    scores = torch.einsum("bthk,bthk->bth", inputs["q"].float(), inputs["k"].roll(1, 1).float())
    assert 0.9 < float(scores.std()) < 1.1
    assert inputs["slope"].tolist() == [2.0**-n for n in range(1, 9)]


@pytest.mark.parametrize("item_bytes", [2, 4])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
@pytest.mark.parametrize(("head_dim_qk", "head_dim_v"), [(16, 16), (24, 40), (64, 64), (128, 256), (256, 16)])
def test_launches_fit_the_head_dims(
    head_dim_qk: int, head_dim_v: int, capability: tuple[int, int], item_bytes: int
) -> None:
    sizes: dict[str, Any] = {"item_bytes": item_bytes, "head_dim_qk": head_dim_qk, "head_dim_v": head_dim_v}
    for config in (
        select_lightning1(capability=capability, **sizes),
        select_lightning2(capability=capability, rows=1, **sizes),
        select_lightning2(capability=capability, rows=10_000, **sizes),
    ):
        for name, dim in (("output", head_dim_v), ("dv", head_dim_v), ("dq", head_dim_qk), ("dk", head_dim_qk)):
            launch = getattr(config, name)
            assert 16 <= launch.block_z <= max(16, 2 * dim)
            assert launch.block_t % getattr(launch, "block_s", 16) == 0


def test_few_heads_get_narrower_programs() -> None:
    sizes: dict[str, Any] = {"capability": (9, 0), "item_bytes": 2, "head_dim_qk": 128, "head_dim_v": 128}
    assert select_lightning2(rows=8 * 32, **sizes).output.block_z == 64
    assert select_lightning2(rows=32, **sizes).output.block_z == 32
