"""The reduction of metrics, and the target that ends a run."""

from __future__ import annotations

import pytest

from trainer.run_folder.metrics import describe_reached_target, reduce_metrics
from verl_like.errors import BatchError, ConfigError


def test_the_last_word_of_a_name_chooses_the_reduction() -> None:
    expected = {
        "loss": 3.0,
        "x/max": 6.0,
        "x/min": 1.0,
        "grad_max": 6.0,
        "lr_min": 1.0,
        "max_len/mean": 3.0,
        "global_seqlen/minmax_diff": 3.0,
        "admin": 3.0,
        "climax": 3.0,
    }
    assert reduce_metrics(dict.fromkeys(expected, [1.0, 2.0, 6.0])) == expected


def test_a_metric_without_values_raises() -> None:
    with pytest.raises(BatchError, match="no values"):
        reduce_metrics({"a": []})


def test_a_target_is_reached_at_its_value() -> None:
    targets = {"critic/score/mean": 0.5}
    assert describe_reached_target({"critic/score/mean": 0.49}, targets) == ""
    assert describe_reached_target({"critic/score/mean": 0.5}, targets).startswith(
        "critic/score/mean=0.5 has reached 0.5"
    )


def test_a_target_of_an_unknown_metric_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'critic/score/mea'.*critic/score/mean"):
        describe_reached_target({"critic/score/mean": 1.0}, {"critic/score/mea": 0.5})
