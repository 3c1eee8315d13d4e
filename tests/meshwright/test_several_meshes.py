"""Arrays of one function on several meshes over the same devices, which jax allows."""

import jax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from plain_steps import mesh_of

from meshwright import audit, forecast, lint
from meshwright.calls.other_meshes import spec_on

N = 64


LINE, PLANE, TALL = mesh_of(x=8), mesh_of(a=2, b=4), mesh_of(c=4, d=2)
CUBE = mesh_of(i=2, j=2, k=2)


@pytest.mark.parametrize(
    ('mesh', 'spec', 'other', 'expected'),
    [
        (LINE, P('x'), PLANE, P(('a', 'b'))),
        (LINE, P(None, 'x'), PLANE, P(None, ('a', 'b'))),
        (TALL, P('c', 'd'), CUBE, P(('i', 'j'), 'k')),
        (PLANE, P('a', 'b'), CUBE, P('i', ('j', 'k'))),
        (CUBE, P('j', 'k'), PLANE, None),
        (TALL, P('c'), PLANE, None),
    ],
)
def test_a_layout_is_stated_in_the_axes_of_another_mesh(mesh, spec, other, expected):
    """Jax agrees that both lay out an array alike; None is right if no spec of that mesh does."""
    given = NamedSharding(mesh, spec)
    assert spec_on(given, other) == expected
    if expected is not None:
        assert given.is_equivalent_to(NamedSharding(other, expected), 2)


@pytest.mark.parametrize(
    ('mesh', 'axis', 'count'),
    [(LINE, 'x', 8), (TALL, 'c', 4)],
    ids=['in its axes', 'not in its axes'],
)
def test_a_function_of_arrays_on_several_meshes(mesh, axis, count):
    def struct(mesh, *spec):
        return jax.ShapeDtypeStruct((N, N), 'float32', sharding=NamedSharding(mesh, P(*spec)))

    def step(w, v, x):
        return w * 0.9, v * 0.9, (x @ w @ v).sum()

    fn = jax.jit(step, donate_argnums=(0, 1))
    args = struct(mesh, axis), struct(PLANE, 'a', 'b'), struct(PLANE, 'b')
    held = {row.path: row.bytes_per_device for row in audit(fn, *args).arguments}
    whole = 4 * N * N
    assert held == {'w': whole // count, 'v': whole // 8, 'x': whole // 4}
    compiled = fn.lower(*args).compile().memory_analysis()
    assert forecast(fn, *args).memory.arguments == compiled.argument_size_in_bytes
    assert 'changed layout' not in {finding.kind for finding in lint(fn, *args)}
