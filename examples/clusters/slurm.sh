#!/usr/bin/env bash
# sbatch --nodes 2 examples/clusters/slurm.sh train.py
#
# One torchrun a host, which starts a rank for each GPU, or RANKS of them, and ends them all when one fails; the hosts
# meet at the first one. --requeue lets SLURM begin again after a host is lost: then the script loads its checkpoint.
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit --cpus-per-task "${SLURM_CPUS_ON_NODE:-1}" \
    torchrun --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${RANKS:-gpu}" --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" "$@"
