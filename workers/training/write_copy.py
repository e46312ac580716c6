"""Writes bytes in shared memory into a file, block after block, with their crc32.

This file is a program of its own, without torch:

    python -I -S write_copy.py <descriptor of the memory> <its bytes> <file>

It prints the fingerprint as JSON when all is on the disk, or `{"error": ...}`. It ends before where
its standard input is closed: the worker that wanted the file is gone.
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
"""Each is forced to the disk by whoever writes it: else the kernel's threads do that later, at no
low priority."""
REST = 4.0
"""Seconds without work for each second of work: caches and memory are shared with the steps."""
LONGEST_REST_S = 0.25


def write_file(
    path: Path,
    contents: memoryview,
    start: int = 0,
    after_block: Callable[[float], object] = lambda seconds: None,
) -> dict[str, int]:
    """Write what comes after the first `start` bytes, which are there; gives size and crc32.

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
    """Let others compute after so much work; ends the program where nobody wants the file."""
    if select.select([sys.stdin], [], [], min(REST * seconds, LONGEST_REST_S))[0]:
        os._exit(1)


def main(memory: str, num_bytes: str, path: str) -> None:
    """Write the bytes of the memory into the file; prints its fingerprint, or the error."""
    with mmap.mmap(int(memory), int(num_bytes), prot=mmap.PROT_READ) as contents:
        with memoryview(contents) as view:
            try:
                said: object = write_file(Path(path), view, after_block=rest)
            except OSError as error:
                said = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
