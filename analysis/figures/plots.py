"""Figures by their name on the command line: of results (:mod:`.measured`) and of the counts (:mod:`.theory`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ...results.arguments import one_of
from . import measured
from . import theory as theories
from .layout import Drawing
from .selection import Selection
from .theory import Theory

if TYPE_CHECKING:
    import pandas as pd

RESULT_KINDS: Mapping[str, Callable[[pd.DataFrame, Selection], Drawing]] = {
    "runtime": measured.runtime_over_length,
    "memory": measured.memory_over_length,
    "runtime-memory": measured.runtime_and_memory,
    "throughput": measured.throughput_over_length,
    "chunk-size": measured.runtime_over_chunk_size,
    "trade-off": measured.memory_against_runtime,
    "head-dim": measured.runtime_over_width,
    "rate": measured.rate_flops_and_runtime,
    "context": measured.decoding_over_context,
    "sustained": measured.sustained_over_length,
    "energy": measured.energy_over_length,
}
"""Figures of measured rows."""

OVER_LENGTH = ("runtime", "memory", "runtime-memory", "throughput", "context", "sustained", "energy")
"""Those over lengths, which show none alone."""

THEORY_KINDS: Mapping[str, Callable[[Theory], Drawing]] = {
    "flops": theories.flops_over_chunk_size,
    "flop-optimal": theories.flop_optimal_over_head_dim,
    "runtime-optimal": theories.runtime_optimal_over_head_dim,
    "intensity-optimal": theories.runtime_optimal_over_intensity,
    "intensity": theories.intensity_over_chunk_size,
}
"""Figures of the counts and the model."""

OF_ENTRIES: Mapping[str, Callable[..., Drawing]] = {
    "transfer": theories.gain_over_input_gate,
    "kv-savings": theories.tokens_of_cache,
}
"""Figures that only entries of `lrbench reproduce` have."""

MODEL = "model"
"""The figure of the model that takes results where there are some."""

KINDS = (*RESULT_KINDS, *THEORY_KINDS, MODEL)


def check_kind(kind: str, *, results: bool) -> None:
    """Raise ValueError for an unknown kind, or where results are missing or of no use."""
    if kind in OF_ENTRIES:
        raise ValueError(f"the figure {kind} belongs to entries of `lrbench reproduce`, which draws it with -o")
    one_of("kind", kind, KINDS)
    if kind in RESULT_KINDS and not results:
        raise ValueError(f"the figure {kind} shows results: name files or folders of them")
    if kind in THEORY_KINDS and results:
        raise ValueError(f"the figure {kind} is drawn from the counts: leave the results out")


def drawing(
    kind: str,
    frame: pd.DataFrame | None = None,
    selection: Selection = Selection(),  # noqa: B008, frozen
    theory: Theory = Theory(),  # noqa: B008, frozen
) -> Drawing:
    """Return what the figure called ``kind`` shows.

    Args:
        frame, selection: result rows, and which of them are shown, for the kinds that show some.
        theory: the problem, for the kinds that are drawn from the counts.

    Raises:
        ValueError: an unknown kind, results missing or not wanted, or nothing to show.
    """
    check_kind(kind, results=frame is not None)
    if kind in THEORY_KINDS:
        return THEORY_KINDS[kind](theory)
    if kind == MODEL:
        return theories.runtime_over_chunk_size(theory, frame)
    assert frame is not None
    return RESULT_KINDS[kind](frame, selection)
