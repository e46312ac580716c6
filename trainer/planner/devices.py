"""GPUs by their public data sheets."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.devices import GIB_OF_CARDS
from verl_like.errors import ConfigError, nearest
from workers.training.mfu import PEAKS


@dataclass(frozen=True)
class Device:
    """A GPU, with its memory and its links. Rates are per second."""

    name: str
    gib: float
    flops: float
    """Operations in dense bfloat16 products."""
    memory: float
    """Bytes from its memory."""
    link: float
    """Bytes to another GPU of its node, one way."""
    network: float
    """Bytes to a GPU of another node, one way."""

    @property
    def bytes(self) -> int:
        """Size of its memory."""
        return int(self.gib * 2**30)


BANDWIDTHS = {
    "L4": (300e9, 32e9, 12.5e9),
    "L40S": (864e9, 32e9, 25e9),
    "A100": (2039e9, 300e9, 25e9),
    "H20": (4000e9, 450e9, 50e9),
    "H100": (3350e9, 450e9, 50e9),
    "H200": (4800e9, 450e9, 50e9),
    "B200": (8000e9, 900e9, 50e9),
    "MI300X": (5300e9, 448e9, 50e9),
}
"""Bytes per second of memory, of links in a node, and of a network with one port of 100 to 400
Gbit/s per GPU, as in nodes that are sold with eight of them.
"""
DEVICES = {
    name: Device(name, GIB_OF_CARDS[name], PEAKS[name], *rates)
    for name, rates in BANDWIDTHS.items()
}
NUMBERS = ("gib", "flops", "memory", "link", "network")
"""The options `--<name>` of `verl-like plan` that describe a GPU."""


def data_sheet(name: str) -> Device | None:
    """Return the GPU of a driver's name ("NVIDIA H100 80GB HBM3"), if it is known."""
    words = re.split(r"[\s-]+", name)
    return next((DEVICES[word] for word in words if word in DEVICES), None)


def device_of(name: str, numbers: dict[str, Any]) -> Device:
    """Return the GPU of this name; the user's `numbers` replace the data sheet's."""
    device = {known.lower(): device for known, device in DEVICES.items()}.get(name.lower())
    if device is not None:
        return replace(device, **numbers)
    missing = [f"--{number}" for number in NUMBERS if number not in numbers]
    if missing:
        raise ConfigError(
            f"--device={name} is not a known GPU.{nearest(name, DEVICES)} Known: "
            f"{', '.join(DEVICES)}. For another one give {', '.join(missing)} (GiB, operations per "
            "second, bytes per second of memory, of links in a node and between nodes)."
        )
    return Device(name, **numbers)
