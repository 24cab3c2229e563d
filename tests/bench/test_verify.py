"""What is checked: every implementation in a mode with gradients where it has one, and its decoding step."""

from __future__ import annotations

import pytest

from lrbench.bench.verify import verification_plan, verification_request


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_every_implementation_is_checked_with_what_it_can_do(device_kind: str) -> None:
    planned = verification_plan(verification_request("tfla", None), device_kind)
    modes: dict[tuple[str, str], set[str]] = {}
    for item in planned:
        modes.setdefault((item.case.op, item.case.impl), set()).add(item.case.mode)
    for item in planned:
        expected = {"fwbw" if "fwbw" in item.target.modes else "fw"} | ({"step"} & set(item.target.modes))
        assert modes[item.case.op, item.case.impl] == expected, item.case.impl
    assert modes["mlstm_exp", "mlstm_kernels.native_autograd"] == {"fw"}
    assert modes["mlstm_exp", "torch"] == {"fwbw"}
    if device_kind == "cuda":
        assert modes["mlstm_sig", "fused_chunk"] == {"fwbw", "step"}
