"""Cards by their public data sheets, as the planner counts with them."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.devices import GIB_OF_CARDS
from verl_like.errors import ConfigError, nearest
from workers.training.mfu import PEAKS


@dataclass(frozen=True)
class Rates:
    """Shares of a device's numbers that are reached, and seconds that no number explains.

    As they are here nothing of them was measured.
    """

    flops: float = 0.5
    """Of operations, in updates: prime-rl's of Qwen3-4B on eight H100s."""
    read_flops: float = 0.5
    """Of operations, in passes that only read, and in decoding."""
    memory: float = 0.7
    """Of bytes from memory, while decoding."""
    link: float = 0.7
    """Of bytes over links."""
    call: float = 0.2
    """Seconds of a call beside its passes."""
    layer: float = 0.0
    """Seconds of a layer beside its work, in every pass: what starting its kernels takes, where
    nothing hides it."""
    collective: float = 0.0
    """Seconds beside the bytes of gathering a layer, adding its gradients up, or exchanging states
    in it between ranks that share it."""
    decode_layer: float = 60e-6
    """Seconds of a layer beside its bytes, in every step of decoding."""
    decode_row: float = 0.0
    """Seconds of a sample beside its bytes, in every step of decoding."""
    all_reduce: float = 15e-6
    """Seconds of a small one over ranks that share matrices."""
    hides: bool = True
    """Whether weights travel while others are computed with."""


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
    rates: Rates = Rates()
    """What of it is reached."""
    type: str = "cuda"
    """As torch names it."""
    measured: str = ""
    """What the rates come from, if they are no assumptions."""

    def flops_reached(self, trains: bool) -> float:
        """Operations a second, in updates or in passes that only read."""
        return self.flops * (self.rates.flops if trains else self.rates.read_flops)

    @property
    def memory_reached(self) -> float:
        """Bytes a second while decoding."""
        return self.memory * self.rates.memory

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


def data_sheet(name: str) -> Device | None:
    """The card that a driver calls by this name ("NVIDIA H100 80GB HBM3"), if it is known here."""
    words = re.split(r"[\s-]+", name)
    return next((DEVICES[word] for word in words if word in DEVICES), None)


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
