"""What is measured for a bar: problems, the sides that run them, and by how much one must be ahead. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

COPY = "copy"
"""The side that moves ours' compulsory bytes at this device's copy rate, measured around the setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """By what factor ``ours`` must be below ``theirs``, each at its fastest chunk length.

    Attributes:
        ours, theirs: implementations among the setting's sides; theirs may be :data:`COPY`, which makes the ratio a
            share of the copy bandwidth on the compulsory bytes of ours.
        ratio: theirs / ours that is asked for.
        quantity: what is compared: the median time, or the peak memory of one call above its inputs.
        their_chunk_size: the chunk length theirs is taken at, where not at its fastest.
    """

    ours: str
    theirs: str
    mode: str
    ratio: float
    quantity: Literal["time", "memory"] = "time"
    their_chunk_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One implementation, ours or a baseline, as it takes part in a setting.

    Attributes:
        impl: the implementation's name, bare or ``provider.variant``.
        op: its operation, where that is not the setting's.
        sizes: its sizes, where they are not the setting's.
        chunk_sizes: chunk lengths to try; None is the one that the implementation chooses itself, or no chunk axis.
        modes: modes it is timed in, where not in all of the setting's.
    """

    impl: str
    op: str | None = None
    sizes: Mapping[str, int] | None = None
    chunk_sizes: tuple[int | None, ...] = (None,)
    modes: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A problem, the sides that run it, and the bars held at it."""

    label: str
    op: str
    sizes: Mapping[str, int]
    sides: tuple[Side, ...]
    bars: tuple[Bar, ...]
    dtype: str = "bf16"
    modes: tuple[str, ...] = ("fw", "fwbw")


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The bars of a kernel family.

    Attributes:
        name: the word on the command line.
        kernel: the family.
        overall: bars on the geometric mean of theirs / ours over all settings.
    """

    name: str
    kernel: str
    summary: str
    settings: tuple[Setting, ...]
    overall: tuple[Bar, ...] = ()
