"""The choice of what layers keep for the backward pass, by the memory of the devices.

`TransformerConfig.remat = 'auto'` becomes a `Remat` when a run is planned: the one that keeps the
most of those whose memory, by a formula, is within a share of what a device has. The formula has
only the sizes of the run and of the machine, so that all processes and all starts choose the same.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.sharding import AbstractMesh

from partitioning import Plan
from partitioning.amounts import bytes_str
from partitioning.hardware import chip_of
from partitioning.rules import LogicalAxisRules, num_shards, resolve_axes
from train.config import TrainConfig
from train.models.config import TransformerConfig
from train.models.remat import Remat
from train.models.residual import LENGTHS

# What is kept, the least first. All products with parameters cost as many FLOPs for each byte that
# they return; the results of attention cost more.
_FULL = Remat()
_CHOICES = (
    _FULL,
    Remat(save=('attended',)),
    Remat(save=('attended', 'query', 'key', 'value', 'attention_out')),
    Remat(save=('dots', 'attended')),
)
# The formula is not exact, and jax gives programs 75% of the memory of a GPU by default.
_USABLE = 0.75
_IN_FLIGHT = 3  # the arrays of one layer: values, gradients, and what is made of them
_LOGITS = 3 * 2**28  # a chunk of the vocabulary in float32, its exponentials and its gradient


def find_model_config(objective: Any) -> TransformerConfig | None:
    """Returns the settings of the built-in model of an objective, or None for other models."""
    model = getattr(objective, 'model', None)
    settings = getattr(model, 'config', None)
    known = isinstance(settings, TransformerConfig) and dataclasses.is_dataclass(model)
    return settings if known else None


def choose_remat(config: TrainConfig, plan: Plan) -> tuple[TrainConfig, str]:
    """Returns the settings of a run with a `Remat` in the place of 'auto', and why it is that one.

    The reason is one line for people; '' if the model does not have 'auto'.
    """
    model = find_model_config(config.objective)
    if model is None or model.remat != 'auto':
        return config, ''
    chosen, reason = _choose(config, model, plan)
    objective: Any = config.objective
    changed = dataclasses.replace(objective.model, config=dataclasses.replace(model, remat=chosen))
    objective = dataclasses.replace(objective, model=changed)
    kept = ', '.join(chosen.save) or 'only the inputs of layers'
    return dataclasses.replace(config, objective=objective), f'remat auto keeps {kept}: {reason}'


def _choose(config: TrainConfig, model: TransformerConfig, plan: Plan) -> tuple[Remat, str]:
    mesh = config.partitioner.mesh
    kind = 'abstract' if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].device_kind
    chip = chip_of(kind)
    if chip is None:
        return _FULL, f'the memory of {kind} devices is not known'
    if model.pipeline is not None:
        return _FULL, 'every microbatch of a pipeline would keep more'
    if not isinstance(config.sequence_length, int):
        return _FULL, 'rows do not have one length'
    sizes = _sizes_of_layer(config, model, config.sequence_length)
    rules, rows = config.partitioner.logical_axis_rules, config.batch_size
    # Axes that shard rows gather parameters, and axes that shard only hidden layers do not.
    tensor = _num_shards(('batch', 'mlp'), rules, mesh, (rows, model.mlp_dim))
    tensor //= _num_shards(('batch',), rules, mesh, (rows,))
    best, needed = _FULL, 0.0
    for choice in _CHOICES:
        peak = _peak(model, plan, sizes, tensor, choice)
        if choice is _FULL or peak <= _USABLE * chip.hbm_bytes_per_device:
            best, needed = choice, peak
    return best, (
        f'by formula, a device needs at most {bytes_str(int(needed))} of its '
        f'{bytes_str(chip.hbm_bytes_per_device)}, of which {_USABLE:.0%} may be used'
    )


def _peak(
    model: TransformerConfig, plan: Plan, sizes: Mapping[str, float], tensor: int, keep: Remat
) -> float:
    """The memory of a device at its fullest, in bytes; above what compilers need.

    It has the state; the gradients, and the parameters in the dtype of the computation; what all
    layers keep; one layer at work, with its gathered parameters; and the output layer. `tensor`
    devices share what is gathered.
    """
    itemsize = jnp.dtype(model.dtype).itemsize
    parameters = [row for row in plan.rows if row.role == 'parameters']
    held = sum(row.bytes_per_device for row in parameters)
    whole = sum(math.prod(row.shape) for row in parameters) * itemsize
    words = model.vocab_size * model.embed_dim * itemsize
    layer = (whole - words * (1 if model.tie_embeddings else 2)) / model.num_layers
    names = {name for name in keep.save if name in sizes} | {'residual'}
    if 'dots' in keep.save:
        names |= {*sizes}
    kept = model.num_layers * sum(sizes[name] for name in names)
    working = _IN_FLIGHT * sum(sizes.values()) + 2 * (layer + words) / tensor + _LOGITS
    return plan.bytes_per_device + held * (1 + itemsize / 4) + kept + working


def _sizes_of_layer(config: TrainConfig, model: TransformerConfig, length: int) -> dict[str, float]:
    """The bytes of each named array of a layer on a device, for rows of a length."""
    mesh, rules = config.partitioner.mesh, config.partitioner.logical_axis_rules
    rows = config.batch_size // config.num_microbatches
    known = {name for name, _ in rules}
    lengths = {name: name if name in known else 'length' for name in LENGTHS}

    def nbytes(which: str, name: str, width: int) -> float:
        names, shape = ('batch', lengths[which], name), (rows, length, width)
        shards = _num_shards(names, rules, mesh, shape)
        return math.prod(shape) * jnp.dtype(model.dtype).itemsize / shards

    heads, kv_heads = (
        nbytes('length', name, number)
        for name, number in (('heads', model.num_heads), (model.kv_heads_axis, model.num_kv_heads))
    )
    residual = nbytes('residual_length', 'embed', model.embed_dim)
    sizes = dict.fromkeys(('residual', 'attention_out', 'mlp_out'), residual)
    sizes |= dict.fromkeys(('query', 'attended'), heads * model.head_dim)
    sizes |= dict.fromkeys(('key', 'value'), kv_heads * model.head_dim)
    parts = ('mlp_gate', 'mlp_up') if model.gated_mlp else ('mlp_up',)
    if model.experts is None:
        return sizes | dict.fromkeys(parts, nbytes('length', 'mlp', model.mlp_dim))
    # The buffers of a device have room for all choices of the tokens of all that share the experts.
    experts = model.experts
    choices = experts.num_selected_experts * _num_shards(
        ('expert',), rules, mesh, (experts.num_experts,)
    )
    sizes |= dict.fromkeys(parts, choices * nbytes('length', 'expert_mlp', model.mlp_dim))
    return sizes | {'mlp_out': choices * nbytes('length', 'embed', model.embed_dim)}


def _num_shards(
    names: Sequence[str], rules: LogicalAxisRules, mesh: Any, shape: Sequence[int]
) -> int:
    """The number of devices that share an array."""
    found = resolve_axes(
        names,
        rules,
        mesh=mesh,
        shape=shape,
        on_unmatched='replicate',
        on_indivisible='replicate',
    )
    return math.prod(num_shards(dimension.mesh_axes, mesh) for dimension in found)
