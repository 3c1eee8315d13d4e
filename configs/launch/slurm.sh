#!/usr/bin/env bash
# Trains on GPUs under Slurm, with one process per node. The arguments are the
# arguments of `meshwright train`; options of sbatch replace the lines below:
#
#   sbatch --nodes=4 --time=24:00:00 slurm.sh pretrain configs/models/8b.gin \
#     --gin.TEXT='/shared/corpus/*.zst' --gin.MODEL_DIR=/shared/runs/8b
#
# For checkpoints on the disks of the nodes, from which the run resumes after the loss of one, set
# CheckpointConfig.local_every, and local_dir to a folder that Slurm does not empty between jobs.
#
# PROGRAM   the command on the nodes, such as .venv/bin/meshwright (meshwright)
# RESTARTS  how often an interrupted run is put back into the queue (10)
#SBATCH --job-name=meshwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@120
set -uo pipefail
code=0
# By this secret the processes know each other; srun passes it on.
MESHWRIGHT_SECRET=one-run-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
export MESHWRIGHT_SECRET
# The processes end each other. srun must not kill those that still save.
srun --kill-on-bad-exit=0 "${PROGRAM:-meshwright}" train "$@" --multihost || code=$?
# 75: stopped with work left. srun ends with the highest code: 137 if a process was killed.
if ((code == 75 || code == 137)) && ((${SLURM_RESTART_COUNT:-0} < ${RESTARTS:-10})); then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
