#!/usr/bin/env bash
# Trains on TPU slices of a GKE cluster that XPK manages. It takes the arguments of
# `meshwright train`:
#
#   CLUSTER=mine WORKLOAD=llm-8b TPU_TYPE=v5p-128 IMAGE=gcr.io/project/meshwright \
#     ./xpk.sh pretrain configs/models/8b.gin \
#     --gin.TEXT='gs://bucket/corpus/*.zst' --gin.MODEL_DIR=gs://bucket/runs/8b
#
# CLUSTER   the cluster
# WORKLOAD  a new name for this run
# TPU_TYPE  the type of a slice
# SLICES    the number of slices (1)
# IMAGE     a container image in which meshwright[train,gcs] and jax[tpu] are installed
# RESTARTS  how often an interrupted run is started again (10)
set -euo pipefail
# By this secret the processes know each other.
secret=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
printf -v command '%q ' env "MESHWRIGHT_SECRET=$secret" \
  meshwright train "$@" --multihost --init_seconds=600
# 75: stopped with work left. XPK starts again after 127 to 255 (a killed process) by itself.
xpk workload create --cluster="${CLUSTER:?}" --workload="${WORKLOAD:?}" \
  --tpu-type="${TPU_TYPE:?}" --num-slices="${SLICES:-1}" --docker-image="${IMAGE:?}" \
  --max-restarts="${RESTARTS:-10}" --restart-on-exit-codes=75 \
  --termination-grace-period-seconds=120 --command="$command"
