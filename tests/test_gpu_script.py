"""`benchmarks/gpu.sh` on the CPU, on a machine without Ray and vLLM."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCKED = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("ray", "vllm"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


def test_the_gpu_script_runs_small_on_a_cpu_without_ray_and_vllm(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    own = {
        "PYTHON": sys.executable,
        "PYTHONPATH": f"{tmp_path}",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    command = ["bash", str(ROOT / "benchmarks/gpu.sh"), "--device", "cpu", "--tiny"]
    done = subprocess.run(
        command, env=os.environ | own, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^update: \d+ tokens .* TFLOP/s of 790 ", done.stdout, re.M)
    assert re.search(r"^decode: 64 x 8 tokens .* GB/s of 4300 ", done.stdout, re.M)
    assert re.search(r"^step: two GRPO steps .* Ray and vLLM: \[\]$", done.stdout, re.M)
    assert "gpu tests\n-- not run: they need a CUDA device" in done.stdout
    assert "no GPU was used" in done.stdout
