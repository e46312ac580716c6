"""Writes a copy in shared memory into a file, block after block, with its crc32.

This file is a program of its own, without torch:

    python -I -S write_copy.py <descriptor of the copy> <its bytes> <file>

After each block it prints how many bytes are written, and their crc32; then `whole` when all of
them are on the disk, or `failed: ` and why. It ends when nobody reads that any more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import sys
import time
import zlib
from collections.abc import Iterator

BLOCK_BYTES = 16 * 2**20
"""After each it is told how far the file has come, and found whether anybody still wants it."""
ALIGNMENT = 4096
"""What writes past the page cache are multiples of."""
REST = 4.0
"""Seconds without work for each second of work: it shares caches and memory with the steps."""
LONGEST_REST_S = 0.25
"""A disk that is slow needs no more."""
WHOLE, FAILED = "whole", "failed: "
Written = tuple[int, int]
"""How many bytes are in the file, and their crc32."""


def write_rest(
    path: str | os.PathLike[str], contents: memoryview, before: Written = (0, 0)
) -> Iterator[Written]:
    """Write what comes after what was written `before`; gives after every block what is then.

    At its end all is on the disk.
    """
    done, crc = before
    flags = os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0) | (0 if done else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o666)
    try:
        _pass_the_cache(descriptor, True)
        while done < len(contents):
            end = _end_of_block(done, len(contents))
            block = contents[done:end]
            crc = zlib.crc32(block, crc)
            _write(descriptor, block, done)
            done = end
            yield done, crc
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _end_of_block(start: int, length: int) -> int:
    """Blocks are aligned, but for what is left of the last one."""
    end = min(start + BLOCK_BYTES, length)
    aligned = end - end % ALIGNMENT
    return aligned if aligned > start else end


def _write(descriptor: int, block: memoryview, offset: int) -> None:
    """All of a block, through the page cache where the file system wants it so."""
    while block:
        try:
            count = os.pwrite(descriptor, block, offset)
        except OSError as error:
            if error.errno != errno.EINVAL or not _pass_the_cache(descriptor, False):
                raise
            continue
        block, offset = block[count:], offset + count


def _pass_the_cache(descriptor: int, wanted: bool) -> bool:
    """Write straight to the disk or not; whether this has changed anything.

    The page cache would cost a copy, and kernel threads the time to clear it, at no low priority.
    """
    direct = getattr(os, "O_DIRECT", 0)
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    after = before | direct if wanted else before & ~direct
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, after)
    except OSError:  # a file system without it
        return False
    return after != before


def _tell(what: str) -> None:
    os.write(1, f"{what}\n".encode())


def main(memory: str, num_bytes: str, path: str) -> None:
    """The program."""
    with mmap.mmap(int(memory), int(num_bytes), prot=mmap.PROT_READ) as contents:
        with memoryview(contents) as view:
            try:
                began = time.monotonic()
                for done, crc in write_rest(path, view):
                    _tell(f"{done} {crc}")
                    time.sleep(min(REST * (time.monotonic() - began), LONGEST_REST_S))
                    began = time.monotonic()
                _tell(WHOLE)
            except BrokenPipeError:
                return  # whoever wanted the file is gone
            except OSError as error:
                _tell(f"{FAILED}{type(error).__name__}: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
