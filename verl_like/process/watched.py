"""What a supervisor watches, as its starter knows it: ended by hand where the supervisor is killed.

Code of strangers runs under the same user as the supervisor (`verl_like.process.supervisor`), so it
can kill that and go on alone.
"""

from __future__ import annotations

import contextlib
import os
import signal

from verl_like.process.deep_folder import remove_folder


class Watched:
    """The child of a supervisor, and the folder that it works in."""

    def __init__(self, pid: int, folder: str) -> None:
        """While it lives, or is not yet waited for; ProcessLookupError afterwards."""
        self._pid, self._folder = pid, folder
        self._handle = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None

    def end(self) -> None:
        """Kill it with its process group, whatever number another process has by now."""
        if self._handle is not None:
            with contextlib.suppress(ProcessLookupError):
                # one that has been stopped does not go while its group is killed by number
                signal.pidfd_send_signal(self._handle, signal.SIGSTOP)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._pid, signal.SIGKILL)
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
        remove_folder(self._folder)

    def close(self) -> None:
        """Forget it."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None
