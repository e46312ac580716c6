"""Where a step's numbers go: a line of `metrics.jsonl` in the run folder, and the console. `trainer.ppo` calls it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError


class Tracking:
    """Writes metrics; every line is on disk when `log` returns.

    with Tracking(config.trainer.default_local_dir, config.trainer.logger) as tracking:
        tracking.log({"critic/score/mean": 0.5}, step=1)
    """

    def __init__(self, folder: str | Path, logger: Sequence[str] = ("console",)):
        """Go on with `metrics.jsonl` in `folder`; what is not there is made."""
        path = Path(folder) / "metrics.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as err:
            raise ConfigError(f"trainer.default_local_dir={folder} cannot be written: {err}") from err
        self._console = "console" in logger

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Write one step's metrics; numbers keep every digit in the file."""
        plain = {name: float(value) for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **plain}) + "\n")
        self._file.flush()
        if self._console:
            print(f"step {step}: " + "  ".join(f"{name} {value:.4g}" for name, value in plain.items()), flush=True)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Tracking:
        """For `with`."""
        return self

    def __exit__(self, *_: object) -> None:
        """Closes."""
        self.close()
