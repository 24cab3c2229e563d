#!/usr/bin/env bash
# torch 2.13.0, on a CPU: two things about torch.utils.flop_counter.FlopCounterMode. It copies the formulas that are
# registered when it is made, so an operator that is registered while it counts, as at the first call of a library that
# imports its kernels late, has 0 FLOPs. And torch.compile does not compile while any such mode is on: it runs the
# function as it is, and from then on it does so without the mode as well, in silence, whether it had compiled the
# function before or not; torch.compiler.reset() ends this. Inside torch.compiler.set_stance("force_eager") the counter
# has the same FLOPs, and the function stays compiled.
#
# Guessed first: a formula counts from when it is registered, and a function that was compiled stays so.
#
# The output:
#
#     registered while it counts: 0 FLOPs; by the next counter: 8
#     called first while it counts: 128 FLOPs; the next call runs 0 compiled graphs
#     compiled before: 128 FLOPs; the next call runs 0 compiled graphs
#     compiled before, counted with force_eager: 128 FLOPs; the next call runs 1 compiled graphs
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6

"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import torch
from torch.utils.flop_counter import FlopCounterMode, register_flop_formula


@torch.library.custom_op("mine::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


with FlopCounterMode(display=False) as late:
    register_flop_formula(torch.ops.mine.twice)(lambda shape, out_shape: 8)
    twice(torch.ones(8))
with FlopCounterMode(display=False) as after:
    twice(torch.ones(8))
print(f"registered while it counts: {late.get_total_flops()} FLOPs; by the next counter: {after.get_total_flops()}")

ran = []


def backend(module, inputs):
    def call(*args):
        ran.append(module)
        return module(*args)

    return call


found = []
x = torch.ones(4, 4)
for name, before, stance in (
    ("called first while it counts", False, "default"),
    ("compiled before", True, "default"),
    ("compiled before, counted with force_eager", True, "force_eager"),
):
    torch.compiler.reset()
    function = torch.compile(lambda x: x @ x, backend=backend)
    if before:
        function(x)
    with torch.compiler.set_stance(stance), FlopCounterMode(display=False) as counter:
        function(x)
    ran.clear()
    function(x)
    found.append((counter.get_total_flops(), len(ran)))
    print(f"{name}: {found[-1][0]} FLOPs; the next call runs {len(ran)} compiled graphs")

assert (late.get_total_flops(), after.get_total_flops(), found) == (0, 8, [(128, 0), (128, 0), (128, 1)])
PYTHON
