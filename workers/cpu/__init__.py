"""Kernels and memory settings for float32 on CPUs.

An engine uses these only on a CPU. On a GPU the kernels are not even imported, and
`allocator.free_immediately`, which loading and sending weights call everywhere, does nothing.

Nothing here changes a module of another package, and importing it changes no setting of the
process.
"""
