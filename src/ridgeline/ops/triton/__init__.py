"""Kernels for GPUs, written in Triton. They are compiled for sm_90 and sm_80 and interpreted in tests."""
