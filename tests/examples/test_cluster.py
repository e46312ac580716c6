"""The scripts of `examples/cluster`: the processes that they start, and a run on two hosts."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests import ROOT
from tests.conftest import load
from tests.examples.scripts import EXAMPLES
from tests.integration.runs import overrides
from tests.network_namespaces import ADDRESSES, CABLE, two_hosts, why_no_hosts
from trainer import load_config
from trainer.launch import nominal_placement

SLURM = EXAMPLES / "cluster" / "slurm.sh"
MANIFEST = EXAMPLES / "cluster" / "kuberay.yaml"
SCHEMA = Path(__file__).with_name("kuberay_rayjob.json")
"""The fields of KubeRay 1.7.0's custom resource definition that the manifest uses; it rejects other
fields."""
SRUN = """#!/usr/bin/env bash
echo "srun $*" >> "$CALLS"
while [[ $1 == --* ]]; do
    case $1 in --nodelist=*) node=${1#*=} ;; esac
    shift
done
"""
ON_HOST = 'exec ip netns exec "$node" "$@"\n'
RECORD = """case $1 in
hostname) echo "10.0.0.${node#node} fe80::1" ;;
ip) echo "2: $7 inet 10.9.0.${node#node}/24 brd 10.9.0.255 scope global $7" ;;
*) echo "token $RAY_AUTH_TOKEN mode $RAY_AUTH_MODE" >> "$CALLS" ;;
esac
"""
# Like the real python, this one waits for all nodes.
PYTHON = """#!/usr/bin/env bash
[ "$1" != -c ] || { echo abc; exit; }
echo "python $*" >> "$CALLS"
until [ "$(grep -c 'token abc' "$CALLS")" -ge 2 ] || [ "$SECONDS" -ge 20 ]; do sleep 0.05; done
case $* in *$FAILING*) exit 3 ;; esac
"""


def stand_in(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return file


def submit(
    folder: Path, nodes: list[str], *words: str, ahead: tuple[str, ...] = (), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the script as Slurm does on the first of these nodes."""
    stand_in(folder, "scontrol", "#!/usr/bin/env bash\nprintf '%s\\n' " + " ".join(nodes) + "\n")
    own = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "CALLS": str(folder / "calls"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "123456",
        "SLURM_JOB_NODELIST": "two",
        "FAILING": "nothing",
    }
    environment = {name: value for name, value in os.environ.items() if name[:4] != "RAY_"}
    return subprocess.run(
        [*ahead, "bash", str(SLURM), *words],
        env=environment | own | variables,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip


def recorded(folder: Path, **variables: str) -> tuple[int, list[str]]:
    """Return the exit code and the recorded commands, on stand-ins that start nothing."""
    stand_in(folder, "srun", SRUN + RECORD)
    python = stand_in(folder, "python", PYTHON)
    sizes = {"SLURM_CPUS_PER_TASK": "64", "SLURM_GPUS_ON_NODE": "8", "PYTHON": str(python)}
    done = submit(folder, ["node1", "node2"], "algorithm=grpo", **sizes | variables)
    return done.returncode, (folder / "calls").read_text("utf-8").splitlines()


def test_a_slurm_job_starts_ray_on_every_node_and_the_run_on_the_first(tmp_path: Path) -> None:
    code, calls = recorded(tmp_path)
    assert code == 0
    started = sorted(call.partition("/ray ")[2] for call in calls if "/ray start" in call)
    sizes = "--num-cpus=64 --num-gpus=8"
    assert started == [
        f"start --block --address=10.0.0.1:23456 --node-ip-address=10.0.0.2 {sizes} "
        "--disable-usage-stats",
        f"start --block --head --node-ip-address=10.0.0.1 --port=23456 {sizes} "
        "--include-dashboard=false --disable-usage-stats",
    ]
    for call in calls:
        if call.startswith("srun"):
            assert "--nodes=1 --ntasks=1 --nodelist=node" in call
            assert "--cpus-per-task=64 --overlap" in call
    assert calls.count("token abc mode token") == 2
    assert [call for call in calls if call.startswith("python")] == [
        "python examples/cluster/wait_for_nodes.py 10.0.0.1:23456 2 180",
        "python -m trainer.main_ppo ray.address=10.0.0.1:23456 trainer.nnodes=2 "
        "trainer.n_gpus_per_node=8 algorithm=grpo",
    ]


def test_ray_uses_the_addresses_of_the_interface_that_gloo_uses(tmp_path: Path) -> None:
    _, calls = recorded(tmp_path, GLOO_SOCKET_IFNAME="ib0")
    assert any("--node-ip-address=10.9.0.2" in call for call in calls)
    assert any("ray.address=10.9.0.1:23456" in call for call in calls)


@pytest.mark.parametrize(("failing", "ran"), [("wait_for_nodes", False), ("main_ppo", True)])
def test_the_job_has_the_exit_code_of_the_failed_command(
    failing: str, ran: bool, tmp_path: Path
) -> None:
    code, calls = recorded(tmp_path, FAILING=failing)
    assert code == 3
    assert any("main_ppo" in call for call in calls) == ran


def test_outside_of_slurm_the_script_prints_the_sbatch_command() -> None:
    done = subprocess.run(["bash", str(SLURM)], capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "sbatch examples/cluster/slurm.sh" in done.stderr


def test_the_script_uses_known_options_of_sbatch() -> None:
    options = re.findall(r"^#SBATCH --([\w-]+)", SLURM.read_text("utf-8"), re.M)
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"}
    assert set(options) <= known | {"exclusive", "time", "signal"}
    assert {"nodes", "gpus-per-node"} <= set(options)


def test_missing_nodes_are_counted_in_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = load("examples/cluster/wait_for_nodes.py")
    monkeypatch.setattr(waits, "num_nodes", lambda address: 1)
    with pytest.raises(SystemExit, match=r"1 of 2 nodes have joined Ray at h:1 within 0\.1 s"):
        waits.wait("h:1", 2, 0.1)


# -------------------------------------------------------------------------------- Kubernetes


@pytest.fixture(scope="module")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(MANIFEST.read_text("utf-8"))
    return loaded


def test_the_manifest_fits_kuberay_s_schema(manifest: dict[str, Any]) -> None:
    schema = json.loads(SCHEMA.read_text("utf-8"))
    jsonschema.Draft7Validator(schema).validate(manifest)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "entryPoint"], "x"),
        (["spec", "rayClusterSpec", "authOptions", "mode"], "password"),
        (["spec", "rayClusterSpec", "workerGroupSpecs", 0, "replicas"], "one"),
    ],
)
def test_the_schema_rejects_an_unknown_field_or_value(
    path: list[Any], value: str, manifest: dict[str, Any]
) -> None:
    wrong = json.loads(json.dumps(manifest))
    inner = wrong
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(json.loads(SCHEMA.read_text("utf-8"))).validate(wrong)


