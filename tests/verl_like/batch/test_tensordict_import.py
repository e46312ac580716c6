"""tensordict comes without the compiler, and the compiler hears of it when it comes."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
import verl_like.batch.protocol
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"
from tensordict.utils import _add_batch_dim_c
import torch._dynamo
from torch._dynamo import trace_rules
print(id(_add_batch_dim_c) in trace_rules._allowed_callable_ids)
"""


def test_the_compiler_is_told_when_it_is_loaded_and_not_loaded_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
