#!/usr/bin/env bash
# mpirun -n 2 examples/clusters/mpi.sh python examples/clusters/train.py
#
# mpirun starts the processes, but does not set the variables that torch.distributed reads. With several hosts, set
# MASTER_ADDR to the first one. mpirun does not start a job again after a failure.
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK
export MASTER_ADDR=${MASTER_ADDR:-127.0.0.1} MASTER_PORT=${MASTER_PORT:-29500}
exec "$@"
