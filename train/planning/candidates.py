"""What a search may change in a run, the run with these changes, and its sizes and least memory."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp

from partitioning.hardware import OptionValue
from train.config import TrainConfig
from train.models.config import TransformerConfig
from train.models.pipeline import Pipeline
from train.models.remat import Remat
from train.objectives import TokenLoss
from train.planning.machines import Machine, move_to
from train.planning.presets import Layout, lay_out
from train.running.rematerialization import find_model_config

# What the backward pass keeps: a word of TransformerConfig.remat, or 'offload': only the inputs of
# the layers, in the memory of the host.
RematChoice = Literal['none', 'dots', 'full', 'offload']

_PIPELINED = 8  # the microbatches of a pipeline, if the run has none
# The sizes of the built-in model that a layout can divide.
_SIZES = ('embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim', 'vocab_size', 'num_layers')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """Changes of a run. None leaves a setting as the run has it.

    Attributes:
      output_chunks: the number of chunks of the vocabulary in the output layer.
      compiler_options: options of the compiler in addition to the options of the run; None removes
        one.
    """

    layout: Layout
    num_microbatches: int | None = None
    remat: RematChoice | None = None
    output_chunks: int | None = None
    compiler_options: tuple[tuple[str, OptionValue | None], ...] = ()

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.remat:
            parts.append(f'remat {self.remat}')
        if self.num_microbatches and self.num_microbatches > 1:
            parts.append(f'{self.num_microbatches} microbatches')
        if self.output_chunks:
            parts.append(f'{self.output_chunks} output chunk{"s" * (self.output_chunks > 1)}')
        parts += [f'{name}={value}' for name, value in self.compiler_options]
        return ', '.join(parts)

    @property
    def features(self) -> tuple[str, ...]:
        """Its settings as words, which candidates with a setting in common share."""
        return (
            f'layout {self.layout}',
            f'preset {self.layout.preset}',
            f'remat {self.remat}',
            f'microbatches {self.num_microbatches}',
            f'chunks {self.output_chunks}',
            f'options {self.compiler_options}',
        )

    @property
    def program(self) -> Candidate:
        """The same without compiler options, which do not change the function that is traced."""
        return dataclasses.replace(self, compiler_options=())


def change_run(config: TrainConfig, candidate: Candidate, machine: Machine) -> TrainConfig:
    """Returns the settings of a run with the changes of a candidate, on a machine.

    Raises:
      ConfigError, ValueError: if the settings are not possible there.
    """
    changes: dict[str, Any] = {'objective': _change_objective(config.objective, candidate)}
    if candidate.layout.preset:
        changes['partitioner'] = lay_out(config.partitioner, candidate.layout)
    if candidate.num_microbatches is not None:
        changes['num_microbatches'] = candidate.num_microbatches
        if candidate.num_microbatches == 1:  # nothing is summed
            changes['accumulation_dtype'] = 'float32'
    if candidate.compiler_options:
        changes['compiler_options'] = join_options(config.compiler_options, candidate)
    return move_to(config, machine, **changes)


def _change_objective(objective: Any, candidate: Candidate) -> Any:
    """The objective with the changes of a candidate in its model and in its output layer."""
    model, changes = find_model_config(objective), dict[str, Any]()
    if model is not None:
        settings: dict[str, Any] = {}
        if candidate.remat is not None:
            offloading = candidate.remat == 'offload'
            settings['remat'] = Remat(offload=('residual',)) if offloading else candidate.remat
        if candidate.layout.preset == 'pipeline':
            old = model.pipeline
            kept = {} if old is None else {'recompute_stages': old.recompute_stages}
            settings['pipeline'] = Pipeline(num_microbatches=_PIPELINED, **kept)
        elif candidate.layout.preset:
            settings['pipeline'] = None
        if settings:
            model = dataclasses.replace(model, **settings)
            changes['model'] = dataclasses.replace(objective.model, config=model)
    if candidate.output_chunks is not None and _defers_logits(objective):
        output = dataclasses.replace(objective.output, num_chunks=candidate.output_chunks)
        changes['output'] = output
    return dataclasses.replace(objective, **changes) if changes else objective


def join_options(
    options: Mapping[str, OptionValue | None] | str, candidate: Candidate
) -> dict[str, OptionValue | None]:
    """Returns the compiler options of a run with those that a candidate adds or removes."""
    own = {} if isinstance(options, str) else dict(options)
    return own | dict(candidate.compiler_options)


def _defers_logits(objective: Any) -> bool:
    return isinstance(objective, TokenLoss) and find_model_config(objective) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes that layouts must divide, and which settings a run has.

    Attributes:
      num_devices: the number of devices of one slice.
      num_slices: the number of slices, over which the batch is divided.
      sequence_length: the number of tokens in a row, or None for other data.
      model: 'embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim', 'vocab_size' and 'num_layers' of
        the built-in model. Other models have none of them, and keep their layout and remat.
      axes: the names of the mesh axes of the run, which say whether it has a pipeline or divides
        its rows.
      output: the name of the objective, if it has the setting `output`.
    """

    num_devices: int
    num_slices: int = 1
    batch_size: int
    sequence_length: int | None = None
    model: Mapping[str, int] = dataclasses.field(default_factory=dict)
    axes: tuple[str, ...] = ('data', 'model')
    output: str | None = None
    compiler_options: Mapping[str, OptionValue | None] | str = 'auto'


