"""Rotary positions whose factors depend on how long a row is (longrope, as in Phi-3 128k).

That length matters where rows are cut into passes, and where a row grows beyond it in generation.
"""

from __future__ import annotations

from typing import Any


def factor_border(config: Any) -> int | None:
    """The original length of a model whose rotary factors are others beyond it (longrope)."""
    text = config.get_text_config()
    rope = getattr(text, "rope_parameters", None) or {}
    for part in (rope, *rope.values()):
        if isinstance(part, dict) and part.get("rope_type") == "longrope":
            original = part.get("original_max_position_embeddings")
            return original or getattr(text, "original_max_position_embeddings", None)
    return None
