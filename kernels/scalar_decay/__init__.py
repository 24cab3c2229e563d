"""The engine for scalar-decay linear RNNs: one set of kernels, and for each operation a function of its gates.

Where to begin:

    reference.py             the recurrence one step at a time, which is the definition, and the quadratic form
    engine.py                the function behind every operation's public function: arguments and implementations
    roles.py                 why one product is h, dq, dk and dv, and the tuples that kernels take
    gates.py                 an operation's gates become the log gates that every kernel takes, and gradients come back
    fused_chunk.py           the product, a chunk's tiles in order; whole_state*.py: the same for Hopper, in Gluon
    chunk_o.py               the product, a chunk's tiles in parallel, as the TFLA paper has it
    chunk_states.py          the states between chunks; chunk_states_hopper.py: the same for Hopper, in Gluon
    normaliser.py, step.py   mLSTMexp's denominators; one decoding step
    autograd.py, launch.py   in which order a pass launches these kernels; their grids and outputs
    choice.py, config.py     chunk lengths; tile sizes and warps
    chunkwise.py             the portable form in torch, with the weights of chunk_gates.py
    declare.py, validate.py  what the engine offers and where it runs; checks of arguments

Words that all of them use:

    chunk    L consecutive positions of a head. Chunks run in parallel, once the state that enters each is known.
    whole    of a head: one chunk holds its sequence; others are cut into N chunks. (In whole_state it is the state.)
    tile     BLOCK_T positions of a chunk.
    scheme   how a chunk's tiles are taken: "walk" and "whole_state" in order, with the state carried from one to the
             next, "sweep" all in parallel. ``fused`` stands for the first two; float32 always sweeps.
    stretch  positions that one running sum covers before it starts anew: gate vectors accumulate over a tile (fused)
             or a chunk (sweep), the decay's gradient from one anchor to the next.
    anchor   a position at which the decay's gradient is known from the states, <C, dC>; see gates_backward_kernel.
"""
