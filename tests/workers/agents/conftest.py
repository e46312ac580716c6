"""A tiny model with random weights, and its tokenizer with one token per character."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.cli.make_tiny import make_model, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    return make_model(tokenizer)
