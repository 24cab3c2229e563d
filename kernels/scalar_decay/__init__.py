"""The engine for scalar-decay linear RNNs: one set of kernels, one gate function per operation."""
