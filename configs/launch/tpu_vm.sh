#!/usr/bin/env bash
# Trains on all hosts of a Cloud TPU VM. It takes the arguments of `meshwright train`:
#
#   TPU=my-pod ZONE=us-east5-a ./tpu_vm.sh pretrain configs/models/8b.gin \
#     --gin.TEXT='gs://bucket/corpus/*.zst' --gin.MODEL_DIR=gs://bucket/runs/8b
#
# For checkpoints in the memory of the hosts, from which a run resumes after the loss of a process:
#
#   --gin.CheckpointConfig.local_dir=/dev/shm/meshwright --gin.CheckpointConfig.local_every=50
#
# TPU       the name of the TPU VM
# ZONE      its zone
# PROGRAM   the command on the hosts, such as .venv/bin/meshwright (meshwright)
# RESTARTS  how often an interrupted run is started again (10)
set -euo pipefail
# By this secret the processes know each other.
secret=one-run-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
printf -v command '%q ' env "MESHWRIGHT_SECRET=$secret" \
  "${PROGRAM:-meshwright}" train "$@" --multihost
for ((restarts = ${RESTARTS:-10}; ; restarts--)); do
  code=0
  # It ends with the first exit code of a host that is not 0.
  gcloud compute tpus tpu-vm ssh "${TPU:?}" --zone="${ZONE:?}" --worker=all --command="$command" ||
    code=$?
  if ((code != 75 || restarts == 0)); then exit "$code"; fi # 75: stopped with work left
done
