"""Properties of the resolution of rules: a slow resolver, jax and linen as oracles, reasons, doors.

The slow resolver tries every assignment of rules to dimensions and keeps the one that is stable.
"""

import collections
import contextlib
import functools
import itertools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from partitioning import AxisRules, PjitPartitioner, logical_to_mesh_axes, resolve_axes
from partitioning.rules import PaddedSpec, try_resolve

pytestmark = pytest.mark.core

AXES = 'xyz'
POLICIES = ('error', 'replicate', 'drop_axis', 'pad')
GIVE_WAY = POLICIES[1:]


def over(mesh_axes):
    """The mesh axes of one dimension, however they are written."""
    if mesh_axes is None:
        return ()
    return (mesh_axes,) if isinstance(mesh_axes, str) else tuple(mesh_axes)


def axes_of(spec):
    return [over(entry) for entry in spec]


def ways(mesh_axes, mesh):
    return math.prod(mesh[axis] for axis in over(mesh_axes))


# The slow resolver, from the words of the design: rules are tried in order, the first that matches
# a dimension wins, a mesh axis is used once per array, a rule with any taken axis is skipped whole.


def slow_winners(names, rules):
    """For each dimension the place of the rule that wins it, or None."""
    candidates = [[i for i, rule in enumerate(rules) if rule[0] == name] for name in names]

    def blocked(i, winners):
        """Whether a rule before rule i has won one of its axes."""
        earlier = [w for w in winners if w is not None and w < i]
        return any(set(over(rules[i][1])) & set(over(rules[w][1])) for w in earlier)

    def stable(winners):
        return all(
            (won is None or not blocked(won, winners))
            and all(blocked(i, winners) for i in own if won is None or i < won)
            for own, won in zip(candidates, winners, strict=True)
        )

    tried = itertools.product(*([None, *own] for own in candidates))
    (winners,) = [w for w in tried if stable(w)]
    return winners


def slow_wanted(names, rules):
    return [() if w is None else over(rules[w][1]) for w in slow_winners(names, rules)]


def slow_indivisible(names, rules, mesh, shape):
    wanted = slow_wanted(names, rules)
    return [size % ways(axes, mesh) != 0 for axes, size in zip(wanted, shape, strict=True)]


def slow_unmatched(names, rules):
    return [name is not None and name not in dict(rules) for name in names]


