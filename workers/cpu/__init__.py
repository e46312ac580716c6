"""Kernels and memory settings for float32 on CPUs.

An engine enters these on a CPU and nowhere else: on a GPU it does not even import the kernels, and
`allocator.freed_at_once`, which loading and sending weights ask for everywhere, does nothing there.
Nothing here changes a module of another package, and importing it changes no setting of the
process.
"""
