"""States that name their own axes, built like T5X's: an optimizer that holds the parameters."""

from typing import Any

import flax.struct
import jax
import numpy as np
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata, get_axis_names
from jax.sharding import PartitionSpec as P

# The kernel of these states, and rules for it.
KERNEL = np.arange(8 * 4, dtype=np.float32).reshape(8, 4) / 8
RULES = (('batch', 'data'), ('embed', None), ('vocab', 'model'), ('mlp', 'model'))

NOTHING = freeze({})


@flax.struct.dataclass
class Statistics:
    """What T5X's Adafactor keeps for one parameter; unused ones have size 1 and no names."""

    m: Any = None
    v: Any = None
    v_row: Any = None
    v_col: Any = None


@flax.struct.dataclass
class OptimizerState:
    step: Any
    param_states: Any


@flax.struct.dataclass
class Optimizer:
    state: OptimizerState
    target: Any
    factored: bool = flax.struct.field(pytree_node=False)
    momentum: bool = flax.struct.field(pytree_node=False)


class OptimizedState(flax.struct.PyTreeNode):
    """A training state whose logical axes have None wherever there are no names."""

    _optimizer: Optimizer
    params_axes: Any = None
    flax_mutables: Any = NOTHING
    flax_mutables_axes: Any = None

    def as_logical_axes(self):
        optimizer, names = self._optimizer, get_axis_names(self.params_axes)

        def of_statistics(spec):
            return Statistics(
                m=spec if optimizer.momentum else None, v=None if optimizer.factored else spec
            )

        states = jax.tree.map(of_statistics, names, is_leaf=lambda x: isinstance(x, P))
        return OptimizedState(
            optimizer.replace(state=OptimizerState(None, states), target=names),
            flax_mutables=get_axis_names(self.flax_mutables_axes or NOTHING),
            flax_mutables_axes=self.flax_mutables_axes,
        )


class InferenceState(flax.struct.PyTreeNode):
    """Parameters without an optimizer."""

    step: Any
    params: Any
    params_axes: Any = None
    flax_mutables: Any = NOTHING
    flax_mutables_axes: Any = None

    def as_logical_axes(self):
        return InferenceState(
            step=None,
            params=get_axis_names(self.params_axes),
            flax_mutables=get_axis_names(self.flax_mutables_axes or NOTHING),
        )


def metadata(names):
    """The params_axes of a tree of names, {'kernel': ('embed', 'mlp')}."""
    if isinstance(names, tuple):
        return AxisMetadata(names)
    return {
        f'{key}_axes' if isinstance(below, tuple) else key: metadata(below)
        for key, below in names.items()
    }


def optimized_state(shapes, names, *, factored=True, momentum=False, **fields):
    """An abstract OptimizedState of parameters with these shapes and names."""

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, np.float32)

    def of_parameter(shape):
        return Statistics(
            m=array(*shape) if momentum else array(1),
            v=array(1) if factored else array(*shape),
            v_row=array(*shape[:-1]) if factored else array(1),
            v_col=array(*shape[:-2], shape[-1]) if factored else array(1),
        )

    def each(function):
        return freeze(jax.tree.map(function, shapes, is_leaf=lambda x: isinstance(x, tuple)))

    state = OptimizerState(array(), each(of_parameter))
    optimizer = Optimizer(state, each(lambda shape: array(*shape)), factored, momentum)
    return OptimizedState(optimizer, params_axes=freeze(metadata(names)), **fields)
