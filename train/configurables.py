"""Registers everything that gin files may name: the trainer's classes, partitioning and optax.

`partitioning` does not import gin, so its names are registered here.
"""

from __future__ import annotations

import gin
import optax

import partitioning
import partitioning.mesh
import train.data.feed
import train.data.rows.tasks
import train.data.text.record_files
import train.data.text.sources
import train.data.text.tokenizers
import train.evaluation
import train.machine
import train.models.transformer
import train.optimizers
import train.sampling
import train.schedules
import train.train  # noqa: F401  # Importing these modules registers their configurables.

for _name in (
    'MoePjitPartitioner',
    'PjitPartitioner',
    'fsdp_logical_axis_rules',
    'standard_logical_axis_rules',
):
    gin.external_configurable(getattr(partitioning, _name), module='partitioning')
gin.external_configurable(partitioning.mesh.MeshConfig, module='partitioning')
gin.external_configurable(partitioning.Plan.load, name='load_plan', module='partitioning.plan')

for _name in (
    *('adabelief', 'adadelta', 'adafactor', 'adagrad', 'adam', 'adamax', 'adamaxw', 'adamw'),
    *('adan', 'amsgrad', 'lamb', 'lars', 'lion', 'noisy_sgd', 'novograd', 'radam', 'rmsprop'),
    *('sgd', 'sign_sgd', 'sm3', 'yogi'),
):
    gin.external_configurable(getattr(optax, _name), module='optax')
