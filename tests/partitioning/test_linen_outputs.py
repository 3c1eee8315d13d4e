"""Outputs of linen modules, laid out by the output_plan of a plan.

The layout of an inner output is visible where it is the output of the model, or as a constraint.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from modules_with_outputs import (
    MESH,
    OTHER_MESH,
    Mlp,
    X,
    expected_of,
    has_spec,
    outputs,
    run,
    variables_of,
)

from partitioning import PjitPartitioner
from partitioning.compat.pytorch import ShardingPlan, constrain_outputs

pytestmark = pytest.mark.core


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name='dense')(x)


class Nested(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Dense(name='outer')(x)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return Dense(name='inner')(x), None


class Scanned(nn.Module):
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        kinds = {'variable_axes': {'params': 0}, 'split_rngs': {'params': True}, 'length': 3}
        return nn.scan(layer, **kinds)(name='layers')(x, None)[0]


class Remat(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.remat(Dense)(name='outer')(x)


class Jitted(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.jit(Dense)(name='outer')(x)


class Setup(nn.Module):
    def setup(self):
        self.layers = [nn.Dense(16) for _ in range(2)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def first(self, x):
        return self.layers[0](x)


MODULES = {
    'a module': (Mlp(), 'fc2'),
    'the whole model': (Mlp(), ''),
    'a nested module': (Nested(), 'outer/dense'),
    'the module around': (Nested(), 'outer'),
    'a layer of a scan': (Scanned(), 'layers/inner/dense'),
    'all layers of a scan': (Scanned(), 'layers'),
    'a layer of a scan with remat': (Scanned(remat=True), 'layers/inner'),
    'a module with remat': (Remat(), 'outer/dense'),
    'a jitted module': (Jitted(), 'outer/dense'),
    'one of a list': (Setup(), 'layers_1'),
}


@pytest.mark.parametrize('name', MODULES)
def test_linen_modules(name):
    model, path = MODULES[name]
    out = run(model, ShardingPlan({}, {path: P('data', 'model')}))
    assert has_spec(out, P('data', 'model'))
    np.testing.assert_allclose(out, expected_of(model), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('spec', [P(None, ('model', 'data')), P('model'), P()])
def test_specs_and_separators(spec):
    assert has_spec(run(Nested(), ShardingPlan({}, {'outer.dense': spec})), spec)


def constraints(plan, model):
    """The (spec, shape) pairs of the constraints in the program, in its order."""

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x)

    variables = variables_of(model)
    with jax.set_mesh(MESH):
        jaxpr = jax.make_jaxpr(apply)(variables, X)
    return [
        (eqn.params['sharding'].spec, eqn.outvars[0].aval.shape)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == 'sharding_constraint'
    ]


def test_only_the_modules_that_the_plan_names():
    assert constraints(ShardingPlan({}), Mlp()) == []
    of_both = outputs(fc2=P('data'), fc1=P('data', 'model'))
    assert constraints(of_both, Mlp()) == [(P('data', 'model'), (8, 64)), (P('data'), (8, 16))]


def test_other_methods_than_call():
    """The modules that the method calls are laid out; the model itself was not called."""
    out = run(Setup(), outputs(layers_0=P('data')), method='first')
    assert has_spec(out, P('data'))
    np.testing.assert_allclose(out, expected_of(Setup(), 'first'), rtol=1e-5)
    with pytest.raises(ValueError, match="output_plan names '', but no such module was called"):
        run(Setup(), ShardingPlan({}, {'': P('data')}), method='first')


class Several(nn.Module):
    """Returns a tuple that contains a dict and None, and with `more` a number and a scalar."""

    more: bool = False

    @nn.compact
    def __call__(self, x):
        arrays = x * 2, {'sum': x.sum(0), 'none': None}
        return (*arrays, 3, jnp.sum(x)) if self.more else arrays


def test_outputs_of_several_arrays():
    out = run(Several(), ShardingPlan({}, {'': P('data')}))
    assert has_spec(out[0], P('data', None)) and has_spec(out[1]['sum'], P('data'))
    assert out[1]['none'] is None
    expected = expected_of(Several())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, expected)


def test_scalars_and_numbers_among_outputs():
    """Only the empty spec fits a scalar; a number is not laid out."""
    out = run(Several(more=True), ShardingPlan({}, {'': P()}))
    assert out[2] == 3 and has_spec(out[0], P())
    with pytest.raises(ValueError, match=r"output_plan of ''.*P\(None\).*0 dimensions"):
        run(Several(more=True), ShardingPlan({}, {'': P(None)}))


def test_logical_names():
    """The rules of the context apply, which a partitioned function sets."""
    rules = [('batch', 'data'), ('mlp', 'model')]
    plan, model = outputs(fc1=('batch', 'mlp'), fc2=['batch', None]), Mlp()
    with nn.logical_axis_rules(rules):
        found = constraints(plan, model)
    assert found == [(P('data', 'model'), (8, 64)), (P('data', None), (8, 16))]

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x)

    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=rules)
    out = partitioner.partition(apply, (None, P('data')), P('data'))(variables_of(model), X)
    np.testing.assert_allclose(out, expected_of(model), rtol=1e-5, atol=1e-5)


def test_named_shardings():
    assert has_spec(run(Mlp(), outputs(fc2=NamedSharding(MESH, P('data')))), P('data'))
    with pytest.raises(ValueError, match=r'fc2.*mesh model 4.*data 4 x model 2'):
        run(Mlp(), outputs(fc2=NamedSharding(OTHER_MESH, P('model'))))


def test_nothing_is_laid_out_without_a_mesh():
    with constrain_outputs(outputs(fc2=P('data'))):
        out = Mlp().apply(variables_of(Mlp()), X)
    assert out.sharding.num_devices == 1
