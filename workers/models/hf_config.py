"""The transformers configuration of a model folder, parsed once.

Parsing takes transformers longer than building a small model, and the roles of a process, the
memory plan and the checks before it usually need the same configuration.
"""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from workers.models.folder import check_small_files

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads"),
)
LARGEST = 10**8
"""Upper limit of a size in a model."""


def read_hf_config(folder: str | Path) -> Any:
    """Return a copy that the caller may change; code in the folder is never run."""
    return copy.deepcopy(shared_hf_config(folder))


def shared_hf_config(folder: str | Path) -> Any:
    """Return the configuration without a copy; callers must not change it."""
    file = Path(folder, "config.json")
    return _parsed(str(folder), file.read_bytes() if file.is_file() else None)


@lru_cache(maxsize=16)
def _parsed(folder: str, _text: bytes | None) -> Any:
    # the text is a parameter so that a changed file is parsed again
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    check_small_files(Path(folder))
    if _text is not None:
        _check_sizes(json.loads(_text), Path(folder, "config.json"))
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (StrictDataclassError, TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{folder}/config.json describes no model: {error}") from error


def _check_sizes(fields: dict[str, Any], file: Path) -> None:
    """Reject sizes that no model has, also in the configuration of a sub-model."""
    for name, value in fields.items():
        if isinstance(value, dict):
            _check_sizes(value, file)
        elif name in SIZES and isinstance(value, int | float) and not 0 < value <= LARGEST:
            raise ConfigError(f"{file} describes no model: {name} is {value:,}.")


def factor_border(config: Any) -> int | None:
    """Return the length beyond which a longrope model's rotary factors change, or None.

    Rotary factors depend on the length of a row in longrope (Phi-3 128k). That matters where rows
    are split into passes, and where generation makes a row longer.
    """
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            return original or getattr(text, "original_max_position_embeddings", None)
    return None
