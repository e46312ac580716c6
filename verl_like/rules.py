"""The built-in reward rules: `reward=verl_like.rules:run_tests`.

    gsm8k("openai/gsm8k", solution_str="2 + 2 = #### 4", ground_truth="4")      # 1.0

As in verl, every rule gets `data_source` (the row's column), `solution_str` (the response),
`ground_truth` (the expected answer) and `extra_info` (a dict). The rules read the second and third.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from verl_like.lazy import import_name, names_by_block

if TYPE_CHECKING:  # `X as X` tells type checkers that the name is public
    from workers.rewards.code import run_tests as run_tests
    from workers.rewards.functions import dapo as dapo
    from workers.rewards.functions import geometry as geometry
    from workers.rewards.functions import gsm8k as gsm8k
    from workers.rewards.functions import gsm8k_flexible as gsm8k_flexible
    from workers.rewards.functions import math as math
    from workers.rewards.functions import tiny_letters as tiny_letters

[_MODULE_OF] = names_by_block(__file__)
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, _MODULE_OF, name)