def sizes_of(config: TrainConfig, num_devices: int, num_slices: int = 1) -> RunSizes:
    """Returns the sizes of a run on a machine with a number of devices, in all slices."""
    model, length = find_model_config(config.objective), config.sequence_length
    return RunSizes(
        num_devices=num_devices // num_slices,
        num_slices=num_slices,
        batch_size=config.batch_size,
        sequence_length=length if isinstance(length, int) else None,
        model={} if model is None else {name: getattr(model, name) for name in _SIZES},
        axes=tuple(map(str, config.partitioner.mesh.axis_names)),
        output=type(config.objective).__name__ if _defers_logits(config.objective) else None,
        compiler_options=config.compiler_options,
    )


# The least that a parameter needs: itself and two moments of AdamW in float32, and its gradient in
# bfloat16. With microbatches, the sum of the gradients is in float32, and what is added to it may
# be, too.
_STATE, _GRADIENT, _SUM = 12, 2, 4
_ELEMENT = 2  # bytes of an activation in bfloat16


def bytes_of_parameters(num_microbatches: int) -> int:
    """The least bytes that each parameter needs in a step, with its moments and its gradient."""
    return _STATE + _GRADIENT + (_SUM if num_microbatches > 1 else 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A run, and what decides the memory that it needs."""

    config: TrainConfig
    num_parameters: int

    @classmethod
    def of_run(cls, config: TrainConfig) -> Workload:
        """Returns the workload of a run, whose parameters it counts."""
        row = config.task.blank_row(config.sequence_length)
        batch = {name: jnp.zeros((1, *x.shape), x.dtype) for name, x in row.items()}
        made = jax.eval_shape(config.objective.init, jax.random.key(0), batch)
        count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(made['params']))
        return cls(config=config, num_parameters=count)

    @property
    def model(self) -> TransformerConfig | None:
        """The settings of the model, if it is the built-in one."""
        return find_model_config(self.config.objective)

    @property
    def row_tokens(self) -> int:
        """The number of tokens in a row; for an encoder and a decoder, of the inputs."""
        length: Any = self.config.sequence_length
        return length['inputs'] if isinstance(length, dict) else length or 1

    @property
    def batch_tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.config.batch_size * self.row_tokens

    def sizes_on(self, machine: Machine) -> RunSizes:
        """The sizes that a layout must divide on a machine."""
        return sizes_of(self.config, machine.num_devices, machine.num_slices)

    def least_peak(
        self, sizes: RunSizes, num_microbatches: int, *, keeps_products: bool = False
    ) -> float:
        """Returns a lower bound on the memory of a device, in bytes, for all layouts.

        It has the state, the gradients, and what each layer keeps of each token, divided evenly.

        Args:
          keeps_products: whether the backward pass finds the results of products, which it
            otherwise computes again from the inputs of the layers.
        """
        state = self.num_parameters * bytes_of_parameters(num_microbatches) / sizes.num_devices
        if self.model is None:
            return state
        width = self.model.embed_dim
        if keeps_products:
            width += self.model.mlp_dim * (2 if self.model.gated_mlp else 1)
        tokens = self.batch_tokens / (sizes.num_devices * sizes.num_slices * num_microbatches)
        return state + _ELEMENT * self.model.num_layers * tokens * width

    def expected_peak(
        self, num_devices: int, num_microbatches: int, bytes_of_batch: float
    ) -> float:
        """Returns about how much memory a device needs, in bytes.

        Args:
          bytes_of_batch: what a device needs for its part of a batch without microbatches.
        """
        fixed = self.bytes_of_state(num_devices, num_microbatches)
        return fixed + bytes_of_batch / num_microbatches

    def bytes_of_batch(self, num_devices: int, num_microbatches: int, peak: int) -> float:
        """Returns what a device would need for its part of a batch without microbatches, in bytes.

        The run with a number of microbatches has the peak `peak`, in bytes.
        """
        of_batch = peak - self.bytes_of_state(num_devices, num_microbatches)
        return max(of_batch, 0.0) * num_microbatches

    def bytes_of_state(self, num_devices: int, num_microbatches: int) -> float:
        """Returns what a device needs for any batch: the state and the gradients, in bytes."""
        gradient = 2 * _SUM if num_microbatches > 1 else _GRADIENT
        return self.num_parameters * (_STATE + gradient) / num_devices
