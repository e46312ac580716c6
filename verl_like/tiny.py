"""Tiny models with random weights, and rows for them, for tests and examples.

    from verl_like.tiny import make_model, make_tokenizer

`verl-like make-tiny` calls `make`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from trainer.cli.make_tiny import fit as fit
    from trainer.cli.make_tiny import fit_answers as fit_answers
    from trainer.cli.make_tiny import main as main
    from trainer.cli.make_tiny import make as make
    from trainer.cli.make_tiny import make_model as make_model
    from trainer.cli.make_tiny import make_tokenizer as make_tokenizer
    from trainer.cli.tiny_vision import write_vision_model as write_vision_model

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)
