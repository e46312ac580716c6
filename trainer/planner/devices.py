"""Cards by their public data sheets, as the planner counts with them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from trainer.config.devices import GIB_OF_CARDS
from verl_like.errors import ConfigError, nearest
from workers.training.mfu import PEAKS


@dataclass(frozen=True)
class Device:
    """A card, and how it reaches others."""

    name: str
    gib: float
    flops: float
    """Operations a second in dense bfloat16 products."""
    memory: float
    """Bytes a second from its memory."""
    link: float
    """Bytes a second to another card of its machine, one way."""
    network: float
    """Bytes a second to a card of another machine, one way."""

    @property
    def bytes(self) -> int:
        """Of its memory."""
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
"""Card -> bytes a second of its memory, of its links in a machine, and of a network of one port of
100 to 400 Gbit/s for each card, as in machines that are sold with eight of them.
"""

DEVICES = {
    name: Device(name, GIB_OF_CARDS[name], PEAKS[name], *rates)
    for name, rates in BANDWIDTHS.items()
}
NUMBERS = ("gib", "flops", "memory", "link", "network")
"""What a card of one's own is described by, as `plan.<name>`."""


def device_of(name: str, own: dict[str, Any]) -> Device:
    """The card of this name with one's `own` numbers in the place of a data sheet's."""
    known = {each.lower(): device for each, device in DEVICES.items()}
    device = known.get(name.lower())
    if device is not None:
        return replace(device, **own)
    missing = [f"plan.{number}" for number in NUMBERS if number not in own]
    if missing:
        raise ConfigError(
            f"plan.device={name} is no card that is known here.{nearest(name, DEVICES)} Known: "
            f"{', '.join(DEVICES)}. Of another one give {', '.join(missing)} (GiB, operations a "
            "second, bytes a second of memory, of links in a machine and between machines)."
        )
    return Device(name, **own)
