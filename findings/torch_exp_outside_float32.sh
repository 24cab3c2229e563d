#!/usr/bin/env bash
# torch 2.13.0 with MKL, on an x86-64 CPU: torch.exp of a finite number takes ten to forty times as long if the result
# is subnormal, exactly 0, infinite, or near the largest float32. The time rises between x = -87.33 and -87.34, where
# exp(x) falls below 2^-126, and between 87 and 88. float64 does so at its own limits, if less. torch.exp2 does not
# where it has the same results, -inf takes only three times as long as -1, and torch.set_flush_denormal(True) changes
# nothing. So a mask of -1e4 costs more than one of -inf, and a decay to nothing more than one to a half.
# ATen/cpu/vml.h hands this exp to MKL; in 2020 somebody reported the like of GELU to PyTorch.
#
# Guessed first: as long for any input, or if not, longer for subnormal results alone and not with set_flush_denormal.
#
# The output on an AMD EPYC (AVX2), in ns an element, the median of 41 calls in turn:
#
#     float32             normal    -87.33    -87.34 subnormal      zero      -inf        87        88  infinite
#     exp                    1.1       1.1      37.9      37.8      12.6       3.5       1.1      11.8      11.7
#     exp2                   0.6       0.6       2.0       2.0       0.6       0.6       0.6       0.6       0.6
#     exp, flushing          1.1       1.1      41.3      41.4      13.3       3.6       1.1      12.3      12.1
#     float64             normal subnormal      zero      -inf  infinite
#     exp                    2.0      35.8      13.5       4.9      12.8
#
# Exits with 0 if this is still so, with another status if not. Run with Python 3.11 on x86-64 Linux.
set -euo pipefail

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6

"$folder/venv/bin/python" - <<'PYTHON'
import math
import time
from statistics import median

import torch

assert torch.__version__.partition("+")[0] == "2.13.0", torch.__version__
assert torch.backends.mkl.is_available()
torch.set_num_threads(1)
SIZE = 1 << 14
INPUTS = {
    torch.float32: {"normal": -1.0, "-87.33": -87.33, "-87.34": -87.34, "subnormal": -95.0, "zero": -1e4,
                    "-inf": -math.inf, "87": 87.0, "88": 88.0, "infinite": 1e4},
    torch.float64: {"normal": -1.0, "subnormal": -720.0, "zero": -1e4, "-inf": -math.inf, "infinite": 1e4},
}  # fmt: skip


def times(function, dtype, scale=1.0):
    """Return the median time of an element, in ns, for each input; the calls of one round follow each other."""
    inputs = {name: torch.full((SIZE,), x * scale, dtype=dtype) for name, x in INPUTS[dtype].items()}
    out, samples = torch.empty(SIZE, dtype=dtype), {name: [] for name in inputs}
    for _ in range(41):
        for name, x in inputs.items():
            start = time.perf_counter()
            function(x, out=out)
            samples[name].append((time.perf_counter() - start) / SIZE * 1e9)
    return {name: median(values) for name, values in samples.items()}


def show(title, found):
    print(f"{title:16}" + "".join(f"{time:>10.1f}" for time in found.values()))


smallest = torch.finfo(torch.float32).tiny
assert torch.tensor(-87.34).exp() < smallest <= torch.tensor(-87.33).exp()
assert 0 < torch.tensor(-95.0).exp() and torch.tensor(-1e4).exp() == 0 and torch.tensor(88.0).exp() < math.inf

exp = times(torch.exp, torch.float32)
print(f"{'float32':16}" + "".join(f"{name:>10}" for name in exp))
show("exp", exp)
exp2 = times(torch.exp2, torch.float32, 1 / math.log(2))
show("exp2", exp2)
assert torch.set_flush_denormal(True)
flushed = times(torch.exp, torch.float32)
show("exp, flushing", flushed)
torch.set_flush_denormal(False)
exp_64 = times(torch.exp, torch.float64)
print(f"{'float64':16}" + "".join(f"{name:>10}" for name in exp_64))
show("exp", exp_64)

for found in (exp, flushed):
    for name in ("-87.34", "subnormal"):
        assert found[name] >= 10 * found["normal"], name
    for name in ("zero", "88", "infinite"):
        assert found[name] >= 5 * found["normal"], name
    assert all(found[name] <= 3 * found["normal"] for name in ("-87.33", "87"))
    assert 1.5 * found["normal"] <= found["-inf"] and 1.5 * found["-inf"] <= found["zero"]
assert exp_64["subnormal"] >= 6 * exp_64["normal"]
assert min(exp_64["zero"], exp_64["infinite"]) >= 3 * exp_64["normal"]
for name in ("-87.34", "subnormal", "zero", "88", "infinite"):
    assert 5 * exp2[name] <= exp[name], name
PYTHON
