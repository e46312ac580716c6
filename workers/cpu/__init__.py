"""Kernels and memory for training on CPUs; nothing here is entered on a GPU."""
