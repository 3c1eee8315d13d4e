"""Outputs of modules, laid out as a plan says, in linen and in nnx."""

import copy
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import PjitPartitioner, create_mesh
from partitioning.compat.pytorch import ShardingPlan, constrain_outputs, shard_module

pytestmark = pytest.mark.core

KEY = jax.random.key(0)
MESH = create_mesh((4, 2), ('data', 'model'))
OTHER = create_mesh((4,), ('model',), devices=jax.devices()[:4])
X = np.random.default_rng(0).normal(size=(8, 16)).astype('float32')


def outputs(**layouts):
    return ShardingPlan({}, {name.replace('__', '/'): spec for name, spec in layouts.items()})


def is_over(x, spec, mesh=MESH):
    return x.sharding.is_equivalent_to(NamedSharding(mesh, spec), x.ndim)


# linen. What is laid out inside is seen where it is the output of all, or by its constraints.


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name='dense')(x)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(16, name='fc2')(nn.relu(nn.Dense(64, name='fc1')(x)))


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


@functools.cache
def variables_of(model):
    return jax.jit(model.init)(KEY, X)


def run(model, plan, x=X, mesh=MESH, **arguments):
    """The output under a plan, and the one without."""
    variables = variables_of(model)

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x, **arguments)

    with jax.set_mesh(mesh):
        return jax.jit(apply)(variables, x), model.apply(variables, x, **arguments)


LINEN = {
    'a module': (Mlp(), 'fc2'),
    'the whole model': (Mlp(), ''),
    'a nested module': (Nested(), 'outer/dense'),
    'the module around': (Nested(), 'outer'),
    'a layer of a scan': (Scanned(), 'layers/inner/dense'),
    'all layers of a scan': (Scanned(), 'layers'),
    'a layer of a scan that is computed again': (Scanned(remat=True), 'layers/inner'),
    'a module that is computed again': (Remat(), 'outer/dense'),
    'a module of its own jit': (Jitted(), 'outer/dense'),
    'one of a list': (Setup(), 'layers_1'),
}


@pytest.mark.parametrize('name', LINEN)
def test_linen_modules(name):
    model, path = LINEN[name]
    out, expected = run(model, ShardingPlan({}, {path: P('data', 'model')}))
    assert is_over(out, P('data', 'model'))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('spec', [P(None, ('model', 'data')), P('model'), P(), P(('data',), None)])
def test_layouts_and_separators(spec):
    out, _ = run(Nested(), ShardingPlan({}, {'outer.dense': spec}))
    assert is_over(out, spec)


def constraints(plan, model, variables):
    """The specs that the program lays out arrays by, and their shapes, in its order."""

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x)

    with jax.set_mesh(MESH):
        jaxpr = jax.make_jaxpr(apply)(variables, X)
    return [
        (eqn.params['sharding'].spec, eqn.outvars[0].aval.shape)
        for eqn in jaxpr.eqns
        if eqn.primitive.name == 'sharding_constraint'
    ]


def test_only_the_modules_that_the_plan_names():
    model, variables = Mlp(), variables_of(Mlp())
    assert constraints(ShardingPlan({}), model, variables) == []
    of_both = outputs(fc2=P('data'), fc1=P('data', 'model'))
    assert constraints(of_both, model, variables) == [
        (P('data', 'model'), (8, 64)),
        (P('data'), (8, 16)),
    ]


def test_gradients_through_outputs():
    model, variables = Mlp(), variables_of(Mlp())

    def gradients_under(plan):
        def loss(variables):
            with constrain_outputs(plan):
                return jnp.mean(model.apply(variables, X) ** 2)

        return jax.jit(jax.grad(loss))

    plan = ShardingPlan({'fc1/kernel': P(None, 'model')}, {'fc1': P('data', 'model')})
    placed = shard_module(variables, plan, MESH)
    with jax.set_mesh(MESH):
        grads = gradients_under(plan)(placed)
    expected = gradients_under(ShardingPlan({}))(variables)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), grads, expected)


