"""Output plans that are refused, for linen and for nnx modules."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from modules_with_outputs import MESH, Block, Mlp, X, outputs, run, tower, under_jit, variables_of

from partitioning.compat.pytorch import ShardingPlan, constrain_outputs, shard_module

pytestmark = pytest.mark.core


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


@BOTH
def test_local_tensors_without_a_layout(use):
    plan = ShardingPlan({}, {'fc2': P('data')}, ['fc1'])
    with pytest.raises(ValueError, match=r"'fc1'.*no layout in output_plan.*\{'fc1': P"):
        use(plan)


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
