"""What is to be trained: a model, a batch, and the gin file that says so."""

from __future__ import annotations

import dataclasses
import math
import re

from etils import epath

from partitioning.hardware import parse_topology
from train.errors import ConfigError, check_counts
from train.models.config import TransformerConfig
from train.planning.fitting.models import FoundModel
from train.planning.fitting.run_file import write_run
from train.planning.forecasting import Machine
from train.planning.searching import RunSizes
from train.planning.searching.predicting import Source

DEFAULTS = 'configs/forecasting/defaults.gin'
_MOST_TOKENS = 4096  # in a row, unless the user says otherwise
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20}
_SIZES = ('embed_dim', 'num_heads', 'num_kv_heads', 'mlp_dim', 'vocab_size', 'num_layers')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is to be trained.

    Attributes:
      model: the model.
      batch_size: the number of rows in a batch.
      sequence_length: the number of tokens in a row; for an encoder and a decoder, of the inputs.
      folder: a folder for gin files.
    """

    model: FoundModel
    batch_size: int
    sequence_length: int
    folder: epath.Path

    @property
    def batch_tokens(self) -> int:
        """The number of tokens in a batch."""
        return self.batch_size * self.sequence_length

    @property
    def source(self) -> Source:
        """The gin settings of the run, without a layout."""
        file = self.folder / 'model.gin'
        if not file.exists():
            file.write_text(self.text)
        return Source(files=[str(file)], defaults=[DEFAULTS])

    @property
    def text(self) -> str:
        """The gin file of the run, without a layout."""
        return write_run(
            self.model, batch_size=self.batch_size, sequence_length=self.sequence_length
        )

    def sizes_on(self, machine: Machine) -> RunSizes:
        """The sizes that a layout must divide on a machine."""
        chip, shape = parse_topology(machine.topology)
        return self.sizes_of(math.prod(shape) * chip.devices, machine.num_slices)

    def sizes_of(self, num_devices: int, num_slices: int = 1) -> RunSizes:
        """The sizes that a layout must divide on slices with a number of devices each."""
        config = self.model.config
        decoder = isinstance(config, TransformerConfig)
        return RunSizes(
            num_devices=num_devices,
            num_slices=num_slices,
            batch_size=self.batch_size,
            sequence_length=self.sequence_length,
            model={name: getattr(config, name) for name in _SIZES} if decoder else {},
            output='NextToken' if decoder else None,
        )


def make_task(
    model: FoundModel, batch_tokens: int, sequence_length: int | None, folder: epath.Path
) -> Task:
    """Returns the task of training a model with batches of a number of tokens.

    Args:
      model: the model.
      batch_tokens: the number of tokens in a batch, a multiple of the length of a row.
      sequence_length: the length of a row, by default what the model was made for, up to 4096.
      folder: a folder for gin files.

    Raises:
      ConfigError: if no whole number of rows makes the batch, or if the model cannot read the rows.
    """
    if sequence_length is not None:
        check_counts(**{'--sequence_length': sequence_length})
    length = sequence_length or min(model.max_length or _MOST_TOKENS, _MOST_TOKENS)
    config = model.config
    if isinstance(config, TransformerConfig) and 0 < config.max_positions < length:
        raise ConfigError(
            f'--sequence_length={length}, but the {model.kind} has {config.max_positions} '
            f'positions: use {config.max_positions} or less'
        )
    if batch_tokens % length:
        rows = max(1, round(batch_tokens / length))
        raise ConfigError(
            f'--batch_tokens={batch_tokens} is not a multiple of the {length} tokens of a row: '
            f'write {rows * length}, which are {rows} rows, or another --sequence_length'
        )
    return Task(
        model=model, batch_size=batch_tokens // length, sequence_length=length, folder=folder
    )


def parse_tokens(text: str) -> int:
    """Returns a number of tokens such as 4M, which is 4 * 2**20, 512K or 65536.

    Raises:
      ValueError: if the text is something else.
    """
    found = re.fullmatch(r'([1-9]\d*)([KM]?)', text)
    if found is None:
        raise ValueError(
            f'{text!r} must be a number of tokens, such as 4M (4 * 2**20), 512K or 65536'
        )
    return int(found[1]) * _UNITS[found[2]]
