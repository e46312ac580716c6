"""Writes bytes in shared memory into a file, block by block, and computes their crc32.

This file is a program without torch:

    python -I -S copy_process.py <descriptor of the memory> <number of bytes> <file>

It prints the fingerprint as JSON when everything is on disk, or `{"error": ...}`. It exits early if
its standard input closes, because the worker that started it has then ended.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 16 * 2**20
"""Bytes per block; each is flushed by this low-priority process, not later by a kernel thread."""
REST = 4.0
"""Seconds of rest per second of work: training uses the same caches and memory bandwidth."""
LONGEST_REST_S = 0.25


def write_file(
    path: Path,
    contents: memoryview,
    start: int = 0,
    after_block: Callable[[float], object] = lambda seconds: None,
) -> dict[str, int]:
    """Write the bytes after the first `start`, which are on disk; return the size and crc32 of all.

    `after_block` gets the seconds that each block took.
    """
    crc = zlib.crc32(contents[:start])
    with path.open("r+b" if start else "wb", buffering=0) as file:
        file.seek(start)
        while start < len(contents):
            began = time.monotonic()
            block = contents[start : start + BLOCK_BYTES]
            crc = zlib.crc32(block, crc)
            start += len(block)
            while block:
                block = block[file.write(block) :]
            os.fsync(file.fileno())
            after_block(time.monotonic() - began)
    return {"bytes": len(contents), "crc32": crc}


def rest(seconds: float) -> None:
    """Sleep after `seconds` of work, for other processes; exit if the file is no longer needed."""
    if select.select([sys.stdin], [], [], min(REST * seconds, LONGEST_REST_S))[0]:
        os._exit(1)


def main(memory: str, num_bytes: str, path: str) -> None:
    """Write the bytes of the memory into the file; print its fingerprint, or the error."""
    with mmap.mmap(int(memory), int(num_bytes), prot=mmap.PROT_READ) as contents:
        with memoryview(contents) as view:
            try:
                result: object = write_file(Path(path), view, after_block=rest)
            except OSError as error:
                result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
