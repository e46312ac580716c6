"""End a command whose run fails: with one line for known errors, otherwise with a traceback.

`verl-like ppo` and the other recipes' commands run inside `ending_in_words`. Hydra, which would
wrap every error in its own words, sees none of them.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.run_folder.signals import EXIT_OF_CTRL_C, RunStopped
from verl_like.errors import CallbackError, VerlLikeError
from verl_like.masking import mask_text
from verl_like.terminal import printable

GOES_ON = "the same command goes on from the last checkpoint, where there is one"


@contextmanager
def ending_in_words(folder: str | Path = "") -> Iterator[None]:
    """End the process by SystemExit if the block raises; `folder` is named if its disk is full."""
    try:
        yield
    except RunStopped as stopped:
        print(f"{stopped}; {GOES_ON}", file=sys.stderr)
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        print(f"stopped; {GOES_ON}", file=sys.stderr)
        sys.exit(EXIT_OF_CTRL_C)
    except VerlLikeError as err:
        if isinstance(err, CallbackError):
            _show(err.__cause__ or err)  # the place in the user's code
        sys.exit(f"error: {printable(mask_text(_in_words(err)))}")
    except Exception as err:  # noqa: BLE001 - the process edge
        if isinstance(err, OSError) and err.errno == errno.ENOSPC:
            sys.exit(f"error: no room for the run in {folder}: {err}. Make room; {GOES_ON}.")
        _show(err)
        sys.exit(1)


def _in_words(err: BaseException) -> str:
    """Return the message, and a line per note: why there was no retry, and other failures."""
    notes = (note.strip().partition("\n")[0] for note in getattr(err, "__notes__", []))
    return "\n  ".join([str(err), *notes])


def _show(err: BaseException) -> None:
    print(mask_text("".join(traceback.format_exception(err))), end="", file=sys.stderr)
