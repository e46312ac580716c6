"""Losses that learn from preferences: pure functions of the log-probs of whole responses.

The losses are in `formulas`, registered by name in `registry.PREFERENCE_LOSSES`. The parameters of
a loss name its inputs: columns of `registry.COLUMNS`, and keys of the configuration. A loss returns
one number per pair or row. `measures` computes the metrics.
"""

import workers.losses.preference.formulas  # noqa: F401  # registers the losses
