"""The last word of a metric's name decides how it is reduced."""

from __future__ import annotations

import pytest

from trainer.run_folder.metrics import reduce_metrics
from verl_like.errors import BatchError


def test_reduction_goes_by_the_last_word_of_a_name():
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


def test_a_metric_without_values_is_refused():
    with pytest.raises(BatchError, match="no values"):
        reduce_metrics({"a": []})
