"""The same model in four front-ends has the same layout and the same training."""

import functools
import types

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from small_models import (
    FRONT_ENDS,
    PARAMETERS,
    PATH_RULES,
    batches,
    plain_loss,
    plain_losses,
    program,
    values,
)

from partitioning import AxisNames, AxisRules, PjitPartitioner, check_compiled_once

pytestmark = pytest.mark.core

# Over data 4 x model 2.
RULES = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('layers', None)]
RULES += [('embed', 'data')]
SPECS = {  # by hand
    'embed/embedding': P('model', 'data'),
    'layers/up/kernel': P(None, 'data', 'model'),
    'layers/up/bias': P(None, 'model'),
    'layers/down/kernel': P(None, 'model', 'data'),
    'layers/down/bias': P(None, 'data'),
}
# The number of float32 elements of all parameters on one device, in the order of the arrays above.
ELEMENTS = 16 * 8 // 8 + 3 * (8 * 16 // 8 + 16 // 2 + 8 * 16 // 8 + 8 // 4)
# The kind of state that is trained; nnx has only one kind.
KINDS = {'boxes': 'flax', 't5x': 'dict', 'paths': 'ours'}
STEPS = 5
TX = optax.adamw(2e-2)
CASES = pytest.mark.parametrize('front_end', FRONT_ENDS)


def partitioner_of(front_end, num_partitions=2, rules=RULES, **settings):
    names = PATH_RULES if front_end == 'paths' else ()
    return PjitPartitioner(num_partitions, AxisRules(rules, names=names, **settings))


def corresponding(tree):
    """The leaves of a state by (kind, parameter), and the leaves that belong to no parameter."""
    found, others = {}, []
    is_leaf = lambda x: isinstance(x, P | AxisNames | NamedSharding)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf):
        keys = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
        kind = next((k for k in ('mu', 'nu') if k in keys), 'parameter')
        names = [n for n in PARAMETERS if f'/{"/".join(keys)}/'.find(f'/{n}/') >= 0]
        if names:
            assert (kind, names[0]) not in found
            found[kind, names[0]] = leaf
        else:
            others.append(leaf)
    return found, others


def for_every_kind(table):
    """A table of parameters, repeated for both statistics of Adam."""
    return {(kind, k): x for kind in ('parameter', 'mu', 'nu') for k, x in table.items()}


@functools.cache
def run(front_end):
    """Five steps in a front-end."""
    made = program(front_end, KINDS.get(front_end), TX)
    partitioner = partitioner_of(front_end)
    out = types.SimpleNamespace(partitioner=partitioner)
    out.plan = partitioner.plan(made.init, jax.random.key(0))
    out.axes = out.plan.specs
    state = out.plan.init(jax.random.key(0))
    out.born = jax.tree.map(lambda x: x.sharding, state)
    resources = (out.axes, partitioner.data_partition_spec)
    out.step = partitioner.partition(made.step, resources, (out.axes, None), donate_argnums=0)
    out.losses = []
    for batch in batches(STEPS):
        state, loss = out.step(state, batch)
        out.losses.append(float(loss))
    out.state = state
    return out


@functools.cache
def losses_on_one_device():
    return plain_losses(TX, batches(STEPS))


@CASES
def test_names_and_specs_are_those_of_the_tables(front_end):
    """Names include the dimension that scan adds; both statistics of Adam have them too."""
    out = run(front_end)
    found, _ = corresponding(out.plan.logical_axes)
    assert found == for_every_kind({k: AxisNames(*n) for k, (_, n) in PARAMETERS.items()})
    assert dict(out.partitioner.mesh.shape) == {'data': 4, 'model': 2}
    found, others = corresponding(out.axes)
    assert found == for_every_kind(SPECS)
    assert others and set(others) == {P()}  # counts


@CASES
def test_arrays_are_born_sharded_and_stay_so(front_end):
    out = run(front_end)
    born, _ = corresponding(out.born)
    now, _ = corresponding(out.state)
    for key, spec in for_every_kind(SPECS).items():
        expected = NamedSharding(out.partitioner.mesh, spec)
        array = now[key]
        assert array.shape == PARAMETERS[key[1]][0]
        assert born[key].is_equivalent_to(expected, array.ndim), key
        assert array.sharding.is_equivalent_to(expected, array.ndim), key
    out.plan.check(out.state)
    check_compiled_once(out.step)
    held = out.plan.audit(out.state).by_role
    assert held['parameters'] == 4 * ELEMENTS
    counts = held['optimizer'] - 2 * 4 * ELEMENTS
    assert counts + held['other'] == 8  # Adam's count and the step


@CASES
def test_losses_are_those_of_one_device(front_end):
    expected = losses_on_one_device()
    np.testing.assert_allclose(run(front_end).losses, expected, rtol=1e-5)
    untrained = plain_loss(values(), batches(STEPS)[-1], np)
    assert expected[-1] < untrained - 0.05  # the steps before it count