def test_other_methods_than_call():
    """Modules that they call are laid out; the model itself was not called."""
    out, expected = run(Setup(), outputs(layers_0=P('data')), method='first')
    assert is_over(out, P('data'))
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="output_plan names '', but no such module was called"):
        run(Setup(), ShardingPlan({}, {'': P('data')}), method='first')


class Several(nn.Module):
    """A tuple with a dict and None in it, of arrays or with a number and a scalar."""

    more: bool = False

    @nn.compact
    def __call__(self, x):
        arrays = x * 2, {'sum': x.sum(0), 'none': None}
        return (*arrays, 3, jnp.sum(x)) if self.more else arrays


def test_outputs_of_several_arrays():
    out, expected = run(Several(), ShardingPlan({}, {'': P('data')}))
    assert is_over(out[0], P('data', None)) and is_over(out[1]['sum'], P('data'))
    assert out[1]['none'] is None
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), out, expected)


@pytest.mark.parametrize('mesh_axes', [P(), P(None)])
def test_scalars_and_numbers_among_outputs(mesh_axes):
    """No layout fits a scalar but the empty one; a number has no layout, and no error is jax's."""
    plan = ShardingPlan({}, {'': mesh_axes})
    if mesh_axes == P():
        out, _ = run(Several(more=True), plan)
        assert out[2] == 3 and is_over(out[0], P())
        return
    with pytest.raises(ValueError, match=r"output_plan of ''.*the array has 0"):
        run(Several(more=True), plan)


def test_logical_names():
    """By the rules of the context, which a partitioned function sets."""
    rules = [('batch', 'data'), ('mlp', 'model')]
    plan = outputs(fc1=('batch', 'mlp'), fc2=['batch', None])
    model, variables = Mlp(), variables_of(Mlp())
    with nn.logical_axis_rules(rules):
        found = constraints(plan, model, variables)
    assert found == [(P('data', 'model'), (8, 64)), (P('data', None), (8, 16))]

    def apply(variables, x):
        with constrain_outputs(plan):
            return model.apply(variables, x)

    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=rules)
    out = partitioner.partition(apply, (None, P('data')), P('data'))(variables, X)
    np.testing.assert_allclose(out, model.apply(variables, X), rtol=1e-5, atol=1e-5)


def test_shardings_as_layouts():
    out, _ = run(Mlp(), outputs(fc2=NamedSharding(MESH, P('data'))))
    assert is_over(out, P('data'))
    with pytest.raises(ValueError, match=r'fc2.*mesh model 4.*data 4 x model 2'):
        run(Mlp(), outputs(fc2=NamedSharding(OTHER, P('model'))))


def test_without_a_mesh_nothing_is_laid_out():
    model, variables = Mlp(), variables_of(Mlp())
    with constrain_outputs(outputs(fc2=P('data'))):
        out = model.apply(variables, X)
    assert out.sharding.num_devices == 1


def test_plans_within_plans():
    model, variables = Mlp(), variables_of(Mlp())

    def apply(variables, x):
        with constrain_outputs(outputs(fc1=P('data'))), constrain_outputs(outputs(fc2=P('model'))):
            return model.apply(variables, x)

    with jax.set_mesh(MESH):
        jaxpr = str(jax.make_jaxpr(apply)(variables, X))
        assert is_over(jax.jit(apply)(variables, X), P('model'))
    assert jaxpr.count('sharding_constraint') == 2
    model.apply(variables, X)  # and none is left behind


# Each process reads its rows.


