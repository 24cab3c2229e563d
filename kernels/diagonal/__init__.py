"""Diagonal linear recurrences h_t = a_t h_{t-1} + b_t: the engine under RG-LRU and the linear scan."""
