"""Activations are laid out by name or spec, without a mesh and over axes of every type."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from partitioning import (
    constrain,
    create_mesh,
    global_mesh_defined,
    with_sharding_constraint,
)
from partitioning.constraints import lay_out
from partitioning.rules import PaddedSpec

pytestmark = [pytest.mark.core, pytest.mark.smoke]

RULES = [('batch', 'data'), ('embed', 'model'), ('length', None)]
X = np.arange(64.0, dtype=np.float32).reshape(8, 8)


def mesh_of(axis_type):
    return jax.make_mesh((4, 2), ('data', 'model'), axis_types=(axis_type,) * 2)


MESHES = pytest.mark.parametrize('axis_type', [AxisType.Auto, AxisType.Explicit])


def test_without_a_mesh_nothing_happens():
    x = jnp.asarray(X)
    assert not global_mesh_defined()
    assert constrain(x, ('batch', 'embed'), RULES) is x
    assert with_sharding_constraint(x, P('data')) is x
    assert jax.jit(lambda x: constrain(x, ('batch', 'embed'), RULES)).trace(x).jaxpr.eqns == []


@MESHES
def test_constrain_lays_out_by_name(axis_type):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        assert global_mesh_defined()
        y = jax.jit(lambda x: constrain(x * 2, ('batch', 'embed'), RULES))(X)
    np.testing.assert_array_equal(y, X * 2)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, P('data', 'model')), 2)
    assert not global_mesh_defined()


@MESHES
def test_with_sharding_constraint_lays_out_by_spec(axis_type):
    mesh = mesh_of(axis_type)
    with jax.set_mesh(mesh):
        a, b, c = jax.jit(
            lambda x: with_sharding_constraint(
                (x, {'b': x + 1}, x + 2), (P('data'), P(None, 'model'), None)
            )
        )(X)
    for y, spec in [(a, P('data')), (b['b'], P(None, 'model')), (c, P())]:
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@MESHES
@pytest.mark.parametrize(
    'names, rules, message',
    [
        (('batch', 'embd'), RULES, "'embd'.*'embed'"),
        (('batch', 'embed'), [('batch', 'data'), ('embed', 'modle')], "'modle'"),
        (('batch',), RULES, "'batch',.* has 1 entry.* 2 dimensions, .8, 8"),
        (('batch', 'batch'), RULES, 'two dimensions'),
        (('batch', 'embed'), None, 'rules'),
        ('batch', RULES, r"one tuple, not 'batch': write constrain\(x, \('batch',\)\)"),
        ('batch', 'embed', r"not 'batch', 'embed': write constrain\(x, \('batch', 'embed'\)\)"),
        (P('data', 'model'), RULES, r"'data' is an axis.*_constraint\(x, P\('data', 'model'\)\)"),
        (('data', None), RULES, r"'data' is an axis.*_constraint\(x, P\('data', None\)\)"),
    ],
)
def test_errors_of_constrain(axis_type, names, rules, message):
    with jax.set_mesh(mesh_of(axis_type)), pytest.raises(ValueError, match=message):
        jax.jit(functools.partial(constrain, names=names, rules=rules))(X)


@pytest.mark.parametrize('types', ['auto', 'explicit', ('explicit', 'auto'), ('auto', 'explicit')])
def test_arrays_outside_a_function_are_moved(types):
    """Arrays are moved along every axis of the spec, wherever they were created."""
    mesh, made_before = create_mesh((4, 2), ('x', 'y'), axis_types=types), jnp.ones((8, 4))
    with jax.set_mesh(mesh):
        for spec in (P('x', None), P(None, 'y'), P('x', 'y'), P('y', 'x')):
            for x in (made_before, jnp.zeros((8, 4)), np.ones((8, 4))):
                moved = with_sharding_constraint(x, spec)
                assert moved.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)
                np.testing.assert_array_equal(moved, x)
        sharded = with_sharding_constraint(made_before, P('x', None))
        kept = with_sharding_constraint(sharded, P(P.UNCONSTRAINED, 'y'))
        assert kept.sharding.is_equivalent_to(NamedSharding(mesh, P('x', 'y')), 2)


@pytest.mark.filterwarnings('ignore::DeprecationWarning')
def test_the_deprecated_mesh_context_is_an_error():
    x, old = jnp.ones((8, 8)), mesh_of(AxisType.Auto)
    with old:
        for use in (
            lambda x: with_sharding_constraint(x, P('data')),
            lambda x: constrain(x, ('batch', 'embed'), RULES),
        ):
            for call in (use, jax.jit(use)):
                with pytest.raises(ValueError, match=r'with jax\.set_mesh\(mesh\)'):
                    call(x)
    assert with_sharding_constraint(x, P('data')) is x


@MESHES
def test_specs_that_do_not_fit_the_array_are_errors(axis_type):
    """jax would ignore some of these specs inside jit."""
    with jax.set_mesh(mesh_of(axis_type)):
        for spec, message in (
            (P('data'), r'9 is not divisible by 4.*8 or 12'),
            (P(None, 'data'), r'has 2 entries, but the array has 1 dimension,'),
            (P('dta'), r"'dta'.*Did you mean 'data'"),
        ):
            for call in (
                lambda x, spec=spec: with_sharding_constraint(x, spec),
                jax.jit(lambda x, spec=spec: with_sharding_constraint(x, spec)),
            ):
                with pytest.raises(ValueError, match=message):
                    call(jnp.ones(9))


# lay_out with a mesh given explicitly.


def test_lay_out_over_axes_of_mixed_types():
    mesh = create_mesh((4, 2), ('x', 'y'), axis_types=('explicit', 'auto'))
    both = P(('x', 'y'), None)
    assert lay_out(X, both, mesh).sharding.is_equivalent_to(NamedSharding(mesh, both), 2)
    traced = jax.jit(lambda x: lay_out(x, both, mesh) * 2)
    with jax.set_mesh(mesh):
        y = traced(X)
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, both), 2)
        np.testing.assert_array_equal(y, X * 2)
        with pytest.raises(ValueError, match=r"\('y', 'x'\).*Explicit axes before Auto"):
            jax.jit(lambda x: lay_out(x, P(('y', 'x'))))(X)
    with pytest.raises(ValueError, match=r'x 4 x y 2.*Explicit, Auto.*set_mesh'):
        jax.jit(lambda x: lay_out(x, P('x'), mesh))(X)


def test_a_padded_spec_is_its_inside_in_functions_and_its_outside_elsewhere():
    mesh, spec = mesh_of(AxisType.Auto), PaddedSpec(P(None, None), P(None, 'model'))
    x = X[:, :7]
    assert lay_out(x, spec, mesh).sharding.is_fully_replicated
    seen = []

    @jax.jit
    def fn(x):
        y = lay_out(x * 2, spec, mesh)
        jax.debug.inspect_array_sharding(y, callback=seen.append)
        return y + 1

    with jax.set_mesh(mesh):
        y = fn(x)
        jax.effects_barrier()  # the callback may run after the call returns
    np.testing.assert_array_equal(y, x * 2 + 1)
    (found,) = seen
    assert found.is_equivalent_to(NamedSharding(mesh, P(None, 'model')), 2)


def test_a_padded_spec_needs_auto_axes():
    with pytest.raises(ValueError, match=r"'pad'.*Auto.*Explicit"):
        lay_out(X, PaddedSpec(P(None), P('data')), mesh_of(AxisType.Explicit))
