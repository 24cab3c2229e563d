"""The engine for scalar-decay linear RNNs: one set of kernels, and for each operation a function of its gates.

Where to begin:

    reference.py             the recurrence one step at a time, which is the definition, and the quadratic form
    engine.py                the function behind every operation's public function: arguments and implementations
    roles.py                 why one product is h, dq, dk and dv, and the tuples that kernels take
    gates.py                 from an operation's gates to the log gates that every kernel takes, and their gradients
    fused_chunk.py           the product, a chunk's tiles in order; whole_state*.py: the same for Hopper, in Gluon
    chunk_o.py               the product, a chunk's tiles in parallel, as the TFLA paper has it
    chunk_states.py          the states between chunks; chunk_states_hopper.py: the same for Hopper, in Gluon
    normaliser.py, step.py   mLSTMexp's denominators; one decoding step
    plan.py, launch.py       what a pass launches, in which order; how it is launched, and its autograd function
    choice.py, config.py     chunk lengths; tile sizes and warps
    chunkwise.py             the portable form in torch, which autograd differentiates
    documents.py             packed documents: checks, and the documents one by one for the forms in torch
    declare.py, validate.py  what the engine offers and where it runs; checks of arguments

Words that all of them use:

    chunk    L consecutive positions of a head. Chunks run in parallel, once the state that enters each is known.
    whole    A head is whole if one chunk holds its sequence, else it is cut into N chunks. The "whole" of whole_state
             is another one: the state, all of which one program holds.
    tile     BLOCK_T positions of a chunk.
    scheme   how a chunk's tiles are taken: "walk" and "whole_state" in order, with the state carried from one to the
             next, "sweep" all in parallel. ``fused`` stands for the first two; float32 always sweeps.
    stretch  the positions that a cumulative sum runs over before it starts anew: a tile (fused) or a chunk (sweep) for
             gate vectors, the distance of anchors for the decay's gradient.
    anchor   a position at which the decay's gradient is known from the states, <C, dC>; see gates_backward_kernel.
"""
