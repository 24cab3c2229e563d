"""lrbench: benchmarks, rooflines and Triton kernels for linear RNN and sequence-mixing kernels."""

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Return :func:`.bench.drive.own_case.measure`, imported when it is asked for."""
    if name != "measure":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from .bench.drive.own_case import measure

    return measure
