"""Whether two models read the same token ids: what one says, the other then judges."""

from __future__ import annotations

from typing import Any

from verl_like.errors import ConfigError
from workers.models.folder import model_folder


def check_same_tokenizer(path: str, policy_path: str, role: str) -> None:
    """Refuse a role's model whose token ids are not the policy's.

    Of a folder without a tokenizer nothing can be said.
    """
    own, policy = _vocabulary(path), _vocabulary(policy_path)
    if own is None or policy is None or own == policy:
        return

    tokens = own.keys() | policy.keys()
    other = sorted(token for token in tokens if own.get(token) != policy.get(token))
    raise ConfigError(
        f"the model of role {role!r}, {path!r}, has another tokenizer than "
        f"actor_rollout_ref.model.path={policy_path!r}: {len(other)} tokens differ, such as "
        f"{', '.join(map(repr, other[:3]))}. Responses are not tokenized anew for it: take a model "
        "of the actor's family."
    )


def _vocabulary(path: str) -> dict[str, int] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_folder(path, weights=False), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return None
    return dict(tokenizer.get_vocab())
