"""One PPO step on two nodes of a simulated cluster, then the loss of a node during a step.

`RUN_DIR/code/my_critic.py` is a user's module, which a node can import only if it is shipped.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

from tests.integration.runs import overrides
from tests.waiting import wait_until

MY_CRITIC = """
import time
from pathlib import Path

import ray

from verl_like import Dispatch, register
from workers.roles.critic import CriticWorker


class MyCritic(CriticWorker):
    def __init__(self, config):
        super().__init__(config)
        self.folder = Path(config.trainer.default_local_dir)

    @register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO, blocking=False, readonly=True)
    def update_critic(self, data):
        (self.folder / "came_from.txt").write_text(__file__)
        (self.folder / "node.txt").write_text(ray.get_runtime_context().get_node_id())
        if (self.folder / "stall").exists():
            (self.folder / "stalled").touch()
            time.sleep(120)
        return super().update_critic(data)
"""


def on_two_nodes(tiny: Path, folder: Path, cluster: Any, nodes: dict[str, Any]) -> dict[str, Any]:
    """Run a step on two nodes, then a step that loses the critic's node, which leaves `nodes`."""
    code = folder / "code"
    code.mkdir(parents=True)
    (code / "my_critic.py").write_text(MY_CRITIC, encoding="utf-8")
    sys.path.insert(0, str(code))
    return both_runs(tiny, folder, cluster, nodes) | {"code": str(code)}


def both_runs(tiny: Path, folder: Path, cluster: Any, nodes: dict[str, Any]) -> dict[str, Any]:
    from trainer import load_config, run

    here = (
        "trainer.backend=ray",
        f"ray.address={cluster.address}",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
    )
    mine = (
        "placement=split",
        "+role_workers.critic=my_critic.MyCritic",
        "trainer.total_training_steps=1",
        "trainer.max_restarts=0",
    )
    last_rack = "pool_resources={critic_pool: {labels: {rack: r2}}}"
    run(load_config(overrides(tiny, folder / "first", *here, *mine, last_rack)))
    report: dict[str, Any] = {"came_from": (folder / "first" / "came_from.txt").read_text()}
    report |= {"nodes": list(nodes), "critic_on": (folder / "first" / "node.txt").read_text()}

    second = folder / "second"
    second.mkdir()
    (second / "stall").touch()
    lost_at: list[float] = []

    def lose_node() -> None:
        wait_until((second / "stalled").exists)
        node_id = (second / "node.txt").read_text()
        lost_at.append(time.monotonic())
        cluster.remove_node(nodes.pop(node_id), allow_graceful=False)

    threading.Thread(target=lose_node, daemon=True).start()
    try:
        run(load_config(overrides(tiny, second, *here, *mine)))
    except Exception as error:  # noqa: BLE001 - it goes to the test, whatever it is
        report |= {
            "error": f"{type(error).__name__}: {error}",
            "seconds": time.monotonic() - lost_at[0],
        }
    return report
