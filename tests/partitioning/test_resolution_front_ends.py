"""Every front-end gives the same spec, or refuses the same names.

The front-ends are linen boxes, T5X's `params_axes`, nnx variables, path rules, and states that name
their axes themselves.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx, struct
from flax.linen.partitioning import AxisMetadata
from hypothesis import example, given, settings, strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from test_resolution_properties import AXES, POLICIES, RULES, SIZES, Case, cases

from partitioning import AxisNames, AxisRules, PjitPartitioner, logical_to_mesh_axes

pytestmark = pytest.mark.core


@functools.cache
def mesh_of(*sizes):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(AXES))


SMALL_MESHES = [(2, 2, 2), (1, 4, 2), (3, 2, 1), (1, 1, 7), (2, 1, 3), (5, 1, 1)]


@struct.dataclass
class NamesItself:
    """A state without an optimizer that names its axes itself, like T5X's InferenceState."""

    params: dict
    names: AxisNames | P = struct.field(pytree_node=False)

    def as_logical_axes(self):
        return self.replace(params={'w': self.names})


def by_name(names, shape, rules, mesh):
    return logical_to_mesh_axes(names, rules, mesh=mesh, shape=shape)


def by_state(make_state, overrides=None):
    def front_end(names, shape, rules, mesh):
        path_rules = () if overrides is None else [(overrides, names)]
        partitioner = PjitPartitioner(mesh, AxisRules(rules, names=path_rules))
        state = make_state(jax.ShapeDtypeStruct(shape, jnp.float32), names)
        axes = partitioner.get_mesh_axes(state)
        spec = (axes.params if isinstance(axes, NamesItself) else axes['params'])['w']
        return spec.get_value() if isinstance(spec, nnx.Variable) else spec

    return front_end


def variable(array, names):
    with nnx.use_eager_sharding(False):
        return {'params': {'w': nnx.Param(array, out_sharding=names)}}


FRONT_ENDS = {
    'linen': by_state(lambda x, names: {'params': {'w': nn.LogicallyPartitioned(x, names)}}),
    'T5X': by_state(
        lambda x, names: {'params': {'w': x}, 'params_axes': {'w_axes': AxisMetadata(names)}}
    ),
    'nnx': by_state(variable),
    'path rules': by_state(lambda x, _: {'params': {'w': x}}, overrides='w'),
    'as_logical_axes': by_state(lambda x, names: NamesItself({'w': x}, AxisNames(*names))),
    'as_logical_axes with specs': by_state(lambda x, names: NamesItself({'w': x}, P(*names))),
}


def answer(front_end, *args):
    try:
        return front_end(*args)
    except ValueError:
        return ValueError


@settings(max_examples=100)
@given(cases(), st.sampled_from(SMALL_MESHES), st.sampled_from(POLICIES), st.booleans())
@example(Case(names=(), rules=[('a', ())], mesh={'x': 2}, shape=()), (2, 2, 2), 'error', False)
def test_every_front_end_has_the_same_answer(case, sizes, policy, lenient):
    rules = AxisRules(case.rules, 'replicate' if lenient else 'error', policy)
    args = (case.names, case.shape, rules, mesh_of(*sizes))
    expected = answer(by_name, *args)
    for name, front_end in FRONT_ENDS.items():
        assert answer(front_end, *args) == expected, name


@pytest.mark.parametrize('front_end', FRONT_ENDS)
@pytest.mark.parametrize(
    'names, words',
    [
        (('embed',), ["logical axes ('embed',) has 1 entr", '(8, 8)']),
        (('embed', 'b', None), ["logical axes ('embed', 'b', None) has 3 entr", '(8, 8)']),
        (('embed', 'embed'), ["'embed'"]),
        (('embd', None), ["'embd' of ('embd', None)", "Did you mean 'embed'?", "('embd', None)"]),
        (('stray', None), ["('stray', 'expert')", 'the mesh is x 2 x y 2 x z 2']),
    ],
    ids=['too few', 'too many', 'twice', 'no rule', 'no such mesh axis'],
)
def test_every_front_end_refuses_wrong_names(front_end, names, words):
    rules = [('embed', 'x'), ('b', 'y'), ('stray', 'expert')]
    mesh = mesh_of(2, 2, 2)
    assert FRONT_ENDS[front_end](('embed', 'b'), (8, 8), rules, mesh) == P('x', 'y')
    if front_end in ('linen', 'nnx') and len(names) < 2:
        assert FRONT_ENDS[front_end](names, (8, 8), rules, mesh) == P('x', None)
        return
    with pytest.raises(ValueError, match='params/w') as error:
        FRONT_ENDS[front_end](names, (8, 8), rules, mesh)
    assert not [word for word in words if word not in str(error.value)]


# Names of linen's Partitioned and of nnx may be mesh axes.


def partitioned(array, names):
    return {'params': {'w': nn.Partitioned(array, names)}}


AXES_AS_NAMES = {'linen': by_state(partitioned), 'nnx': by_state(variable)}


@pytest.mark.parametrize('front_end', ['linen', 'T5X', 'path rules'])
def test_logical_names_cannot_be_mesh_axes(front_end):
    with pytest.raises(ValueError, match="no rule for logical axis 'x'"):
        FRONT_ENDS[front_end](('x', None), (8, 8), [('a', 'y')], mesh_of(2, 2, 2))


MIXED = st.lists(st.sampled_from([*'abc', *AXES]), unique=True, min_size=1, max_size=3).map(tuple)


@settings(max_examples=100)
@given(MIXED, RULES, st.sampled_from(SMALL_MESHES), st.data())
def test_mesh_axes_as_names_have_the_same_answer_and_jax_accepts_it(names, rules, sizes, data):
    shape = data.draw(st.tuples(*[SIZES] * len(names)))
    policies = {'on_unmatched': 'replicate', 'on_indivisible': 'replicate'}
    args = (names, shape, AxisRules(rules, **policies), mesh_of(*sizes))
    spec = AXES_AS_NAMES['linen'](*args)
    assert AXES_AS_NAMES['nnx'](*args) == spec
    mesh = dict(zip(AXES, sizes, strict=True))
    # Named mesh axes win over all rules, as if each had a rule at the start of the list.
    named = [(name, name) for name in names if name in AXES]
    logical = logical_to_mesh_axes(names, [*named, *rules], mesh=mesh, shape=shape, **policies)
    assert spec == logical
    NamedSharding(args[-1], spec).shard_shape(shape)
