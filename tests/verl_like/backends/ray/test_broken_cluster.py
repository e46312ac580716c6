"""A lost head of Ray is named in seconds, and the end of a run never waits for a dead daemon."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.programs import found_by


@pytest.mark.long
@pytest.mark.ray
def test_a_lost_head_is_reported_and_a_frozen_daemon_does_not_block_exit(
    ray_session: None,
) -> None:
    facts = found_by(sys.executable, "tests.verl_like.broken_cluster", limit_s=150)
    assert (facts["heard"], facts["aborts_in_s"]) == ([signal.SIGTERM], 0), "Ray's handler is gone"
    assert "faulty.sleeps, faulty rank 0 of 1" in facts["error"]
    assert "the head of the Ray cluster is gone: no GCS listens at" in facts["error"]
    assert facts["error_s"] < 15
    assert facts["left"]
    assert facts["left_s"] < 15
    assert facts["ended_s"] < 15
    assert facts["noted"] == signal.SIGTERM, "a run is still asked to stop after it has left"
    assert not Path(facts["session"]).parent.exists(), "the driver removes it at its end"
