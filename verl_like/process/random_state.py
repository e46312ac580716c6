"""The state of every random generator that a role may draw from: read, set, saved and loaded."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch


def get_random_state() -> dict[str, Any]:
    """The state of every generator a worker may draw from."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Back to a state that `get_random_state` gave."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def save_random_state(path: Path) -> None:
    """Write the present state: that of a role while one of its methods runs."""
    state = get_random_state()
    kind, keys, *rest = state["numpy"]
    buffer = io.BytesIO()
    torch.save(state | {"numpy": (kind, keys.tolist(), *rest)}, buffer)
    path.write_bytes(buffer.getvalue())


def load_random_state(path: Path) -> None:
    """Take over a state that `save_random_state` wrote."""
    state = torch.load(path, weights_only=True)
    kind, keys, *rest = state["numpy"]
    if not torch.cuda.is_available():
        state.pop("cuda", None)
    set_random_state(state | {"numpy": (kind, np.array(keys, dtype=np.uint32), *rest)})
