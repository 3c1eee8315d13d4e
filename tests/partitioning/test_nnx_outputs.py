"""Outputs of nnx modules, laid out by the output_plan of a plan; and plans that are refused."""

import copy
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from modules_with_outputs import (
    MESH,
    TOP,
    Block,
    Mlp,
    X,
    has_spec,
    outputs,
    run,
    tower,
    under_jit,
    variables_of,
)

from partitioning import create_mesh
from partitioning.compat.pytorch import ShardingPlan, constrain_outputs, shard_module

pytestmark = pytest.mark.core


@functools.cache
def expected():
    """The output of the tower on one device."""
    return under_jit(tower())


def assert_equal(out, expected):
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-4)


def split_and_merge(module):
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, X)


TRANSFORMS = {
    'nnx.jit': under_jit,
    'split and merge': split_and_merge,
    'nnx.remat': lambda m: nnx.jit(nnx.remat(lambda m, x: m(x)))(m, X),
    'nnx.clone': lambda m: under_jit(nnx.clone(m)),
    'copy.deepcopy': lambda m: under_jit(copy.deepcopy(m)),
    'jax.jit': lambda m: jax.jit(lambda m, x: m(x))(m, X),
}


@pytest.mark.parametrize(
    ('path', 'transform'),
    [*(('by_name/top', name) for name in TRANSFORMS), ('by_name.top', 'nnx.jit'), ('', 'nnx.jit')],
)
def test_nnx_modules(path, transform):
    module = tower(ShardingPlan({'by_name/top/kernel': P('data')}, {path: P('data', 'model')}))
    with jax.set_mesh(MESH):
        out = TRANSFORMS[transform](module)
    assert has_spec(out, P('data', 'model'))
    assert_equal(out, expected())


def test_gradients_and_steps():
    """The losses equal the model's losses on one device."""

    @nnx.jit
    def step(m, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m)
        optimizer.update(m, grads)
        return loss

    def losses(module):
        optimizer = nnx.Optimizer(module, optax.sgd(0.1), wrt=nnx.Param)
        return [float(step(module, optimizer, X)) for _ in range(3)]

    plan = ShardingPlan({'fc2/kernel': P(None, 'model')}, {'fc2': P('data', 'model')})
    module = shard_module(Block(nnx.Rngs(0)), plan, MESH)
    with jax.set_mesh(MESH):
        found = losses(module)
    np.testing.assert_allclose(found, losses(Block(nnx.Rngs(0))), rtol=1e-4)
    assert found[2] < found[0]
    assert module.fc2.kernel[...].sharding.spec == P(None, 'model')


class Layers(nnx.Module):
    """Two layers in one array, as nnx.vmap makes them."""

    def __init__(self):
        self.kernel = nnx.Param(np.random.default_rng(1).normal(size=(2, 16, 16)).astype('float32'))

    def __call__(self, x):
        return x @ self.kernel


class Stack(nnx.Module):
    def __init__(self):
        self.layers = Layers()

    def __call__(self, x):
        body = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return body(x, self.layers)


def test_a_scan_over_layers():
    stack = Stack()
    first, second = np.asarray(stack.layers.kernel[...])
    plan = ShardingPlan({'layers/kernel': P(None, None, 'model')}, {'layers': P('data', 'model')})
    shard_module(stack, plan, MESH)
    assert stack.layers.kernel[...].sharding.spec == P(None, None, 'model')
    with jax.set_mesh(MESH):
        out = under_jit(stack)
    assert has_spec(out, P('data', 'model'))
    assert_equal(out, X @ first @ second)


def test_other_modules_of_the_same_class_are_unchanged():
    sharded, plain = tower(TOP), tower()
    assert type(plain.by_name['top']) is nnx.Linear
    with jax.set_mesh(MESH):
        assert has_spec(under_jit(sharded), P('data', 'model'))
        assert under_jit(plain).sharding.is_fully_replicated


def test_explicit_axes():
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=AxisType.Explicit)
    module = tower(ShardingPlan({}, {'': P('data', 'model')}), mesh)
    with jax.set_mesh(mesh):
        out = under_jit(module)
    assert out.sharding == NamedSharding(mesh, P('data', 'model'))
    assert_equal(out, expected())


# Plans that are refused, for linen and for nnx.


def in_linen(plan, **arguments):
    return run(Mlp(), plan, **arguments)


def in_nnx(plan, x=X):
    module = shard_module(Block(nnx.Rngs(0)), plan, MESH)
    with jax.set_mesh(MESH):
        return under_jit(module, x)