def most_ways(axes, size, mesh):
    """The most parts that a subset of the axes splits a size into evenly."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(axes, n) for n in range(len(axes) + 1)
    )
    return max(ways(s, mesh) for s in subsets if size % ways(s, mesh) == 0)


# Cases.

MESH_AXES = st.one_of(
    st.none(),
    st.sampled_from(AXES),
    st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple),
)
RULES = st.lists(st.tuples(st.sampled_from('abcdef'), MESH_AXES), max_size=9)
MESHES = st.fixed_dictionaries({axis: st.integers(1, 6) for axis in AXES})
SIZES = st.one_of(st.integers(0, 13), st.sampled_from([16, 24, 30, 60, 61, 120, 210]))
DIVISIBLE = 60**3  # by any three of the sizes of axes
Case = collections.namedtuple('Case', 'names rules mesh shape')


@st.composite
def lists_of_names(draw, known, max_size=4):
    """Names, each on one dimension, and dimensions without one."""
    names = draw(st.lists(st.sampled_from(known), unique=True, max_size=max_size))
    bare = draw(st.integers(0, 2))
    return tuple(draw(st.permutations([*names, *[None] * bare]))[:max_size])


@st.composite
def cases(draw, matched=False):
    """Names, rules, mesh and shape; `matched`: every name has a rule."""
    rules = draw(RULES)
    known = sorted(dict(rules)) if matched else 'abcdef'
    names = draw(lists_of_names(known)) if known else (None,) * draw(st.integers(0, 2))
    shape = draw(st.tuples(*[SIZES] * len(names)))
    return Case(names, rules, draw(MESHES), shape)


def under(function, case, policy, on_unmatched='replicate'):
    """A case resolved under a policy."""
    policies = {'on_unmatched': on_unmatched, 'on_indivisible': policy}
    return function(case.names, case.rules, mesh=case.mesh, shape=case.shape, **policies)


spec_under = functools.partial(under, logical_to_mesh_axes)
reasons_under = functools.partial(under, resolve_axes)
many = functools.partial(settings, deadline=None)


# a) The slow resolver.


@many(max_examples=1200)
@given(lists_of_names('abcdef'), RULES)
def test_without_a_mesh_as_the_slow_resolver(names, rules):
    spec = logical_to_mesh_axes(names, rules, on_unmatched='replicate')
    assert axes_of(spec) == slow_wanted(names, rules)


@many(max_examples=1200)
@given(cases())
def test_errors_exactly_where_the_slow_resolver_has_one(case):
    indivisible = any(slow_indivisible(*case))
    unmatched = any(slow_unmatched(case.names, case.rules))
    for on_unmatched, wrong in [('error', indivisible or unmatched), ('replicate', indivisible)]:
        raises = pytest.raises(ValueError) if wrong else contextlib.nullcontext()
        with raises:
            spec = spec_under(case, 'error', on_unmatched)
            assert axes_of(spec) == slow_wanted(case.names, case.rules)


@many(max_examples=1200)
@given(cases(), st.sampled_from(GIVE_WAY))
def test_policies_as_the_slow_resolver(case, policy):
    spec = spec_under(case, policy)
    wanted = slow_wanted(case.names, case.rules)
    indivisible = slow_indivisible(*case)
    assert isinstance(spec, PaddedSpec) == (policy == 'pad' and any(indivisible))
    outside = axes_of(spec.outside if isinstance(spec, PaddedSpec) else spec)
    for dim, axes in enumerate(wanted):
        if not indivisible[dim]:
            assert outside[dim] == axes
        elif policy == 'drop_axis':
            assert outside[dim] in itertools.combinations(axes, len(outside[dim]))
            most = most_ways(axes, case.shape[dim], case.mesh)
            assert ways(outside[dim], case.mesh) == most
        else:
            assert outside[dim] == ()
    if isinstance(spec, PaddedSpec):
        assert axes_of(spec.inside) == wanted


@many(max_examples=400)
@given(cases())
def test_problems_are_what_would_be_raised(case):
    _, problems = try_resolve(case.names, case.rules, mesh=case.mesh, shape=case.shape)
    kinds = collections.Counter(problem.kind for problem in problems)
    assert kinds == collections.Counter(
        unmatched=sum(slow_unmatched(case.names, case.rules)),
        indivisible=sum(slow_indivisible(*case)),
    )
    if problems:
        with pytest.raises(ValueError) as error:
            spec_under(case, 'error', 'error')
        assert str(error.value) == problems[0].message


@many(max_examples=200)
@given(cases(), st.data())
def test_a_name_on_two_dimensions_is_an_error_under_every_policy(case, data):
    used = [name for name in case.names if name is not None]
    if not used:
        return
    names = (*case.names, data.draw(st.sampled_from(used)))
    twice = case._replace(names=names, shape=(*case.shape, 1))
    with pytest.raises(ValueError, match='two dimensions'):
        spec_under(twice, data.draw(st.sampled_from(POLICIES)))


@many(max_examples=200)
@given(cases())
def test_rules_of_other_names_decide_nothing(case):
    """Nor does their order among each other."""
    own = [rule for rule in case.rules if rule[0] in case.names]
    assert spec_under(case, 'pad') == spec_under(case._replace(rules=own), 'pad')


# b) jax takes the specs.


@many(max_examples=800)
@given(cases(), st.sampled_from(GIVE_WAY))
def test_jax_takes_the_spec(case, policy):
    spec = spec_under(case, policy)
    outside = spec.outside if isinstance(spec, PaddedSpec) else spec
    used = [axis for axes in axes_of(outside) for axis in axes]
    assert len(set(used)) == len(used)
    mesh = AbstractMesh(tuple(case.mesh.values()), tuple(case.mesh))
    shard = NamedSharding(mesh, outside).shard_shape(case.shape)  # raises where it does not divide
    expected = [s // ways(a, case.mesh) for s, a in zip(case.shape, axes_of(outside), strict=True)]
    assert list(shard) == expected
    if isinstance(spec, PaddedSpec):
        NamedSharding(mesh, spec.inside).shard_shape((DIVISIBLE,) * len(case.shape))
        with pytest.raises(ValueError):  # else there was nothing to pad
            NamedSharding(mesh, spec.inside).shard_shape(case.shape)


# c) Every dimension has a coherent reason.


@many(max_examples=800)
@given(cases(), st.sampled_from(POLICIES))
def test_every_rule_for_the_name_has_won_or_lost_and_policies_are_told(case, policy):
    indivisible = slow_indivisible(*case)
    if policy == 'error' and any(indivisible):
        return
    unmatched = slow_unmatched(case.names, case.rules)
    for dim, d in enumerate(reasons_under(case, policy)):
        own = [rule for rule in case.rules if rule[0] == case.names[dim]]
        said = [rule for rule, why in d.lost if why] + ([d.rule] if d.rule else [])
        assert collections.Counter(said) == collections.Counter(own)
        assert d.name == case.names[dim] and d.reason
        expected = policy if indivisible[dim] else 'replicate' if unmatched[dim] else None
        assert d.policy == expected
        assert bool(d.fits) == indivisible[dim]
        if indivisible[dim]:  # the rule has decided where it still shards something
            assert bool(d.rule) == (policy == 'pad' or d.mesh_axes is not None)


@many(max_examples=1200)
@given(cases())
def test_winner_and_losers_are_all_rules_for_the_name(case):
    winners = slow_winners(case.names, case.rules)
    dims = resolve_axes(case.names, case.rules, mesh=case.mesh, on_unmatched='replicate')
    for dim, d in enumerate(dims):
        own = [rule for rule in case.rules if rule[0] == d.name]
        assert d.rule == (None if winners[dim] is None else case.rules[winners[dim]])
        shadowed = [rule for rule, why in d.lost if 'shadowed' in why]
        taken = [rule for rule, why in d.lost if 'shadowed' not in why]
        assert [*taken, *([d.rule] if d.rule else []), *shadowed] == own
        assert d.rule or not shadowed
        for rule, why in d.lost[: len(taken)]:
            holders = {
                (axis, other.name)
                for other in dims
                for axis in over(other.wanted)
                if other is not d and axis in over(rule[1])
            }
            assert any(repr(axis) in why and repr(name) in why for axis, name in holders)


@many(max_examples=600)
@given(cases(), st.sampled_from(GIVE_WAY))
def test_fits_are_the_nearest_sizes_that_need_no_policy(case, policy):
    wanted = slow_wanted(case.names, case.rules)
    indivisible = slow_indivisible(*case)
    for dim, d in enumerate(reasons_under(case, policy)):
        if not indivisible[dim]:
            assert d.fits == ()
            continue

        def needs_policy(size, dim=dim):
            shape = (*case.shape[:dim], size, *case.shape[dim + 1 :])
            return reasons_under(case._replace(shape=shape), policy)[dim].policy is not None

        size, number = case.shape[dim], ways(wanted[dim], case.mesh)
        assert over(d.wanted) == wanted[dim]
        below = [s for s in range(size, 0, -1) if s % number == 0][:1]
        above = [s for s in range(size, size + number + 1) if s % number == 0][:1]
        assert list(d.fits) == [*below, *above]
        assert not any(map(needs_policy, d.fits))
        between = range(d.fits[0] + 1 if below else 1, d.fits[-1])
        assert all(map(needs_policy, itertools.islice(between, 8)))


# d) linen, where it has an answer.


@many(max_examples=500)
@given(cases(matched=True))
def test_same_as_linen_where_all_sizes_divide(case):
    shape = (DIVISIBLE,) * len(case.names)
    spec = logical_to_mesh_axes(case.names, case.rules, mesh=case.mesh, shape=shape)
    assert tuple(spec) == tuple(nn.logical_to_mesh_axes(case.names, case.rules))


# e) The same names give the same spec, or the same refusal, whatever carries them.


@functools.cache
def mesh_of(*sizes):
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), tuple(AXES))


SMALL_MESHES = [(2, 2, 2), (1, 4, 2), (3, 2, 1), (1, 1, 7), (2, 1, 3), (5, 1, 1)]


def by_name(names, shape, rules, mesh):
    return logical_to_mesh_axes(names, rules, mesh=mesh, shape=shape)


def by_state(make_state, overrides=None):
    def door(names, shape, rules, mesh):
        path_rules = () if overrides is None else [(overrides, names)]
        partitioner = PjitPartitioner(
            mesh=mesh, logical_axis_rules=rules, params_axes_names_override=path_rules
        )
        state = make_state(jax.ShapeDtypeStruct(shape, jnp.float32), names)
        axes = partitioner.get_mesh_axes(state)['params']['w']
        return axes.get_value() if isinstance(axes, nnx.Variable) else axes

    return door


def variable(array, names):
    with nnx.use_eager_sharding(False):
        return {'params': {'w': nnx.Param(array, out_sharding=names)}}


DOORS = {
    'linen': by_state(lambda x, names: {'params': {'w': nn.LogicallyPartitioned(x, names)}}),
    'T5X': by_state(
        lambda x, names: {'params': {'w': x}, 'params_axes': {'w_axes': AxisMetadata(names)}}
    ),
    'nnx': by_state(variable),
    'path rules': by_state(lambda x, _: {'params': {'w': x}}, overrides='w'),
}


def answer(door, *args):
    try:
        return door(*args)
    except ValueError:
        return ValueError


@many(max_examples=300)
@given(cases(), st.sampled_from(SMALL_MESHES), st.sampled_from(POLICIES), st.booleans())
def test_every_door_has_the_same_answer(case, sizes, policy, lenient):
    rules = AxisRules(case.rules, 'replicate' if lenient else 'error', policy)
    args = (case.names, case.shape, rules, mesh_of(*sizes))
    expected = answer(by_name, *args)
    assert {name: answer(door, *args) for name, door in DOORS.items()} == dict.fromkeys(
        DOORS, expected
    )


@pytest.mark.parametrize('door', DOORS)
@pytest.mark.parametrize(
    'names, shape',
    [(('a',), (8, 8)), (('a', 'b', None), (8, 8)), (('a', 'a'), (8, 8)), (('g', None), (8, 8))],
    ids=['too few', 'too many', 'twice', 'no rule'],
)
def test_every_door_refuses(door, names, shape):
    rules = [('a', 'x'), ('b', 'y')]
    mesh = mesh_of(2, 2, 2)
    assert DOORS[door](('a', 'b'), (8, 8), rules, mesh) == P('x', 'y')
    with pytest.raises(ValueError, match='params/w'):
        DOORS[door](names, shape, rules, mesh)


# Names of linen's Partitioned and of nnx may be mesh axes.


def partitioned(array, names):
    return {'params': {'w': nn.Partitioned(array, names)}}


AXES_AS_NAMES = {'linen': by_state(partitioned), 'nnx': by_state(variable)}


@pytest.mark.parametrize('door', AXES_AS_NAMES)
@pytest.mark.parametrize(
    'names, rules, expected',
    [
        (('x', None), [('a', 'y')], P('x', None)),
        (('x', 'a'), [('a', 'y')], P('x', 'y')),
        (('a', 'x'), [('a', 'x'), ('a', 'z')], P('z', 'x')),  # what is named is not for rules
        (('x', 'a'), [('x', 'z'), ('a', 'x')], P('z', 'x')),  # with a rule it is a logical axis
        (('x', 'y'), [('x', None)], P(None, 'y')),
        ((('x', 'y'), 'a'), [('a', 'y'), ('a', 'z')], P(('x', 'y'), 'z')),
    ],
)
def test_mesh_axes_as_names(door, names, rules, expected):
    assert AXES_AS_NAMES[door](names, (8, 8), rules, mesh_of(2, 2, 2)) == expected


@pytest.mark.parametrize('door', ['linen', 'T5X', 'path rules'])
def test_mesh_axes_are_no_logical_names(door):
    with pytest.raises(ValueError, match="no rule for logical axis 'x'"):
        DOORS[door](('x', None), (8, 8), [('a', 'y')], mesh_of(2, 2, 2))


MIXED = st.lists(st.sampled_from([*'abc', *AXES]), unique=True, min_size=1, max_size=3).map(tuple)


@many(max_examples=150)
@given(MIXED, RULES, st.sampled_from(SMALL_MESHES), st.data())
def test_mesh_axes_as_names_have_the_same_answer_and_jax_takes_it(names, rules, sizes, data):
    shape = data.draw(st.tuples(*[SIZES] * len(names)))
    policies = {'on_unmatched': 'replicate', 'on_indivisible': 'replicate'}
    args = (names, shape, AxisRules(rules, **policies), mesh_of(*sizes))
    spec = AXES_AS_NAMES['linen'](*args)
    assert AXES_AS_NAMES['nnx'](*args) == spec
    mesh = dict(zip(AXES, sizes, strict=True))
    # They come before any rule: a rule for them alone, first in the list, says the same.
    named = [(name, name) for name in names if name in AXES]
    logical = logical_to_mesh_axes(names, [*named, *rules], mesh=mesh, shape=shape, **policies)
    assert spec == logical
    NamedSharding(args[-1], spec).shard_shape(shape)
