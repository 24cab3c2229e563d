"""Helpers shared by the kernels of every family."""
