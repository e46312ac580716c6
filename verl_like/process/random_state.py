"""Get, set, save and load the state of a process's random generators."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl_like.errors import DamagedCheckpointError
from verl_like.files import read_json_object, write_atomic

TORCH_GENERATORS = ("torch", "cuda")
"""Generators whose states are tensors of bytes."""


def get_random_state() -> dict[str, Any]:
    """Return the states of the global generators of Python, numpy and torch."""
    state = {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Restore a state from `get_random_state`."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def save_random_state(path: Path) -> None:
    """Write the current state as JSON; during a method it is the state of the method's role."""
    state = get_random_state()
    kind, keys, *rest = state["numpy"]
    text = {
        "python": state["python"],
        "numpy": [kind, keys.tolist(), *rest],
        **{n: state[n].numpy().tobytes().hex() for n in TORCH_GENERATORS if n in state},
    }
    write_atomic(path, json.dumps(text), to_disk=False)


def load_random_state(path: Path) -> None:
    """Restore a state that `save_random_state` wrote."""
    before = get_random_state()
    try:
        set_random_state(_read(path))
    except (ValueError, LookupError, TypeError, RuntimeError, OverflowError) as error:
        set_random_state(before)
        raise DamagedCheckpointError(f"{path} holds no random state: {error}") from error


def _read(path: Path) -> dict[str, Any]:
    text = read_json_object(path)
    version, numbers, gauss = text["python"]
    kind, keys, *rest = text["numpy"]
    state: dict[str, Any] = {
        "python": (version, tuple(numbers), gauss),
        "numpy": (kind, np.array(keys, dtype=np.uint32), *rest),
    }
    for name in TORCH_GENERATORS:
        if name in text and (name != "cuda" or torch.cuda.is_available()):
            state[name] = torch.frombuffer(bytearray.fromhex(text[name]), dtype=torch.uint8)
    return state
