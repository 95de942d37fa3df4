"""Kernels compiled for GPU architectures without a GPU: what their binaries need."""
