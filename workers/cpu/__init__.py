"""Kernels and memory settings for float32 on CPUs.

An engine uses these only on a CPU. On a GPU it does not even import the kernels, and
`allocator.free_immediately`, which code for all devices calls, does nothing.

This package does not patch modules of other packages, and importing it changes no process settings.
"""
