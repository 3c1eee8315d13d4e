"""Properties of the resolution of rules, with a slow resolver and linen as oracles.

The slow resolver tries every assignment of rules to dimensions and keeps the one that is stable.
`test_resolution_front_ends.py` shows that every front-end gets the same answer.
"""

import collections
import contextlib
import functools
import itertools
import math

import flax.linen as nn
import pytest
from hypothesis import example, given, settings, strategies as st

from partitioning import logical_to_mesh_axes, resolve_axes
from partitioning.rules import PaddedSpec

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


def num_shards(mesh_axes, mesh):
    return math.prod(mesh[axis] for axis in over(mesh_axes))


# The slow resolver, from the text of the design: rules are tried in order, the first that matches
# a dimension wins, a mesh axis is used once per array, and a rule with any taken axis is skipped.


def slow_winners(names, rules):
    """For each dimension, the index of the rule that wins it, or None."""
    candidates = [[i for i, rule in enumerate(rules) if rule[0] == name] for name in names]

    def blocked(i, winners):
        """Whether an earlier rule has won one of the axes of rule i."""
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
    return [size % num_shards(axes, mesh) != 0 for axes, size in zip(wanted, shape, strict=True)]


def slow_unmatched(names, rules):
    return [name is not None and name not in dict(rules) for name in names]


def most_shards(axes, size, mesh):
    """The largest number of equal shards that a subset of the axes gives."""
    subsets = itertools.chain.from_iterable(
        itertools.combinations(axes, n) for n in range(len(axes) + 1)
    )
    return max(num_shards(s, mesh) for s in subsets if size % num_shards(s, mesh) == 0)


# Cases.

MESH_AXES = st.one_of(
    st.none(),
    st.sampled_from(AXES),
    st.lists(st.sampled_from(AXES), unique=True, max_size=3).map(tuple),
)
RULES = st.lists(st.tuples(st.sampled_from('abcdef'), MESH_AXES), max_size=9)
MESHES = st.fixed_dictionaries({axis: st.integers(1, 6) for axis in AXES})
SIZES = st.one_of(st.integers(0, 13), st.sampled_from([16, 24, 30, 60, 61, 120, 210]))
DIVISIBLE = 60**3  # divisible by the product of any three axis sizes
Case = collections.namedtuple('Case', 'names rules mesh shape')


@st.composite
def lists_of_names(draw, known, max_size=4):
    """Names, each used once, and dimensions without a name."""
    names = draw(st.lists(st.sampled_from(known), unique=True, max_size=max_size))
    bare = draw(st.integers(0, 2))
    return tuple(draw(st.permutations([*names, *[None] * bare]))[:max_size])


@st.composite
def cases(draw, matched=False):
    """Names, rules, mesh and shape. If `matched`, every name has a rule."""
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


# a) The slow resolver.


@settings(max_examples=100)
@given(cases())
def test_errors_occur_exactly_where_the_slow_resolver_has_one(case):
    indivisible = any(slow_indivisible(*case))
    unmatched = any(slow_unmatched(case.names, case.rules))
    for on_unmatched, wrong in [('error', indivisible or unmatched), ('replicate', indivisible)]:
        with pytest.raises(ValueError) if wrong else contextlib.nullcontext():
            spec = spec_under(case, 'error', on_unmatched)
            assert axes_of(spec) == slow_wanted(case.names, case.rules)


@settings(max_examples=100)
@given(cases(), st.sampled_from(GIVE_WAY))
@example(Case(('a',), [('a', ('x', 'y', 'z'))], {'x': 2, 'y': 2, 'z': 6}, (12,)), 'drop_axis')
def test_policies_equal_those_of_the_slow_resolver(case, policy):
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
            most = most_shards(axes, case.shape[dim], case.mesh)
            assert num_shards(outside[dim], case.mesh) == most
        else:
            assert outside[dim] == ()
    if isinstance(spec, PaddedSpec):
        assert axes_of(spec.inside) == wanted


# b) Every dimension has a coherent reason.


@settings(max_examples=100)
@given(cases(), st.sampled_from(POLICIES))
def test_every_rule_of_the_name_has_won_or_lost_and_policies_are_reported(case, policy):
    indivisible = slow_indivisible(*case)
    if policy == 'error' and any(indivisible):
        return
    unmatched = slow_unmatched(case.names, case.rules)
    for dim, d in enumerate(reasons_under(case, policy)):
        own = [rule for rule in case.rules if rule[0] == case.names[dim]]
        reported = [rule for rule, why in d.lost if why] + ([d.rule] if d.rule else [])
        assert collections.Counter(reported) == collections.Counter(own)
        assert d.name == case.names[dim] and d.reason
        expected = policy if indivisible[dim] else 'replicate' if unmatched[dim] else None
        assert d.policy == expected
        assert bool(d.fits) == indivisible[dim]
        if indivisible[dim]:  # the rule wins if it still shards something
            assert bool(d.rule) == (policy == 'pad' or d.mesh_axes is not None)


@settings(max_examples=100)
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

        size, number = case.shape[dim], num_shards(wanted[dim], case.mesh)
        assert over(d.wanted) == wanted[dim]
        below = [s for s in range(size, 0, -1) if s % number == 0][:1]
        above = [s for s in range(size, size + number + 1) if s % number == 0][:1]
        assert list(d.fits) == [*below, *above]
        assert not any(map(needs_policy, d.fits))
        between = range(d.fits[0] + 1 if below else 1, d.fits[-1])
        assert all(map(needs_policy, itertools.islice(between, 8)))


# c) linen, where it has an answer.


@settings(max_examples=100)
@given(cases(matched=True))
def test_same_as_linen_where_all_sizes_divide(case):
    shape = (DIVISIBLE,) * len(case.names)
    spec = logical_to_mesh_axes(case.names, case.rules, mesh=case.mesh, shape=shape)
    assert tuple(spec) == tuple(nn.logical_to_mesh_axes(case.names, case.rules))
