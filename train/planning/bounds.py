"""The memory that a run needs on a machine, from its sizes alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from train.config import TrainConfig
from train.models.config import TransformerConfig
from train.planning.candidates import RunSizes, find_model_config, sizes_of
from train.planning.machines import Machine

# The least that a parameter needs: itself and two moments of AdamW in float32, and its gradient in
# bfloat16. With microbatches, the sum of the gradients is in float32, and what is added to it may
# be, too.
_STATE, _GRADIENT, _SUM = 12, 2, 4
_ELEMENT = 2  # bytes of an activation in bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """A run, and what decides the memory that it needs.

    Attributes:
      config: the settings of the run.
      num_parameters: the number of parameters of its model.
    """

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
          sizes: the sizes of the run on a machine.
          num_microbatches: the number of microbatches.
          keeps_products: whether the backward pass finds the results of products, which it
            otherwise computes again from the inputs of the layers.
        """
        gradient = _GRADIENT + (_SUM if num_microbatches > 1 else 0)
        state = self.num_parameters * (_STATE + gradient) / sizes.num_devices
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
          num_devices: the number of devices that share the state.
          num_microbatches: the number of microbatches.
          bytes_of_batch: what a device needs for its part of a batch without microbatches.
        """
        fixed = self.bytes_of_state(num_devices, num_microbatches)
        return fixed + bytes_of_batch / num_microbatches

    def bytes_of_batch(self, num_devices: int, num_microbatches: int, peak: int) -> float:
        """Returns what a device would need for its part of a batch without microbatches, in bytes.

        Args:
          num_devices: the number of devices that share the state.
          num_microbatches: the number of microbatches of a run with a known peak.
          peak: its peak, in bytes.
        """
        of_batch = peak - self.bytes_of_state(num_devices, num_microbatches)
        return max(of_batch, 0.0) * num_microbatches

    def bytes_of_state(self, num_devices: int, num_microbatches: int) -> float:
        """Returns what a device needs for any batch: the state and the gradients, in bytes."""
        gradient = 2 * _SUM if num_microbatches > 1 else _GRADIENT
        return self.num_parameters * (_STATE + gradient) / num_devices
