"""The names of linen boxes, and how the boxes of flax behave while a partitioner traces."""

import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from boxed_states import KEY, RULES, OneArray, box, ones, partitioner_of, spec_of
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

from partitioning import (
    create_mesh,
    get_logical_axes,
    unbox,
)

pytestmark = pytest.mark.core

N = nn.PARTITION_NAME
FLAT = nn.LogicallyPartitioned(jnp.ones((8, 8)), ('embed', 'mlp', None))  # as in DenseGeneral


def flax_fails():
    """flax's own unbox constrains an array of two dimensions by three names."""
    unbox = jax.jit(lambda box: box.unbox())
    mesh, fails = partitioner_of().mesh, pytest.raises(ValueError, match='rank')
    with nn.logical_axis_rules(RULES), jax.set_mesh(mesh), fails:
        unbox(FLAT)


def test_flax_behaves_as_before_outside_of_traces():
    flax_fails()
    unbox = partitioner_of(RULES).partition(lambda box: box.unbox(), None, None)
    for _ in range(2):
        assert unbox.eval_shape(FLAT).shape == (8, 8)
        methods = [nn.Partitioned.unbox, nn.LogicallyPartitioned.unbox, nn.Partitioned.add_axis]
        flax_fails()
    again = [nn.Partitioned.unbox, nn.LogicallyPartitioned.unbox, nn.Partitioned.add_axis]
    assert all(one is other for one, other in zip(methods, again, strict=True))
    box = nn.Partitioned(0, ('x', 'y'))
    assert box.add_axis(-1, {N: 'layers'}).names == ('x', 'layers', 'y')  # flax's own answer


def test_flax_behaves_as_before_in_another_thread():
    errors = []

    def other():
        try:
            flax_fails()
        except BaseException as error:  # the thread has no other way to report it
            errors.append(error)

    def init(key):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        return {'params': {'w': FLAT.replace(value=FLAT.unbox())}}

    partitioner_of(RULES).eval_shape(init, KEY)
    assert errors == []


@pytest.mark.parametrize('axis_types', [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize('kind', [nn.Partitioned, nn.LogicallyPartitioned])
def test_an_array_is_laid_out_by_its_names(kind, axis_types):
    names = ('data', 'model') if kind is nn.Partitioned else ('embed', 'mlp')
    partitioner = partitioner_of(RULES, axis_types)
    unbox = partitioner.partition(lambda x: kind(x, names).unbox(), P(), P('data', 'model'))
    layout = 'sharding_constraint' if axis_types is AxisType.Auto else 'reshard'
    assert str(unbox.trace(jnp.ones((8, 8))).jaxpr).count(f'= {layout}') == 1
    keep = partitioner.partition(lambda x: kind(x, names).unbox(False), P(), P())
    assert f'= {layout}' not in str(keep.trace(jnp.ones((8, 8))).jaxpr)


def test_a_box_with_the_mesh_of_the_partitioner():
    """The state is made over Auto axes; the box has the mesh with Explicit ones."""
    partitioner = partitioner_of(RULES, AxisType.Explicit)
    init = nn.with_logical_partitioning(ones, ('embed', 'mlp'), mesh=partitioner.mesh)
    plan = partitioner.plan(OneArray(init).init, KEY)
    assert plan['params/w'].spec == P('data', 'model')


# A transformation that does not name its dimension.


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        init = nn.with_logical_partitioning(ones, ('embed', 'mlp'))
        return nn.Dense(8, use_bias=False, kernel_init=init)(x), None


def layers(**metadata):
    axes = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}, 'length': 4}
    return nn.scan(Layer, **axes, **metadata)()


