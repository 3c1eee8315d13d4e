"""How long get_mesh_axes of T5X's train states takes, compared with our own train state.

  python benchmarks/t5x_states.py

The states have 5,000 parameters in 500 layers and are abstract. They hold their names as T5X's do:
in `params_axes`, from which `as_logical_axes()` makes the names of the optimizer's arrays. The
table shows medians of alternating calls. The last line compares the construction of a partitioner
with the construction of its mesh by `jax.make_mesh`.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import jax

jax.config.update('jax_num_cpu_devices', 8)

import flax.struct
import numpy as np
import optax
from flax.core import freeze
from flax.linen.partitioning import AxisMetadata, get_axis_names
from jax.sharding import AxisType, PartitionSpec

from benchmarks.timing import compare
from partitioning import PjitPartitioner, TrainState, standard_logical_axis_rules

LAYERS, ROUNDS = 500, 9
ATTENTION = ('embed', 'joined_kv')
SHAPES = {
    'attention': {
        'query': ((512, 512), ATTENTION),
        'key': ((512, 512), ATTENTION),
        'value': ((512, 512), ATTENTION),
        'out': ((512, 512), ATTENTION[::-1]),
    },
    'mlp': {
        'wi_0': ((512, 2048), ('embed', 'mlp')),
        'wi_1': ((512, 2048), ('embed', 'mlp')),
        'wo': ((2048, 512), ('mlp', 'embed')),
        'bias': ((2048,), ('mlp',)),
    },
    'norm': {'attention': ((512,), ('embed',)), 'mlp': ((512,), ('embed',))},
}


@flax.struct.dataclass
class Factored:
    """T5X's Adafactor keeps these for a parameter; unused ones have the shape (1,)."""

    m: Any = None
    v: Any = None
    v_row: Any = None
    v_col: Any = None


@flax.struct.dataclass
class OptimizerState:
    """T5X's state of an optimizer."""

    step: Any
    param_states: Any


@flax.struct.dataclass
class Optimizer:
    """T5X's optimizer, which holds the parameters as its target."""

    state: OptimizerState
    target: Any


class T5xState(flax.struct.PyTreeNode):
    """A train state with T5X's fields.

    `names_of_statistics` makes the names of `param_states`, given the names of the parameters.
    """

    _optimizer: Optimizer
    params_axes: Any
    names_of_statistics: Callable[[Any], Any] = flax.struct.field(pytree_node=False)
    flax_mutables: Any = freeze({})
    flax_mutables_axes: Any = None

    def as_logical_axes(self) -> T5xState:
        """The names of all arrays, as T5X's method returns them."""
        names = get_axis_names(self.params_axes)
        state = OptimizerState(None, self.names_of_statistics(names))
        return self.replace(_optimizer=Optimizer(state, names), params_axes=None)


def array(*shape: int) -> jax.ShapeDtypeStruct:
    """An abstract float32 array."""
    return jax.ShapeDtypeStruct(shape, np.float32)


def make_tree(leaf: Callable[..., Any], suffix: str = '') -> Any:
    """A tree of all layers, with `leaf(shape, names)` for each parameter."""
    modules = {
        module: {f'{name}{suffix}': leaf(*entry) for name, entry in entries.items()}
        for module, entries in SHAPES.items()
    }
    return freeze({'decoder': {f'layers_{i}': modules for i in range(LAYERS)}})


def factored(shape: tuple[int, ...], _: Any) -> Factored:
    """The statistics of one parameter."""
    if len(shape) == 2:
        return Factored(m=array(1), v=array(1), v_row=array(shape[0]), v_col=array(shape[1]))
    return Factored(m=array(1), v=array(*shape), v_row=array(1), v_col=array(1))


def names_of_factored(names: Any) -> Any:
    """Factored statistics have no names in T5X."""

    def one(spec: PartitionSpec) -> Factored:
        return Factored(v=None if len(spec) == 2 else spec)

    return jax.tree.map(one, names, is_leaf=lambda x: isinstance(x, PartitionSpec))


def make_states() -> dict[str, tuple[T5xState, TrainState]]:
    """For each optimizer, T5X's state and ours."""
    params = make_tree(lambda shape, _: array(*shape))
    axes = make_tree(lambda _, names: AxisMetadata(names), '_axes')
    adam = jax.eval_shape(optax.adam(1e-3).init, params)

    def names_of_adam(names: Any) -> Any:
        return (adam[0]._replace(count=None, mu=names, nu=names), *adam[1:])

    def state_of(statistics: Any, names: Callable[[Any], Any]) -> T5xState:
        return T5xState(Optimizer(OptimizerState(array(), statistics), params), axes, names)

    def own(tx: optax.GradientTransformation) -> TrainState:
        variables = {'params': params, 'params_axes': axes}
        return jax.eval_shape(lambda: TrainState.create(variables, tx))

    return {
        'adam': (state_of(adam, names_of_adam), own(optax.adam(1e-3))),
        'adafactor': (
            state_of(make_tree(factored), names_of_factored),
            own(optax.adafactor(1e-3)),
        ),
    }


def make_partitioner() -> PjitPartitioner:
    """A partitioner with two devices per model."""
    return PjitPartitioner(num_partitions=2, logical_axis_rules=standard_logical_axis_rules())


def main() -> None:
    """Prints the table."""
    partitioner = make_partitioner()
    print(f'{"get_mesh_axes":14} {"T5X state":>12} {"TrainState":>12}  ratio')
    for name, (of_t5x, own) in make_states().items():
        gc.collect()
        works = (functools.partial(partitioner.get_mesh_axes, state) for state in (of_t5x, own))
        mine, other, ratio = compare(*works, ROUNDS)
        print(f'{name:14} {mine * 1e3:9.1f} ms {other * 1e3:9.1f} ms  {ratio:5.2f}')

    def make_mesh() -> Any:
        return jax.make_mesh((4, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2)

    mine, other, ratio = compare(make_partitioner, make_mesh, ROUNDS, number=500)
    print(f'construction: {mine * 1e6:.1f} us, jax.make_mesh {other * 1e6:.1f} us: {ratio:.2f}')


if __name__ == '__main__':
    main()
