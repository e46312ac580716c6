"""Rotary positions whose factors depend on the length of a row (longrope, as in Phi-3 128k).

The length matters where rows are split into passes, and where generation makes a row longer.
"""

from __future__ import annotations

from typing import Any


def factor_border(config: Any) -> int | None:
    """Return the length beyond which a longrope model's rotary factors change, or None."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            return original or getattr(text, "original_max_position_embeddings", None)
    return None