@pytest.mark.parametrize('method', ['plan', 'eval_shape'])
def test_a_scan_without_a_name(method):
    """Each of the two ways that the message offers works."""

    def init(model):
        return lambda key: model.init(key, jnp.ones((8, 8)))

    with pytest.raises(ValueError) as error:
        getattr(partitioner_of(RULES), method)(init(layers()), KEY)
    message = str(error.value)
    assert "('embed', 'mlp')" in message and '\n' not in message
    for written, rules in (
        ('metadata_params={nn.PARTITION_NAME: None}', ()),
        ("metadata_params={nn.PARTITION_NAME: 'layers'}", [('layers', None)]),
    ):
        assert written.split(': ')[0] in message
        model = layers(**eval(f'dict({written})', {'nn': nn}))
        others = [rule for rule in RULES if rule[0] != 'layers']
        partitioner = partitioner_of([*others, *rules])
        plan = partitioner.plan(init(model), KEY)
        assert plan['params/Dense_0/kernel'].spec == P(None, 'data', 'model')
        run = partitioner.partition(model.apply, (plan.specs, P('data')), (P('data'), None))
        assert run(plan.init(KEY), jnp.ones((8, 8)))[0].shape == (8, 8)
    assert "('layers', None)" in message
    names = get_logical_axes(partitioner.eval_shape(init(model), KEY))
    assert names['params']['Dense_0']['kernel'] == ('layers', 'embed', 'mlp')


# A Partitioned holds mesh axes, a LogicallyPartitioned holds logical axes.


def test_a_box_around_several_arrays_has_no_layout():
    several = nn.Partitioned({'K': jnp.zeros((8, 2)), 'b': jnp.zeros(8)}, ('data',))
    with pytest.raises(ValueError, match=r"params/w.*\('data',\).* several arrays"):
        spec_of(several, [])


@pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])
def test_unbox_does_not_lay_out(axis_type):
    """flax's unbox adds a constraint, which fails on a single device and over Explicit axes."""
    array = box((8, 4), 'data', 'model', kind=nn.Partitioned)
    with jax.set_mesh(create_mesh((4, 2), ('data', 'model'), axis_types=axis_type)):
        assert unbox(array) is array.value
        with pytest.raises((TypeError, AssertionError, ValueError)):
            nn.unbox(array)
        assert jax.jit(unbox).trace(array).jaxpr.eqns == []


# Rules for one array, tried before the other rules.


@pytest.mark.parametrize(
    'names, own, expected',
    [
        (('in', 'mlp'), (('in', 'data'),), P('data', 'model')),
        (('embed', 'mlp'), (('mlp', None),), P('data', None)),
        (('embed', 'mlp'), (('mlp', 'data'),), P(None, 'data')),
        (('in', 'out'), (('in', ('data', 'model')), ('out', 'model')), P(('data', 'model'), None)),
    ],
)
@pytest.mark.parametrize('carrier', ['box', 'variable'])
def test_rules_for_one_array(names, own, expected, carrier):
    if carrier == 'box':
        array = box((8, 8), *names, rules=own)
    else:
        with nnx.use_eager_sharding(False):
            array = nnx.Param(jnp.zeros((8, 8)), out_sharding=names, sharding_rules=own)
    assert spec_of(array, RULES) == expected
    assert nn.logical_to_mesh_axes(names, [*own, *RULES]) == expected


@pytest.mark.parametrize(
    'own, message',
    [
        ((('in', 'dta'),), "params/w.*'dta'.*mean 'data'"),
        ((('in', 5),), r"rule \('in', 5\).*write"),
    ],
)
def test_wrong_rules_for_one_array(own, message):
    with pytest.raises(ValueError, match=message):
        spec_of(box((8, 8), 'in', 'mlp', rules=own), RULES)


def test_a_box_for_another_mesh_is_an_error():
    """A setting that cannot be honoured is an error."""
    other = create_mesh((2, 4), ('data', 'model'))
    with pytest.raises(ValueError, match=r'params/w.*mesh'):
        spec_of(box((8, 8), 'data', 'model', kind=nn.Partitioned, mesh=other), [])
