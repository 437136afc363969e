#!/usr/bin/env bash
# A job over several hosts under SLURM: sbatch examples/cluster.sh
#SBATCH --nodes=2 --ntasks-per-node=8 --gpus-per-node=8 --requeue --signal=TERM@120
set -euo pipefail
# The interface that connects the hosts. gloo groups use it for CPU tensors and checkpoints, NCCL for its first
# connections. `ip addr` lists the interfaces of a host.
export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-ib0} NCCL_SOCKET_IFNAME=${NCCL_SOCKET_IFNAME:-ib0}
# One process for each task. srun sets the rank; namedmesh derives the first host and a port from the job.
srun python -m namedmesh doctor "dp=-1,tp=8" --timeout 60
srun --kill-on-bad-exit=1 python examples/train.py --tp 8 --checkpoint /shared/checkpoints --save-every 100
