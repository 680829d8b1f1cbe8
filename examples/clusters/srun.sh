#!/usr/bin/env bash
# srun --ntasks 2 --kill-on-bad-exit examples/clusters/srun.sh python examples/clusters/train.py
#
# srun starts one process per rank, without torchrun. It does not set the variables that torch.distributed reads.
export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=${MASTER_PORT:-29500}
exec "$@"
