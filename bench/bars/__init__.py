"""Speed bars that the project holds itself to, measured side by side with whom they name.

``python -m lrbench.bench.bars NAME`` measures one subject's bars: ``cpu`` is the portable mLSTMexp against
mlstm_kernels' native chunkwise forms on this CPU, every other one a kernel family on this GPU.

Sides take turns in every round, so that what else the machine does falls on all alike; of a side with a chunk length,
the best one counts. Ours must be right to be timed; an outside package whose numbers are off is timed all the same,
with a remark. Exit 0 if every bar is held, 1 if one is missed or could not be measured, 2 if nothing can be
measured here.

Where two threads do not reach 1.6 times the matrix products of one, a machine does not have two free cores: a bar of
``cpu`` that is missed there is not decidable, and marked so; it is missed all the same.
"""
