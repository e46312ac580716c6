"""usage: verl-like check-loss
           FILE.py:FUNCTION|MODULE.FUNCTION|NAME|trl:NAME|verl:NAME
           [--kind policy|value|preference|estimator]
           [--set KEY=VALUE ...] [--skip RELATION ...]

Checks a loss or an advantage estimator:

  verl-like check-loss my_losses.py:my_loss   yours; parameters are filled by
                                              their names
  verl-like check-loss vanilla                a built-in loss
  verl-like check-loss trl:grpo --set epsilon=0.1
                                              TRL's or verl's, installed next to
                                              this package

It calls the function on small batches that are cut, padded, permuted and filled
with garbage in ways that must not change the result, forward and backward. The
exit code is 0 if all relations hold. Otherwise it is 1, and the command names
the first relation that does not hold, with the smallest batch that shows it and
the likely cause.

  --kind policy|value|preference|estimator
                      if a loss and an estimator share a name
  --set KEY=VALUE     a setting of the function; repeatable
  --skip RELATION     a relation to leave out, by the name that the command
                      prints; repeatable
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import yaml  # type: ignore[import-untyped]

from trainer.tools.check_loss import BrokenRelation, check_loss
from verl_like.terminal import usage_text


def main(arguments: Sequence[str]) -> None:
    """Check the target and print which relations hold; exit with the first one that does not."""
    parser = argparse.ArgumentParser("verl-like check-loss", usage_text(__doc__), add_help=False)
    parser.add_argument("target")
    parser.add_argument("--kind")
    parser.add_argument("--set", nargs="+", default=[])
    parser.add_argument("--skip", nargs="+", default=[])
    options = parser.parse_args(arguments)
    pairs = [word.partition("=")[::2] for word in options.set]
    settings = {key: yaml.safe_load(value) for key, value in pairs}
    try:
        names = check_loss(options.target, options.kind, skip=options.skip, **settings)
    except BrokenRelation as error:
        sys.exit(f"error: {error}")
    print(f"{options.target}: {len(names)} relations hold: {', '.join(names)}")
