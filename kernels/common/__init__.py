"""What several families of kernels share. No family imports another's modules, except Lightning, which uses the engine.

Where to look:

    arguments.py, channel_tensors.py  checks of arguments, the second file's of tensors over channels [B, T, C]
    differentiable.py                 a forward and backward pass, for eager calls and for torch.compile
    second_derivatives.py             gradients that can be differentiated again, or refuse it
    calls.py, remember.py             later calls of a function, which repeat neither its checks nor Triton's
    versions.py                       what differs between versions of Triton
    device.py, sizes.py               properties of the tensors' device; limits, and arithmetic of sizes
    channels.py, time_tiles.py        tiles of kernels over channels: their sizes, and loading them
    exchange.py, sums.py              memory through which programs pass states on; sums of programs' partial results
    inputs.py, cache.py               random inputs; the folder for what later runs reuse
"""
