"""Kernels of blocks and of bands on NVIDIA GPUs: the arithmetic is that of processors."""
