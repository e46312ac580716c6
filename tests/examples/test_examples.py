"""Every folder of examples/ runs in its small mode, as a reader would run it."""

from __future__ import annotations

from tests.examples.scripts import EXAMPLES

COVERED = {
    "quickstart": "tests/examples/test_quickstart.py",
    "split_placement": "tests/examples/test_split_placement.py",
    "tiny": "tests/conftest.py makes it for every test",
    "data": "tests/examples/test_prepare_gsm8k.py",
    "remote_reward": "tests/examples/test_remote_reward.py",
    "rlhf_pipeline": "tests/examples/test_rlhf_pipeline.py",
    "async": "tests/examples/test_async.py",
    "notebook": "tests/examples/test_notebook.py",
    "agents": "tests/examples/test_agents.py",
    "cluster": "tests/examples/test_cluster.py",
    "gsm8k": "tests/examples/test_gsm8k.py",
    "serve": "tests/trainer/serve/test_sdk.py",
    "carries": "tests/examples/test_carries.py",
    "from_trl": "tests/examples/test_from_trl.py",
    "smollm2": "tests/examples/test_smollm2.py",
    "shapes": "tests/examples/test_shapes.py",
    "custom_role": "tests/workers/roles/test_custom_role.py",
    "best_of_n": "tests/examples/test_best_of_n.py",
}


def test_every_example_is_run_by_a_test() -> None:
    folders = {path.name for path in EXAMPLES.iterdir() if path.is_dir()}
    assert folders - {"__pycache__"} == set(COVERED)
