"""The written configuration of a run is read back unchanged."""

from __future__ import annotations

import io
from typing import Any

from omegaconf import OmegaConf

from trainer.config.keys import in_yaml

VALUES: dict[str, Any] = {
    "numbers": [0, -1, 1e-5, 1e20, float("inf")],
    "others": [True, False, None, [], {}, {"deeper": {"still": [1]}}],
    "like numbers": ["1", "-1", "+1", "1e3", "1_000", "0x1f", "1:30", ".5", "1.", "inf", "nan"],
    "like others": ["true", "No", "on", "y", "n", "null", "~", "", "2020-01-01", ".inf", "=", "<<"],
    "odd": ["a: b", "- a", "#a", "!a", "'", '"', "two\nlines", "\x07", "é", "a b " * 50],
    "n": 1,
}


def test_values_are_read_back_unchanged() -> None:
    assert OmegaConf.to_container(OmegaConf.load(io.StringIO(in_yaml(VALUES)))) == VALUES
