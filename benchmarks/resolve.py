"""How long get_mesh_axes of a whole train state takes, compared with linen.

  python benchmarks/resolve.py

The state has 5,000 parameters in 500 layers and is abstract, with SGD, Adam, AdamW or factored
Adafactor, on a mesh of data 4 x model 2. The peer is linen's `nn.get_partition_spec` with
`nn.logical_to_mesh` of the same boxed state, which resolves each box without checks and cannot name
Adafactor's factored statistics. Both run alternately, and the table shows medians and the number of
walks over the state.
"""

from __future__ import annotations

import gc
from typing import Any
from unittest import mock

import jax

jax.config.update('jax_num_cpu_devices', 8)

import flax.linen as nn
import optax

from benchmarks.timing import compare
from partitioning import PjitPartitioner, standard_logical_axis_rules, unbox

LAYERS, ROUNDS = 500, 15
RULES = standard_logical_axis_rules(2, 2)
SHAPES = {
    'attention/query': ((512, 8, 64), ('embed', 'heads', 'kv')),
    'attention/key': ((512, 8, 64), ('embed', 'heads', 'kv')),
    'attention/value': ((512, 8, 64), ('embed', 'heads', 'kv')),
    'attention/out': ((8, 64, 512), ('heads', 'kv', 'embed')),
    'mlp/gate': ((512, 2048), ('embed', 'mlp')),
    'mlp/up': ((512, 2048), ('embed', 'mlp')),
    'mlp/down': ((2048, 512), ('mlp', 'embed')),
    'mlp/bias': ((2048,), ('mlp',)),
    'norm/attention': ((512,), ('embed',)),
    'norm/mlp': ((512,), ('embed',)),
}
OPTIMIZERS = {
    'sgd': optax.sgd(1e-3),
    'adam': optax.adam(1e-3),
    'adamw': optax.adamw(1e-3),
    'adafactor': optax.adafactor(1e-3),
}


def abstract_parameters() -> dict[str, Any]:
    """The parameters in linen's boxes, nested as a model nests them."""
    layers: dict[str, Any] = {}
    for layer in range(LAYERS):
        for path, (shape, names) in SHAPES.items():
            module, name = path.split('/')
            array = jax.ShapeDtypeStruct(shape, 'float32')
            box = nn.LogicallyPartitioned(array, names)
            layers.setdefault(f'layer_{layer}', {}).setdefault(module, {})[name] = box
    return {'decoder': layers}


def main() -> None:
    """Prints the table."""
    partitioner = PjitPartitioner(num_partitions=2, logical_axis_rules=RULES)
    params = abstract_parameters()
    print(f'{"optimizer":10}  arrays  walks  {"get_mesh_axes":>13}  {"linen":>8}  ratio')
    gc.disable()
    for name, tx in OPTIMIZERS.items():
        opt_state = jax.eval_shape(tx.init, unbox(params))
        state = {'params': params, 'opt_state': opt_state}
        boxed = {'params': params, 'opt_state': jax.eval_shape(tx.init, params)}

        def ours(state: Any = state) -> Any:
            return partitioner.get_mesh_axes(state)

        def linen(boxed: Any = boxed) -> Any:
            return nn.logical_to_mesh(nn.get_partition_spec(boxed), RULES)

        flatten = jax.tree_util.tree_flatten_with_path
        with mock.patch.object(jax.tree_util, 'tree_flatten_with_path', side_effect=flatten) as m:
            count = len(jax.tree.leaves(ours(), is_leaf=lambda x: x is None))
        mine, other, ratio = compare(ours, linen, ROUNDS)
        print(
            f'{name:10}  {count:6,}  {m.call_count:5}  {mine * 1e3:10.1f} ms  '
            f'{other * 1e3:5.1f} ms  {ratio:5.2f}'
        )


if __name__ == '__main__':
    main()
