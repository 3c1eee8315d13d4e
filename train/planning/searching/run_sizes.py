"""What a run and a machine decide about the candidates of a search."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from partitioning.hardware import OptionValue
from train.config import TrainConfig
from train.models.config import TransformerConfig
from train.objectives import TokenLoss


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


_SIZES = ('embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim', 'vocab_size', 'num_layers')


def sizes_of(config: TrainConfig, num_devices: int, num_slices: int = 1) -> RunSizes:
    """Returns the sizes of a run.

    Args:
      config: the settings of the run.
      num_devices: the number of devices of the machine, in all slices.
      num_slices: the number of its slices.
    """
    objective: Any = config.objective
    settings = getattr(getattr(objective, 'model', None), 'config', None)
    model: dict[str, int] = {}
    if isinstance(settings, TransformerConfig):
        model = {name: getattr(settings, name) for name in _SIZES}
    length = config.sequence_length
    defers = isinstance(objective, TokenLoss) and bool(model)
    return RunSizes(
        num_devices=num_devices // num_slices,
        num_slices=num_slices,
        batch_size=config.batch_size,
        sequence_length=length if isinstance(length, int) else None,
        model=model,
        axes=tuple(map(str, config.partitioner.mesh.axis_names)),
        output=type(objective).__name__ if defers else None,
        compiler_options=config.compiler_options,
    )
