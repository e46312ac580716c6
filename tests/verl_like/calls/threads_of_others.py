"""Threads that a worker process would not have: the test runner's own."""

from __future__ import annotations

import sys
import threading

import pytest

from verl_like.calls import progress


def leave_out(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """From now on `progress_of_call` sees no thread of these names, and none without a name."""
    all_frames = sys._current_frames

    def frames_of_threads() -> dict[int, object]:
        known = {thread.ident for thread in threading.enumerate()}
        return {ident: frame for ident, frame in all_frames().items() if ident in known}

    monkeypatch.setattr(progress.sys, "_current_frames", frames_of_threads)
    monkeypatch.setattr(progress, "OWN_THREADS", (*progress.OWN_THREADS, *names))
