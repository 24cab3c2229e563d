"""Print what our kernels compile to, to compare two commits: of each case, every kernel and a digest of its PTX.

``python -m lrbench.tests.tools.ptx > FILE`` in a checkout of either, then ``diff``. Equal lines are the same
instructions, whatever the registers, labels and kernels are called. No GPU is needed; compute capability 9.0, bf16.
"""

from __future__ import annotations

import hashlib
import re

from lrbench.tests.kernels.cases import BF16, SIZES, chunks, heads
from lrbench.tests.kernels.compiling import IMPLEMENTATIONS, record
from lrbench.tests.kernels.laws import EXTREMES, Case
from lrbench.tests.kernels.offline import compile_kernel

CHUNK_SIZES = (128, 512)
ALL_SIZES = (*SIZES["gpu"], *(heads(1, 512, 2, *dims) for dims in ((64, 64), (128, 256), (160, 320))))


def digest(ptx: str, kernel: str) -> str:
    """Return a digest of a kernel's instructions: registers and labels are numbered as they come, its name left out."""
    names: dict[str, str] = {}
    code = ptx.split("\t.file")[0].replace(kernel, "")
    code = re.sub(r"//.*|^\s*(\.loc|\.reg|\$L__tmp).*", "", code, flags=re.MULTILINE)
    code = re.sub(r"\$L__\w+|%[a-z]+\d+", lambda found: names.setdefault(found[0], f"%{len(names)}"), code)
    return hashlib.sha256("\n".join(code.split()).encode()).hexdigest()[:16]


def main() -> None:
    """Print a line for each different kernel of each case."""
    for operation, implementation in IMPLEMENTATIONS:
        for sizes in ALL_SIZES:
            fits = operation.name in EXTREMES and {*operation.sizes} <= {*sizes}
            if not fits or implementation.why_unsupported("fwbw", "bf16", None, sizes):
                continue
            for chunk_size in CHUNK_SIZES if implementation.chunked else CHUNK_SIZES[:1]:
                if implementation.name == "limit_chunk" and chunk_size > CHUNK_SIZES[0]:
                    continue
                kwargs = chunks(operation.name, implementation.name, chunk_size)
                case = Case(op=operation.name, impl=implementation.name, dtype=BF16, sizes=sizes, kwargs=kwargs)
                launches = {launch.compile_key(): launch for launch in record(case, carry=False)}
                shape = "x".join(map(str, sizes.values()))
                for launch in launches.values():
                    ptx, kernel = compile_kernel(launch, 90).asm["ptx"], launch.kernel.__name__
                    print(case.op, case.impl, shape, *kwargs.values(), kernel, digest(ptx, kernel), flush=True)


if __name__ == "__main__":
    main()
