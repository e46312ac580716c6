"""Losses that learn from preferences: pure functions of the log-probs of whole responses.

The losses are in `registry`, by name in `PREFERENCE_LOSSES`. The parameters of a loss name its
inputs: columns of `registry.COLUMNS`, and keys of the configuration. A loss returns one number per
pair or row. `measures` computes the metrics.
"""

import workers.losses.preference.registry  # noqa: F401  # registers the losses
