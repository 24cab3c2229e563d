"""lrbench: benchmarks, rooflines and Triton kernels for linear RNN and sequence-mixing kernels."""

__version__ = "0.1.0"
