#!/usr/bin/env bash
#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-node=4
# Train on the job's first node, and sample completions on four one-GPU servers on its second node. The key and the run's
# folder must be on a file system that both nodes see; with --rollout.server_transfer http only the key must be. Not run on
# GPUs yet.
set -euo pipefail
NODES=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))
(umask 077; openssl rand -hex 32 > key)
srun --nodes 1 --nodelist ${NODES[1]} qarl serve-rollouts --config run.yaml --replicas 4 --host 0.0.0.0 --key-file key &
URLS=$(printf "http://${NODES[1]}:%s," 8100 8101 8102 8103)
for URL in ${URLS//,/ }; do until curl -sf $URL/health; do sleep 5; done; done
srun --nodes 1 --nodelist ${NODES[0]} torchrun --nproc-per-node 4 -m qarl train --config run.yaml --output /shared/run \
    --rollout.servers ${URLS%,} --rollout.server_key_file key
