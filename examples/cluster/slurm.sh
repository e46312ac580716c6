#!/usr/bin/env bash
#SBATCH --job-name=verl-like
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
# Run on the nodes of a Slurm job, with Ray on each node and the driver on the first. From the repository's root:
#   sbatch [--nodes=4 --gpus-per-node=4 ...] examples/cluster/slurm.sh key=value ...
# To look at the run: srun --jobid=JOB --overlap --pty bash
# Never run on a cluster of Slurm: CI runs it with stand-ins for srun and scontrol.
# PYTHON is an interpreter with this project. All nodes must see it, as well as the model, the data and the run folder.
# Five minutes before the time limit, the run writes a checkpoint and stops; the same command resumes from there.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?it is for sbatch: sbatch examples/cluster/slurm.sh key=value ...}"
source examples/stoppable.sh
py=${PYTHON:-$PWD/.venv/bin/python}
ray=$(dirname "$py")/ray
cpus=${SLURM_CPUS_PER_TASK:-1}
gpus=${SLURM_GPUS_ON_NODE:-0}
wait_s=${WAIT_S:-180} # for all nodes

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on() { # NODE COMMAND: runs COMMAND on NODE. Call it in a subshell, which srun replaces, so that signals reach the node.
    local node=$1
    shift
    # --overlap: the driver is in the same allocation
    exec srun --nodes=1 --ntasks=1 --nodelist="$node" --cpus-per-task="$cpus" --overlap "$@"
}

# Ray accepts only connections with the token. The port depends on the job, because several jobs can share a node.
RAY_AUTH_TOKEN=$("$py" -c 'import secrets; print(secrets.token_hex(32))')
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
address_of() { # NODE: its first address, or the address of the interface GLOO_SOCKET_IFNAME
    local dev=${GLOO_SOCKET_IFNAME:-}
    { if [ -n "$dev" ]; then on "$1" ip -4 -o address show dev "$dev"; else on "$1" hostname -I; fi; } |
        grep -oE '([0-9]+\.){3}[0-9]+' | head -n 1
}
head=$(address_of "${nodes[0]}")
address=$head:$((20000 + SLURM_JOB_ID % 10000))

trap 'jobs -p | xargs -r kill 2>/dev/null || true' EXIT
on "${nodes[0]}" "$ray" start --block --head --node-ip-address="$head" --port="${address##*:}" \
    --num-cpus="$cpus" --num-gpus="$gpus" --include-dashboard=false --disable-usage-stats &
for node in "${nodes[@]:1}"; do
    on "$node" "$ray" start --block --address="$address" --node-ip-address="$(address_of "$node")" \
        --num-cpus="$cpus" --num-gpus="$gpus" --disable-usage-stats &
done
"$py" examples/cluster/wait_for_nodes.py "$address" "${#nodes[@]}" "$wait_s"

code=0
stoppable "$py" -m trainer.main_ppo ray.address="$address" trainer.nnodes="${#nodes[@]}" \
    trainer.n_gpus_per_node="$((gpus > 0 ? gpus : cpus))" "$@" || code=$?
exit "$code"
