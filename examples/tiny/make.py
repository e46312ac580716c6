"""The same as `verl-like make-tiny DIR`, for the scripts of examples and benchmarks."""

from __future__ import annotations

import sys

from verl_like.tiny import main, make

__all__ = ["main", "make"]

if __name__ == "__main__":
    main(sys.argv[1:])