def test_rows_of_an_output():
    """Global in the program, by process outside: what `to_global` makes, `to_local` gives back."""
    model, variables = Mlp(), variables_of(Mlp())
    plan = ShardingPlan({}, {'fc2': P('data')}, return_local_tensor=['fc2'])
    partitioner = PjitPartitioner(mesh=MESH, logical_axis_rules=[('batch', 'data')])

    def apply(variables, x):
        with constrain_outputs(plan):
            out = model.apply(variables, x)
        assert out.shape == (8, 16), 'the program sees all rows'
        return out

    rows = X[np.asarray(partitioner.get_data_layout(8).row_indices)]
    with jax.set_mesh(MESH):
        for step in range(3):
            out = jax.jit(apply)(variables, partitioner.to_global(rows + step, 8))
            assert out.shape == (8, 16)
            assert {s.data.shape for s in out.addressable_shards} == {(2, 16)}
            expected = model.apply(variables, rows + step)
            np.testing.assert_allclose(partitioner.to_local(out), expected, rtol=1e-4, atol=1e-4)


# nnx.


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.fc1 = nnx.Linear(16, 64, rngs=rngs)
        self.fc2 = nnx.Linear(64, 16, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


class Tower(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])
        self.by_name = nnx.Dict(top=nnx.Linear(16, 16, rngs=rngs))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.by_name['top'](self.drop(x))


def tower(plan=None, seed=0):
    module = Tower(nnx.Rngs(seed))
    module.eval()
    return module if plan is None else shard_module(module, plan, MESH)


TOP = ShardingPlan({'by_name/top/kernel': P(None, 'model')}, {'by_name/top': P('data', 'model')})


def under_jit(module, x):
    return nnx.jit(lambda m, x: m(x))(module, x)


def merged(module, x):
    graphdef, state = nnx.split(module)
    return jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))(state, x)


def rematerialized(module, x):
    return nnx.jit(nnx.remat(lambda m, x: m(x)))(module, x)


WAYS = {
    'nnx.jit': under_jit,
    'split and merge': merged,
    'nnx.remat': rematerialized,
    'nnx.clone': lambda m, x: under_jit(nnx.clone(m), x),
    'copy.deepcopy': lambda m, x: under_jit(copy.deepcopy(m), x),
    'jax.jit': lambda m, x: jax.jit(lambda m, x: m(x))(m, x),
}


