"""Choose the layout of rows in a pass: packed if that is correct, otherwise padded.

    row_passes = choose_layout(module, support, may_pack=True)  # a ConfigError if neither is right

Packed rows are faster, but wrong for a model that counts positions, carries a state from token to
token or looks at neighboring tokens. The tokens of a packed row can be split over ranks only if no
operation but attention mixes tokens. `workers.models.support` knows this for each class.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from verl_like.errors import ConfigError, nearest_divisors
from workers.models.folder import factor_border
from workers.models.support import Support
from workers.training.passes.attention import takes_layout
from workers.training.passes.packing import Kind, RowPasses

logger = logging.getLogger(__name__)

PADDED_BY_USER = "use_remove_padding=false in the model's section"
"""Reason for padded rows when the user chose them."""


def choose_layout(
    module: Any,
    support: Support,
    *,
    may_pack: bool,
    may_share: bool = False,
    group: dist.ProcessGroup | None = None,
) -> RowPasses:
    """Return the layout of this model's rows; log a warning if the model cannot pack them.

    Rows must be packed if there is a `group`, whose ranks share every pass. With `may_share`,
    shared prefixes are computed once if that is correct for this model.
    """
    kind, reason = row_kind(support, may_pack)
    ranks = None
    if group is not None:
        check_split(support, group.size(), reason)
        from workers.parallel.sequence import SequenceRanks

        ranks = SequenceRanks(group, support.config.get_text_config().num_attention_heads)
    if reason not in ("", PADDED_BY_USER):
        logger.warning(
            "model type %s runs on padded rows, with the whole head, which is slower: %s. Set "
            "use_remove_padding=false in the model's section to silence this warning.",
            support.model_type,
            reason,
        )
    border = factor_border(module.config)
    is_square = kind == "packed" and support.attention == "eager" and not takes_layout(module)
    may_share = may_share and kind == "packed" and ranks is None and border is None
    shares = may_share and takes_layout(module) and not support.why_not("shared")
    return RowPasses(kind, border, is_square, ranks, shares)


def row_kind(support: Support, may_pack: bool = True) -> tuple[Kind, str]:
    """Return the correct layout for a class of models, and why it is not packed.

    Raise a ConfigError if no layout is correct.
    """
    reason = support.why_not("packed") if may_pack else PADDED_BY_USER
    if not reason:
        return "packed", ""
    if support.capabilities is None or not support.why_not("padded"):
        return "padded", reason

    in_eager = replace(support, attention="eager")
    if not (in_eager.why_not("packed") and in_eager.why_not("padded")):
        choice = "Set attn_implementation=eager in the model's section; its log-probs are right."
    else:
        choice = "Choose a causal LM of another type."
    raise ConfigError(
        f"model type {support.model_type} cannot be trained or scored, because padded rows do not "
        f"give the log-probs that transformers computes ({support.why_not('padded')}). It may "
        f"look at later tokens. {choice}"
    )


def check_split(
    support: Support, num_ranks: int, why_not_packed: str = "", section: str = "parallel"
) -> None:
    """Raise a ConfigError if ranks cannot share the tokens of this model's packed rows.

    `section` is the key of its `parallel` section.
    """
    # state space models have no heads
    num_heads = getattr(support.config.get_text_config(), "num_attention_heads", num_ranks)
    if num_ranks <= num_heads and num_heads % num_ranks:
        raise ConfigError(
            f"{section}.sp={num_ranks} does not divide the {num_heads} attention heads of model "
            f"type {support.model_type}; nearest that do: {nearest_divisors(num_ranks, num_heads)}."
        )
    reason = why_not_packed or support.why_not("packed")
    if reason:
        reason = f"its rows do not run packed: {reason}"
    else:
        reason = support.why_not("split")
    if reason:
        raise ConfigError(
            f"{section}.sp={num_ranks}: model type {support.model_type} cannot split a "
            f"row over several ranks: {reason}. Set {section}.sp=1; {section}.shard "
            "divides weights."
        )
