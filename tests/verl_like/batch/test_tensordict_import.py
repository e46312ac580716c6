"""tensordict is imported without the compiler, and can still be compiled."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
import torch
from verl_like.batch.tensordict_import import TensorDict
assert "torch._dynamo" not in sys.modules, "the compiler was loaded"

def work(batch):
    scaled = batch.apply(lambda column: column * 2)
    return scaled["a"] + torch.cat([batch, scaled])["a"].sum()

batch = TensorDict({"a": torch.arange(3.0)}, batch_size=[3])
compiled = torch.compile(work, backend="eager")
assert torch.equal(compiled(batch), work(batch))
"""


@pytest.mark.long
def test_the_compiler_is_loaded_only_on_first_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
