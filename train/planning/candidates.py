"""The settings that a search may change in a run, as a value, and the run with these changes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from partitioning.hardware import OptionValue
from train.config import TrainConfig
from train.models.config import TransformerConfig
from train.models.pipeline import Pipeline
from train.models.remat import Remat
from train.objectives import TokenLoss
from train.planning.machines import Machine, move_to
from train.planning.presets import Layout, lay_out

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
      layout: the mesh and the rules.
      num_microbatches: the number of microbatches.
      remat: what the backward pass recomputes.
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

    Args:
      config: the settings of the run. They are not changed.
      candidate: the changes.
      machine: the machine.

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


def find_model_config(objective: Any) -> TransformerConfig | None:
    """Returns the settings of the built-in model of an objective, or None for other models."""
    model = getattr(objective, 'model', None)
    settings = getattr(model, 'config', None)
    known = isinstance(settings, TransformerConfig) and dataclasses.is_dataclass(model)
    return settings if known else None


def _defers_logits(objective: Any) -> bool:
    return isinstance(objective, TokenLoss) and find_model_config(objective) is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunSizes:
    """The sizes that layouts must divide, and which settings a run has.

    Attributes:
      num_devices: the number of devices of one slice.
      num_slices: the number of slices, over which the batch is divided.
      batch_size: the number of rows in the global batch.
      sequence_length: the number of tokens in a row, or None for other data.
      model: 'embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim', 'vocab_size' and 'num_layers' of
        the built-in model. Other models have none of them, and keep their layout and remat.
      axes: the names of the mesh axes of the run, which say whether it has a pipeline or divides
        its rows.
      output: the name of the objective, if it has the setting `output`.
      compiler_options: the run's setting.
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
    """Returns the sizes of a run.

    Args:
      config: the settings of the run.
      num_devices: the number of devices of the machine, in all slices.
      num_slices: the number of its slices.
    """
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
