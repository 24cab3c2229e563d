"""FLOPs and bytes of every operation, per formulation and part by part. Imports neither torch nor numpy.

:func:`count` answers for any sizes; :func:`count_case` is what a row of the results stores. Conventions, from the TFLA
paper's appendix F: a multiply-accumulate is 2 FLOPs, one evaluation of exp, log, sigmoid, max, mask or abs is F_x (1
unless told otherwise), and recomputation inside a kernel is not counted (it is kept apart, see :class:`Count`). The
formulas lie in :mod:`.mlstm` (published) and :mod:`.scalar_decay`, :mod:`.lightning`, :mod:`.baselines`, :mod:`.rglru`,
:mod:`.wkv` and :mod:`.gated_mlp` (derived); :mod:`.problem` adds them up, :mod:`.formulations` says what there is, and
:mod:`.executed` counts what our Triton kernels really run, recomputation included.
"""

from .formulations import (
    FORMULATIONS,
    TILE,
    chunk_of,
    default_formulation,
    formulation_of,
    is_chunked,
    tile_rounded_causal_factor,
)
from .model import Count, Factors, Problem, Tally, Widths
from .problem import count, count_case
