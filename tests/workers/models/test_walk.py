"""Every causal LM of transformers is right in each part of a run, or refused with words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.workers.models.architectures import NotBuilt, cases
from tests.workers.models.not_yet import NOT_YET
from tests.workers.models.walk import walk

FAST = (
    "llama llama+yarn qwen2 qwen3 qwen2+window mistral mistral+full mixtral phi3 phi3+partial "
    "phi3+longrope gemma2 gemma3_text gpt2 gpt_neo gpt_neox bloom opt deepseek_v3 glm4_moe "
    "qwen2_moe llama4_text gpt_oss mixtral+jitter openai-gpt"
).split()
UNKNOWN = {"blt": "reads bytes through three models; its configuration has no layers of its own"}
"""Case -> why it is not walked."""


def check(case: str, folder: Path) -> None:
    """A part that is wrong must be in `NOT_YET`, and what is there must be wrong."""
    wrong = {part for part, result in walk(case, folder).items() if result.startswith("wrong")}
    assert wrong == NOT_YET.get(case, {}).keys()


@pytest.mark.parametrize("case", FAST)
def test_each_part_is_right_or_refused(case: str, tmp_path: Path) -> None:
    check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in cases() if case not in (*FAST, *UNKNOWN)])
def test_each_part_of_every_other_architecture_is_right_or_refused(
    case: str, tmp_path: Path
) -> None:
    try:
        check(case, tmp_path)
    except NotBuilt as reason:
        pytest.skip(str(reason))
