"""Triton kernels that the CUDA and MUSA backends share: the experts' products where an expert has many rows.

One source: no inline assembly, no fp8 type, no type or call of one vendor. The same kernels run in Triton's
interpreter on the CPU, where the tests compare them with the references (K5).
"""
