"""The same models in four front-ends have the same layout and the same training."""

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

from partitioning import AxisNames, PjitPartitioner, check_compiled_once

pytestmark = pytest.mark.core

# Over data 4 x model 2. If an array has both names, 'members' takes 'data' before 'embed'.
RULES = [('batch', 'data'), ('vocab', 'model'), ('mlp', 'model'), ('layers', None)]
RULES += [('members', 'data'), ('embed', 'data')]
SPECS = {  # by hand
    'stack': {
        'embed/embedding': P('model', 'data'),
        'layers/up/kernel': P(None, 'data', 'model'),
        'layers/up/bias': P(None, 'model'),
        'layers/down/kernel': P(None, 'model', 'data'),
        'layers/down/bias': P(None, 'data'),
    },
    'ensemble': {
        'members/up/kernel': P('data', None, 'model'),
        'members/up/bias': P('data', 'model'),
        'members/down/kernel': P('data', 'model', None),
        'members/down/bias': P('data', None),
    },
}
# The number of float32 elements of all parameters on one device, in the order of the arrays above.
ELEMENTS = {
    'stack': 16 * 8 // 8 + 3 * (8 * 16 // 8 + 16 // 2 + 8 * 16 // 8 + 8 // 4),
    'ensemble': 8 * 16 // 2 + 16 // 2 + 8 * 16 // 2 + 8,
}
KINDS = {  # the kind of state that is trained; nnx has only one kind
    ('stack', 'boxes'): 'flax',
    ('stack', 't5x'): 'dict',
    ('stack', 'paths'): 'ours',
    ('ensemble', 'boxes'): 'ours',
    ('ensemble', 't5x'): 'ours',
    ('ensemble', 'paths'): 'flax',
}
STEPS = 5
TX = optax.adamw(2e-2)
CASES = pytest.mark.parametrize('front_end', FRONT_ENDS)
MODELS = pytest.mark.parametrize('model', SPECS)


def partitioner_of(model, front_end, num_partitions=2, **settings):
    overrides = PATH_RULES[model] if front_end == 'paths' else ()
    return PjitPartitioner(
        num_partitions,
        params_axes_names_override=overrides,
        **{'logical_axis_rules': RULES} | settings,
    )


@functools.cache
def program_of(model, front_end, kind):
    return program(model, front_end, kind, TX)


@functools.cache
def abstract_state(model, front_end, kind='dict'):
    """The shapes and names of a state."""
    init = program_of(model, front_end, kind).init
    return partitioner_of(model, front_end).eval_shape(init, jax.random.key(0))


def corresponding(tree, model):
    """The leaves of a state by (kind, parameter), and the leaves that belong to no parameter."""
    found, others = {}, []
    is_leaf = lambda x: isinstance(x, P | AxisNames | NamedSharding)  # noqa: E731
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf):
        keys = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
        kind = next((k for k in ('mu', 'nu') if k in keys), 'parameter')
        names = [n for n in PARAMETERS[model] if f'/{"/".join(keys)}/'.find(f'/{n}/') >= 0]
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
def run(model, front_end):
    """Five steps of a model in a front-end."""
    kind = KINDS.get((model, front_end))
    made = program_of(model, front_end, kind)
    partitioner = partitioner_of(model, front_end)
    out = types.SimpleNamespace(partitioner=partitioner)
    out.plan = partitioner.plan(made.init, jax.random.key(0))
    out.axes = out.plan.specs
    state = out.plan.init(jax.random.key(0))
    out.born = jax.tree.map(lambda x: x.sharding, state)
    start, _ = corresponding(jax.device_get(state), model)
    out.start = {name: x for (kind, name), x in start.items() if kind == 'parameter'}
    resources = (out.axes, partitioner.data_partition_spec)
    out.step = partitioner.partition(made.step, resources, (out.axes, None), donate_argnums=0)
    out.losses = []
    for batch in batches(model, STEPS):
        state, loss = out.step(state, batch)
        out.losses.append(float(loss))
    out.state = state
    return out


@functools.cache
def losses_on_one_device(model):
    return plain_losses(model, TX, batches(model, STEPS))


# The layout.


