"""A checkpoint that is written and committed in the background, while the steps go on.

There is one when roles have left files to write:

    commit = BackgroundCommit(groups, part, put_in_place)    # a thread waits for their writing
    ...                                                # steps
    if commit.is_done:
        folder = commit.result()                       # or the error

The roles' side is `workers.training.background_save`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from verl_like.errors import CheckpointError, VerlLikeError
from workers.training.manifest import add_files

POLL_S = 0.05
DROP_S = 5.0
"""What the writing gets to hear that it is to hurry, or to end."""
logger = logging.getLogger(__name__)


class BackgroundCommit:
    """The roles' writing, and the commit after it, in a thread."""

    def __init__(
        self,
        groups: Mapping[str, Any],
        part: Path,
        commit: Callable[[Callable[[], dict[str, Any]]], Path],
    ) -> None:
        """`groups` are those with files to write, each into its folder of `part`.

        `commit` is given what writes them and gives their fingerprints, calls it, and gives the
        checkpoint's folder.
        """
        self._groups, self._part, self._commit = groups, part, commit
        self._folder: Path | None = None
        self._error: Exception | None = None
        self._is_told = False
        self._is_dropped, self._is_waited_for = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Path:
        """The checkpoint's folder; waits for it, and raises what failed."""
        self._is_waited_for.set()
        self._thread.join()
        if self._error is not None:
            self._is_told = True
            raise self._error
        assert self._folder is not None, "a commit without an error gives its folder"
        return self._folder

    def end(self, seconds: float) -> None:
        """Wait so long at most, then drop it: the run is at its end, by an error or a signal."""
        self._thread.join(seconds)
        if not self.is_done:
            self._drop()
        if self._error is not None and not self._is_told:
            logger.warning("%s", self._error)

    def _drop(self) -> None:
        """Break off: nothing more of it is written, and it is never committed."""
        self._is_dropped.set()
        self._tell_all(is_wanted=False)
        self._thread.join(DROP_S)

    def _tell_all(self, is_wanted: bool) -> None:
        """Have every group that writes hurry, or end."""
        for group in self._groups.values():
            with suppress(VerlLikeError):  # whoever is gone writes nothing
                group.hurry_checkpoint.remote(is_wanted).get(timeout=DROP_S)

    def _run(self) -> None:
        try:
            self._folder = self._commit(self._write)
        except Exception as error:  # noqa: BLE001 - raised by whoever asks for the result
            self._error = error

    def _write(self) -> dict[str, Any]:
        """Every role's files, and the manifest over them; gives the files' fingerprints."""
        writing = {role: group.write_checkpoint.remote() for role, group in self._groups.items()}

        # steps notice a worker that is gone; while nobody makes any, the watched wait of `get` does
        while not self._is_waited_for.wait(POLL_S):
            self._refuse_if_dropped()
            if all(future.done() for future in writing.values()):
                break
        else:
            self._tell_all(is_wanted=True)
        written: dict[str, Any] = {}
        for role, future in writing.items():
            files = {name: facts for of_rank in future.get() for name, facts in of_rank.items()}
            add_files(self._part / role, files)
            written |= {f"{role}/{name}": facts for name, facts in files.items()}
        self._refuse_if_dropped()
        return written

    def _refuse_if_dropped(self) -> None:
        if self._is_dropped.is_set():
            raise CheckpointError("the run ended before it was written.")
