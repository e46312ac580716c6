"""Which of the user's modules the workers on other nodes need, so that Ray can send them there.

What a run names by a dotted path is imported in the worker processes: worker classes, policy
losses, optimizers. Estimators, reward functions and trainers run beside the driver and stay there.
"""

from __future__ import annotations

import importlib.util
import sysconfig
from collections.abc import Iterable
from pathlib import Path

OWN_PACKAGES = ("verl_like", "workers", "trainer")


def modules_of_the_user(dotted_paths: Iterable[str]) -> list[str]:
    """Files and folders, each once, that hold the user's code behind these dotted paths.

    What is installed is not among them, nor is a name without a dot: that is one of a registry.
    """
    packages = dict.fromkeys(path.partition(".")[0] for path in dotted_paths if "." in path)
    places = []
    for package in packages:
        place = None if package in OWN_PACKAGES else place_of(package)
        if place is not None:
            places.append(str(place))
    return places


def place_of(module: str) -> Path | None:
    """The file of a module or the folder of a package; None if it is installed or not there."""
    spec = importlib.util.find_spec(module)
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or ())
    place = Path(folders[0] if folders else str(spec.origin)).resolve()

    for kind in ("purelib", "platlib", "stdlib"):
        if place.is_relative_to(Path(sysconfig.get_path(kind)).resolve()):
            return None
    return place