@pytest.mark.parametrize('way', WAYS)
@pytest.mark.parametrize('path', ['by_name/top', 'by_name.top', ''])
def test_nnx_modules(path, way):
    module = tower(ShardingPlan({'by_name/top/kernel': P('data')}, {path: P('data', 'model')}))
    with jax.set_mesh(MESH):
        out = WAYS[way](module, X)
    assert is_over(out, P('data', 'model'))
    np.testing.assert_allclose(out, tower()(X), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('path', ['blocks/0', 'blocks/1/fc2', 'blocks.0.fc1'])
def test_nnx_modules_within(path):
    module, plain = tower(ShardingPlan({}, {path: P('data', 'model')})), tower()
    for part in path.replace('.', '/').split('/'):
        module, plain = (
            m[int(part)] if part.isdigit() else getattr(m, part) for m in (module, plain)
        )
    x = np.ones((8, 64 if path.endswith('fc2') else 16), 'float32')
    with jax.set_mesh(MESH):
        out = under_jit(module, x)
    assert is_over(out, P('data', 'model')) and isinstance(module, type(plain))
    assert type(module).__name__ == type(plain).__name__
    np.testing.assert_allclose(out, plain(x), rtol=1e-4, atol=1e-4)


def test_nnx_gradients_and_steps():
    """Those of the model on one device."""
    module, plain = tower(TOP), tower()

    def step(m, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(m)
        optimizer.update(m, grads)
        return loss

    losses = []
    for m, mesh in (module, MESH), (plain, None):
        optimizer = nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param)
        run = nnx.jit(step)
        if mesh is None:
            losses.append([float(run(m, optimizer, X)) for _ in range(3)])
            continue
        with jax.set_mesh(mesh):
            losses.append([float(run(m, optimizer, X)) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    assert losses[0][2] < losses[0][0]
    assert module.by_name['top'].kernel[...].sharding.spec == P(None, 'model')


def test_nnx_scan():
    @nnx.vmap
    def layers(key):
        return nnx.Linear(16, 16, rngs=nnx.Rngs(key))

    class Stack(nnx.Module):
        def __init__(self):
            self.layers = layers(jax.random.split(KEY, 3))

        def __call__(self, x):
            body = nnx.scan(lambda x, m: m(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return body(x, self.layers)

    plan = ShardingPlan({'layers/kernel': P(None, None, 'model')}, {'layers': P('data', 'model')})
    stack = shard_module(Stack(), plan, MESH)
    assert stack.layers.kernel[...].sharding.spec == P(None, None, 'model')
    with jax.set_mesh(MESH):
        out = under_jit(stack, X)
    assert is_over(out, P('data', 'model'))
    np.testing.assert_allclose(out, Stack()(X), rtol=1e-4, atol=1e-5)


def test_nnx_models_of_one_class():
    """Only the module that was given: not its class, nor another model of it."""
    sharded, plain = tower(TOP), tower()
    assert type(plain.by_name['top']) is nnx.Linear
    with jax.set_mesh(MESH):
        assert is_over(under_jit(sharded, X), P('data', 'model'))
        assert under_jit(plain, X).sharding.is_fully_replicated


def test_nnx_modules_laid_out_where_no_mesh_is_set():
    """`shard_module` was given the mesh: the layout of outputs is not forgotten."""
    assert is_over(under_jit(tower(TOP), X), P('data', 'model'))


def test_a_second_plan_takes_the_place_of_the_first():
    module = shard_module(tower(TOP), ShardingPlan({}, {'by_name/top': P('model')}), MESH)
    with jax.set_mesh(MESH):
        assert is_over(under_jit(module, X), P('model'))


def test_explicit_axes():
    mesh = create_mesh((4, 2), ('data', 'model'), axis_types=AxisType.Explicit)
    module = shard_module(tower(), ShardingPlan({}, {'': P('data', 'model')}), mesh)
    with jax.set_mesh(mesh):
        out = under_jit(module, X)
    assert out.sharding == NamedSharding(mesh, P('data', 'model'))
    np.testing.assert_allclose(out, tower()(X), rtol=1e-4, atol=1e-4)


# Held wrong.


def in_linen(plan, **arguments):
    return run(Mlp(), plan, **arguments)


def in_nnx(plan, x=X):
    module = shard_module(Block(nnx.Rngs(0)), plan, MESH)
    with jax.set_mesh(MESH):
        return under_jit(module, x)


BOTH = pytest.mark.parametrize('use', [in_linen, in_nnx])


@BOTH
def test_modules_that_are_not_there(use):
    for name in 'fc3', 'fc2/deeper':
        with pytest.raises(ValueError, match=f"output_plan names '{name}'.*'fc1'.*'fc2'"):
            use(ShardingPlan({}, {name: P('data')}))
    with pytest.raises(ValueError, match=r"names 'fc3'.*Did you mean 'fc2'"):
        use(outputs(fc3=P('data')))


@BOTH
def test_layouts_of_another_rank(use):
    with pytest.raises(ValueError, match=r"of 'fc2'.*'model'.*has 2, \(8, 16\)"):
        use(outputs(fc2=P('data', None, 'model')))


@BOTH
def test_names_of_another_number(use):
    """As everywhere, one a dimension, and the module is named."""
    with (
        nn.logical_axis_rules([('batch', 'data')]),
        pytest.raises(ValueError, match=r"fc2.*\('batch',\).*\(8, 16\)"),
    ):
        use(outputs(fc2=('batch',)))


@BOTH
def test_names_without_rules(use):
    with pytest.raises(ValueError, match=r"fc2.*no rule for logical axis 'batch'"):
        use(outputs(fc2=('batch', None)))
    with (
        nn.logical_axis_rules([('batch', 'data')]),
        pytest.raises(ValueError, match=r"fc2.*no rule for logical axis 'heads'"),
    ):
        use(outputs(fc2=('batch', 'heads')))


@BOTH
def test_mesh_axes_that_are_not_there(use):
    with pytest.raises(ValueError, match=r"fc2.*'dta'.*Did you mean 'data'"):
        use(outputs(fc2=P('dta')))
    with pytest.raises(ValueError, match=r"fc2.*'data' twice"):
        use(outputs(fc2=P('data', 'data')))


@BOTH
def test_sizes_that_do_not_divide(use):
    """By spec as by name: else jax replicates the output without a word."""
    x = np.ones((6, 16), 'float32')
    with nn.logical_axis_rules([('batch', 'data')]):
        for layout in ('batch', None), P('data', None):
            with pytest.raises(ValueError, match='6 does not divide by 4'):
                use(outputs(fc2=layout), x=x)


@pytest.mark.parametrize(
    ('use', 'names'),
    [
        (lambda plan: run(Nested(), plan), ['outer/dense', 'outer.dense']),
        (lambda plan: tower(plan), ['blocks/0', 'blocks.0']),
    ],
    ids=['linen', 'nnx'],
)
def test_one_module_by_two_paths(use, names):
    with pytest.raises(ValueError, match="'{}'.*'{}'".format(*names)):
        use(ShardingPlan({}, dict(zip(names, [P('data'), P('model')], strict=True))))


@pytest.mark.parametrize('name', ['blocks', 'by_name', 'blocks/0/fc1/kernel', 'by_name.top.bias'])
def test_nnx_paths_that_have_no_output(name):
    """Lists, dicts and parameters are not called: their layout would be ignored."""
    with pytest.raises(ValueError, match=f"output_plan names '{name}'"):
        tower(ShardingPlan({}, {name: P('data')}))


def test_a_module_is_left_as_it_was_where_a_plan_is_wrong():
    module = tower()
    with pytest.raises(ValueError, match='tops'):
        shard_module(module, ShardingPlan({}, {'by_name/top': P(), 'by_name/tops': P()}), MESH)
    assert type(module.by_name['top']) is nnx.Linear


def test_linen_modules_that_are_not_called():
    model, variables = Mlp(), variables_of(Mlp())
    plan, nowhere = outputs(fc2=P('data')), "names 'fc2', but no such module was called"
    with pytest.raises(ValueError, match=nowhere), constrain_outputs(plan):
        pass
    compiled = jax.jit(model.apply)
    compiled(variables, X)  # it is not traced again, which the message must tell
    with pytest.raises(ValueError, match=f'{nowhere}.*traced'), constrain_outputs(plan):
        compiled(variables, X)


def test_errors_of_the_program_come_through():
    with pytest.raises(KeyError, match='mine'), constrain_outputs(outputs(fc2=P('data'))):
        raise KeyError('mine')


@pytest.mark.parametrize('plan', [{'fc2': P('data')}, None, ShardingPlan({}).plan])
def test_what_is_no_plan(plan):
    with pytest.raises((TypeError, ValueError), match='ShardingPlan'):
        constrain_outputs(plan).__enter__()


def test_a_resolved_plan_has_no_outputs():
    """It is a plan of parameters: nobody is to think that it lays out outputs too."""
    plan = ShardingPlan({}, {'fc2': P('data')})
    resolved = plan.resolve(variables_of(Mlp()), MESH)
    with pytest.raises((TypeError, ValueError), match='ShardingPlan'):
        constrain_outputs(resolved).__enter__()


def test_local_tensors_without_a_layout():
    plan = ShardingPlan({}, {'fc2': P('data')}, ['fc1'])
    for use in in_linen, in_nnx:
        with pytest.raises(ValueError, match=r"'fc1'.*no layout in output_plan: add \{'fc1': P"):
            use(plan)