@MODELS
@CASES
def test_names_and_specs_are_those_of_the_tables(model, front_end):
    """Names include the dimension that scan or vmap adds; both statistics of Adam have them too."""
    out = run(model, front_end)
    found, _ = corresponding(out.plan.logical_axes, model)
    assert found == for_every_kind({k: AxisNames(*n) for k, (_, n) in PARAMETERS[model].items()})
    assert dict(out.partitioner.mesh.shape) == {'data': 4, 'model': 2}
    found, others = corresponding(out.axes, model)
    assert found == for_every_kind(SPECS[model])
    assert others and set(others) == {P()}  # counts


@MODELS
@CASES
def test_arrays_are_born_sharded_and_stay_so(model, front_end):
    out = run(model, front_end)
    born, _ = corresponding(out.born, model)
    now, _ = corresponding(out.state, model)
    for key, spec in for_every_kind(SPECS[model]).items():
        expected = NamedSharding(out.partitioner.mesh, spec)
        array = now[key]
        assert array.shape == PARAMETERS[model][key[1]][0]
        assert born[key].is_equivalent_to(expected, array.ndim), key
        assert array.sharding.is_equivalent_to(expected, array.ndim), key
    out.plan.check(out.state)
    check_compiled_once(out.step)
    held = out.plan.audit(out.state).by_role
    assert held['parameters'] == 4 * ELEMENTS[model]
    counts = held['optimizer'] - 2 * 4 * ELEMENTS[model]
    assert counts + held['other'] == 8  # Adam's count and the step


# The training.


@MODELS
@CASES
def test_all_start_from_the_same_values(model, front_end):
    start, expected = run(model, front_end).start, values(model)
    assert start.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(start[name], value)


@MODELS
@CASES
def test_losses_are_those_of_one_device(model, front_end):
    expected = losses_on_one_device(model)
    np.testing.assert_allclose(run(model, front_end).losses, expected, rtol=1e-5)
    untrained = plain_loss(model, values(model), batches(model, STEPS)[-1], np)
    assert expected[-1] < untrained - 0.05  # the steps before it count


@MODELS
def test_losses_are_equal_across_front_ends(model):
    losses = {front_end: run(model, front_end).losses for front_end in FRONT_ENDS}
    for front_end in FRONT_ENDS:
        np.testing.assert_allclose(losses[front_end], losses['boxes'], rtol=1e-6)


@MODELS
@CASES
def test_parameters_after_the_steps_are_equal(model, front_end):
    """Adam divides by small statistics, so a few elements differ more than the losses."""
    ours, _ = corresponding(jax.device_get(run(model, front_end).state), model)
    boxes, _ = corresponding(jax.device_get(run(model, 'boxes').state), model)
    for key in boxes:
        np.testing.assert_allclose(ours[key], boxes[key], rtol=1e-3, atol=1e-5)


# Layouts of other kinds of states and under other rules.


OTHER_KINDS = {  # flax's TrainState cannot hold params_axes
    'boxes': ('ours', 'flax', 'dict'),
    't5x': ('ours', 'dict'),
    'paths': ('ours', 'flax', 'dict'),
}


@pytest.mark.parametrize(
    'front_end, kind', [(f, k) for f, kinds in OTHER_KINDS.items() for k in kinds]
)
@MODELS
def test_every_kind_of_state_has_the_same_layout(model, front_end, kind):
    state = abstract_state(model, front_end, kind)
    found, _ = corresponding(partitioner_of(model, front_end).get_mesh_axes(state), model)
    assert found == for_every_kind(SPECS[model])


@MODELS
@CASES
def test_rules_of_the_optimizer(model, front_end):
    """As in ZeRO, parameters are sharded over 'model' only and statistics over both axes."""
    rules = [(name, None if axes == 'data' else axes) for name, axes in RULES]
    partitioner = partitioner_of(
        model, front_end, logical_axis_rules=rules, optimizer_axis_rules=RULES
    )
    specs = partitioner.get_mesh_axes(abstract_state(model, front_end))
    found, _ = corresponding(specs, model)
    expected = for_every_kind(SPECS[model])
    for (kind, name), spec in expected.items():
        if kind == 'parameter':
            spec = P(*(axes if axes == 'model' else None for axes in spec))
        assert found[kind, name] == spec
    assert found.keys() == expected.keys()
