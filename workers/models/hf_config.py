"""The configuration of transformers in a model's folder, for whoever builds the model or asks.

Parsing takes transformers longer than building a small model; the roles of a process, the plan of
its memory and the checks before it mostly ask for the same one.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from typing import Any


def read_hf_config(folder: str | Path) -> Any:
    """A copy of the caller's own, who may change it; no code of the folder is run."""
    return copy.deepcopy(shared_hf_config(folder))


def shared_hf_config(folder: str | Path) -> Any:
    """The same without a copy, to be read alone."""
    file = Path(folder, "config.json")
    return _parsed(str(folder), file.read_bytes() if file.is_file() else None)


@lru_cache(maxsize=16)
def _parsed(folder: str, _text: bytes | None) -> Any:
    # the text is a parameter so that a changed file is parsed again
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