def test_the_run_of_the_manifest_fits_its_machines(
    manifest: dict[str, Any],
) -> None:
    spec = manifest["spec"]
    command, recipe, *settings = shlex.split(spec["entrypoint"])
    assert (command, recipe) == ("verl-like", "ppo")
    config = load_config(settings)
    nominal_placement(config)
    cluster = spec["rayClusterSpec"]
    groups = cluster["workerGroupSpecs"]
    assert config.trainer.nnodes == 1 + sum(group["replicas"] for group in groups)
    for each in (cluster["headGroupSpec"], *groups):
        (container,) = each["template"]["spec"]["containers"]
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == (
            config.trainer.n_gpus_per_node
        )
        mounts = {mount["name"] for mount in container["volumeMounts"]}
        assert mounts == {volume["name"] for volume in each["template"]["spec"]["volumes"]}
    for file in (config.trainer.default_local_dir, config.actor_rollout_ref.model.path):
        assert file.startswith("/shared/")


def test_the_cluster_that_stays_fits_kuberay_s_schema() -> None:
    cluster = yaml.safe_load((EXAMPLES / "cluster" / "raycluster.yaml").read_text("utf-8"))
    # KubeRay's RayJob has the spec of a RayCluster in it
    schema = json.loads(SCHEMA.read_text("utf-8"))["properties"]["spec"]["properties"]
    validator = jsonschema.Draft7Validator(schema["rayClusterSpec"])
    validator.validate(cluster["spec"])
    assert (cluster["apiVersion"], cluster["kind"]) == ("ray.io/v1", "RayCluster")
    with pytest.raises(jsonschema.ValidationError):
        validator.validate(cluster["spec"] | {"workers": 2})


def test_the_task_fits_skypilot_s_parser_and_names_known_keys() -> None:
    file = EXAMPLES / "cluster" / "skypilot.yaml"
    task = yaml.safe_load(file.read_text("utf-8"))
    _, _, recipe, *settings = shlex.split(task["run"])
    assert recipe == "ppo"
    known = {"$BUCKET": task["envs"]["BUCKET"], "$SKYPILOT_NUM_GPUS_PER_NODE": "8"}
    for name, value in known.items():
        settings = [setting.replace(name, value) for setting in settings]
    assert load_config(settings).trainer.default_local_dir.startswith("s3://")
    sky = pytest.importorskip("sky", reason="SkyPilot is not installed")
    sky.Task.from_yaml_config(task)


def test_the_image_has_ray_s_job_server() -> None:
    assert "ray[default]" in (ROOT / "docker" / "cuda.Dockerfile").read_text("utf-8")


# ---------------------------------------------------------------------------- two real hosts


def processes_of(addresses: tuple[str, ...]) -> list[str]:
    """Return the commands of processes that have such an address as an argument."""
    commands = []
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            commands.append(process.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if any(a in command for a in addresses)]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_on_two_hosts_that_share_only_a_network(tiny_dir: Path, tmp_path: Path) -> None:
    if reason := why_no_hosts():
        pytest.skip(f"this machine has no network namespaces to make: {reason}")
    stand_in(tmp_path, "srun", SRUN + ON_HOST)
    run = tmp_path / "run"
    # both hosts have ranks of the actor and of the rollout that they send weights to
    pools = (
        "resource_pool_spec={train_pool: [1, 1], rollout_pool: [1, 1]}",
        "role_mapping={actor: train_pool, critic: train_pool, ref: train_pool, "
        "rollout: rollout_pool}",
    )
    settings = overrides(tiny_dir, run, *pools, "trainer.device=cpu")
    with two_hosts() as hosts:
        done = submit(
            tmp_path, list(hosts), *settings,
            ahead=("ip", "netns", "exec", hosts[0]),
            PYTHON=sys.executable, SLURM_CPUS_PER_TASK="2", GLOO_SOCKET_IFNAME=CABLE,
            PYTHONPATH=str(ROOT),
        )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
    assert len(lines) == 3
    placement = (run / "placement.txt").read_text("utf-8")
    assert [placement.count(address) for address in ADDRESSES] == [2, 2]
    assert processes_of(ADDRESSES) == []
