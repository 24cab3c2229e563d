"""Names that implementations had before: they are applied to rows as they are read, and to what a user types.

Rows on disk keep what was written. A row of an old name is read under the new one, with the id of its case, so
references, journals and ``--resume`` still match it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .schema import case_id

RENAMED: dict[tuple[str, str], str] = {
    ("*", "tfla"): "fused_chunk",
    ("*", "associative"): "associative_scan",
    ("wkv4", "recurrent"): "naive",
    ("gated_mlp", "fused_pair"): "fused",
    ("gated_mlp", "fused_pair_save"): "fused_save",
}
"""(operation, old name) -> name of today; the operation * is any that has no entry of its own. A new name must never be
an old one of the same operation: a row does not say which it means."""

ANY = "*"


def current_name(op: str, impl: str) -> str:
    """Return an implementation's name of today."""
    return RENAMED.get((op, impl)) or RENAMED.get((ANY, impl), impl)


def stored_names(impl: str) -> list[str]:
    """Return all names that rows of an implementation may have on disk; ``impl`` is any of them."""
    names = {impl, *(new for (_, old), new in RENAMED.items() if old == impl)}
    return sorted(names | {old for (_, old), new in RENAMED.items() if new in names})


def current_names(impls: Iterable[str], ops: Iterable[str]) -> tuple[str, ...]:
    """Return the names of today of what a user typed for some operations, in that order.

    An old name stands for every new one that it has among these operations, and for itself where one of them still
    has it.
    """
    listed = tuple(ops)
    return tuple(name for impl in impls for name in dict.fromkeys(current_name(op, impl) for op in listed))


def rename_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row, which must have every column of a case, with its implementation's name of today."""
    impl = current_name(row["op"], row["impl"])
    if impl == row["impl"]:
        return dict(row)
    changed = {**row, "impl": impl}
    return {**changed, "case_id": case_id(changed)} if "case_id" in row else changed
