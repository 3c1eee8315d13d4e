"""A train step for a described machine, with all settings that the compiler sees."""

from __future__ import annotations

import dataclasses
import functools
import math

import optax

from partitioning import MeshConfig, PjitPartitioner
from train.config import TrainConfig
from train.data import RandomTokens
from train.models.transformer import Transformer, TransformerConfig
from train.objectives import NextToken
from train.optimizers import Optimizer, decay_matrices_only
from train.output_layer import OutputSettings

# Sizes of mesh axes by name, in ascending order of traffic.
Axes = tuple[tuple[str, int], ...]
Rules = tuple[tuple[str, str | tuple[str, ...] | None], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A train step for a described machine. Equal programs compile to the same text.

    Attributes:
      output_chunks: the parts into which the vocabulary of the output layer is divided. None takes
        as many as keep the logits small.
      topology: one slice of the machine, or the hosts of a machine with GPUs.
      axes: the size of each mesh axis within a slice, or on GPUs within a host.
      dcn: the size of each mesh axis over slices or hosts.
      batch_size: the global batch, in sequences.
      sequence_length: the tokens of a sequence.
      num_microbatches: the parts of a batch whose gradients are summed.
      mu_dtype: the dtype of the optimizer's first moment.
      compiler_options: options that differ from the defaults of the chip; None removes one.
    """

    model: TransformerConfig
    output_chunks: int | None
    topology: str
    num_slices: int
    axes: Axes
    dcn: Axes
    rules: Rules
    batch_size: int
    sequence_length: int
    num_microbatches: int = 1
    mu_dtype: str = 'float32'
    compiler_options: tuple[tuple[str, int | None], ...] = ()

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The size of each axis of the whole mesh."""
        over = dict(self.dcn)
        return {name: size * over.get(name, 1) for name, size in self.axes}

    @property
    def num_devices(self) -> int:
        """The number of devices."""
        return math.prod(self.mesh_sizes.values())

    def mesh(self) -> MeshConfig:
        """Returns the mesh of described devices."""
        return MeshConfig(
            axes=self.axes,
            dcn=self.dcn or None,
            topology=self.topology,
            num_slices=self.num_slices,
            process_is_granule=True if self.dcn and self.topology[0] not in 'vt' else None,
        )

    def train_config(self) -> TrainConfig:
        """Returns the settings of a run that has this train step. Nothing is trained."""
        adamw = functools.partial(
            optax.adamw,
            b1=0.9,
            b2=0.95,
            weight_decay=0.1,
            mu_dtype=self.mu_dtype,
            mask=decay_matrices_only,
        )
        output = OutputSettings(num_chunks=self.output_chunks, logits_dtype='bfloat16')
        return TrainConfig(
            model_dir='build/forecast_truth/run',
            objective=NextToken(model=Transformer(self.model), output=output),
            partitioner=PjitPartitioner(mesh=self.mesh(), logical_axis_rules=self.rules),
            optimizer=Optimizer(transform=adamw, learning_rate=1e-4),
            task=RandomTokens(vocab_size=self.model.vocab_size),
            total_steps=1,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            num_microbatches=self.num_microbatches,
            evaluators={},
            compiler_options=dict(self.compiler_options) or 'auto',
            compilation_cache=None,
        )

    def with_slices(self, num_slices: int) -> Program:
        """Returns the program on another number of slices or hosts, with the same work per device.

        Only the number of the copies of the model over the slower network differs, and with it the
        global batch. The mesh must have the axis 'data', and no other, over slices or hosts.
        """
        over, count = dict(self.dcn), self.num_copies
        hosts, _, per_host = self.topology.partition(':')[2].partition('x')
        on_gpus = self.num_slices == 1 and count == int(hosts)
        return dataclasses.replace(
            self,
            topology=f'{self.topology.partition(":")[0]}:{num_slices}x{per_host}'
            if on_gpus
            else self.topology,
            num_slices=1 if on_gpus else num_slices,
            dcn=tuple((over | {'data': num_slices}).items()),
            batch_size=self.batch_size // count * num_slices,
        )

    @property
    def num_copies(self) -> int:
        """The number of copies of the model over the slower network; 1 if it divides the model."""
        over = dict(self.dcn)
        return over['data'] if math.prod(over.values()) == over.get('data') else 1
