"""Kernels and memory settings for float32 on CPUs.

An engine enters these on a CPU and nowhere else: a run on GPUs does not even import them. Nothing
here changes a module of another package, and importing it changes no setting of the process.
"""