BOTH = pytest.mark.parametrize('use', [in_linen, in_nnx])


@BOTH
def test_modules_that_do_not_exist(use):
    for name in 'fc3', 'fc2/deeper':
        with pytest.raises(ValueError, match=f"output_plan names '{name}'.*'fc1'.*'fc2'"):
            use(ShardingPlan({}, {name: P('data')}))
    with pytest.raises(ValueError, match=r"names 'fc3'.*Did you mean 'fc2'"):
        use(outputs(fc3=P('data')))


@BOTH
def test_specs_longer_than_the_output(use):
    with pytest.raises(ValueError, match=r"of 'fc2'.*'model'.*3 entries.*2 dimensions, \(8, 16\)"):
        use(outputs(fc2=P('data', None, 'model')))


@BOTH
def test_mesh_axes_that_do_not_exist_or_appear_twice(use):
    with pytest.raises(ValueError, match=r"fc2.*'dta'.*Did you mean 'data'"):
        use(outputs(fc2=P('dta')))
    with pytest.raises(ValueError, match=r"fc2.*'data' appears twice"):
        use(outputs(fc2=P('data', 'data')))


@BOTH
def test_logical_names_that_do_not_fit(use):
    with pytest.raises(ValueError, match=r"fc2.*no rule for logical axis 'batch'"):
        use(outputs(fc2=('batch', None)))
    with nn.logical_axis_rules([('batch', 'data')]):
        with pytest.raises(ValueError, match=r"fc2.*\('batch',\).*1 entry.*\(8, 16\)"):
            use(outputs(fc2=('batch',)))
        with pytest.raises(ValueError, match=r"fc2.*no rule for logical axis 'heads'"):
            use(outputs(fc2=('batch', 'heads')))


@BOTH
def test_sizes_that_do_not_divide(use):
    """jax would silently replicate the output."""
    x = np.ones((6, 16), 'float32')
    with nn.logical_axis_rules([('batch', 'data')]):
        for layout in ('batch', None), P('data', None):
            with pytest.raises(ValueError, match=r'fc2.*size 6 .* 4\b.*4 or 8'):
                use(outputs(fc2=layout), x=x)


@pytest.mark.parametrize(
    ('use', 'names'),
    [(in_linen, ['outer/fc2', 'outer.fc2']), (tower, ['blocks/0', 'blocks.0'])],
    ids=['linen', 'nnx'],
)
def test_one_module_by_two_paths(use, names):
    with pytest.raises(ValueError, match="'{}'.*'{}'.*same module".format(*names)):
        use(ShardingPlan({}, dict(zip(names, [P('data'), P('model')], strict=True))))


@pytest.mark.parametrize('name', ['blocks', 'by_name', 'blocks/0/fc1/kernel', 'by_name.top.bias'])
def test_nnx_paths_without_an_output(name):
    """Lists, dicts and parameters are not called, so their layout would be ignored."""
    with pytest.raises(ValueError, match=f"output_plan names '{name}'"):
        tower(ShardingPlan({}, {name: P('data')}))


def test_a_wrong_plan_leaves_the_module_unchanged():
    module = tower()
    with pytest.raises(ValueError, match='tops'):
        shard_module(module, ShardingPlan({}, {'by_name/top': P(), 'by_name/tops': P()}), MESH)
    assert type(module.by_name['top']) is nnx.Linear


def test_linen_modules_that_are_not_called():
    model, variables = Mlp(), variables_of(Mlp())
    plan, message = outputs(fc2=P('data')), "names 'fc2', but no such module was called"
    with pytest.raises(ValueError, match=message), constrain_outputs(plan):
        pass
    compiled = jax.jit(model.apply)
    compiled(variables, X)  # jax does not trace it again, which the message says
    with pytest.raises(ValueError, match=f'{message}.*traced'), constrain_outputs(plan):
        compiled(variables, X)


def test_errors_of_the_program_are_not_replaced():
    with pytest.raises(KeyError, match='mine'), constrain_outputs(outputs(fc2=P('data'))):
        raise KeyError('mine')


@pytest.mark.parametrize('plan', [{'fc2': P('data')}, None, 'a resolved plan'])
def test_values_that_are_not_a_sharding_plan(plan):
    """A resolved plan contains parameters only, so it does not lay out outputs."""
    if plan == 'a resolved plan':
        plan = ShardingPlan({}, {'fc2': P('data')}).resolve(variables_of(Mlp()), MESH)
    with pytest.raises(TypeError, match=r'ShardingPlan.*output_plan'):
        constrain_outputs(plan).__enter__()
