"""Path rules name parameters of every front-end by regular expressions on their paths."""

import re

import flax
import flax.linen as nn
import jax.numpy as jnp
import optax
import pytest
from boxed_states import by_path
from flax import nnx
from flax.linen.partitioning import AxisMetadata
from hypothesis import given, settings, strategies as st
from jax.sharding import PartitionSpec as P

from partitioning import (
    AxisNames,
    AxisRules,
    PjitPartitioner,
    get_logical_axes,
    override_params_axes_names,
)

pytestmark = pytest.mark.core

# Over data 4 x model 2.
RULES = [('embed', 'data'), ('mlp', 'model'), ('heads', 'model')]
SHAPES = {'enc/kernel': (8, 16), 'enc/bias': (16,), 'dec/kernel': (16, 8)}
PATHS = list(SHAPES)
ALL = [('.*/kernel', ('embed', 'mlp')), ('.*/bias', ('mlp',))]
NAMES = {'enc/kernel': ('embed', 'mlp'), 'enc/bias': ('mlp',), 'dec/kernel': ('embed', 'mlp')}
SWAPPED = ('enc/kernel', ('mlp', 'embed'))  # the names of ALL in the other order


def partitioner_of(path_rules, rules=RULES, **settings):
    return PjitPartitioner(2, AxisRules(rules, names=path_rules, **settings))


def params(boxed=False, named=()):
    """Arrays without names, or all in boxes, or with AxisMetadata for those in `named`."""
    flat = {path: jnp.zeros(shape) for path, shape in SHAPES.items()}
    if boxed:
        flat = {k: nn.LogicallyPartitioned(x, NAMES[k]) for k, x in flat.items()}
    made = flax.traverse_util.unflatten_dict(flat, sep='/')
    if not named:
        return made
    axes = {f'{path}_axes': AxisMetadata(names=NAMES[path]) for path in named}
    return {'params': made, 'params_axes': flax.traverse_util.unflatten_dict(axes, sep='/')}


def by_function(rules, tree=None):
    return by_path(get_logical_axes(override_params_axes_names(tree or params(), rules)))


def by_partitioner(rules, tree=None):
    state = {'params': tree or params()}
    return by_path(partitioner_of(rules).get_logical_axes(state)['params'])


BOTH = pytest.mark.parametrize('names_by', [by_function, by_partitioner])


# Which rule wins, and which rules are errors.


@BOTH
def test_a_rule_must_match_the_whole_path(names_by):
    """re.match and re.search would accept 'enc/ker' and 'kernel'."""
    for part in ('enc/ker', 'kernel', 'nc/kernel', '/kernel', 'enc/ke.', '.c/kernel'):
        with pytest.raises(ValueError, match=f'{re.escape(repr(part))} is never used'):
            names_by([(part, ('mlp', 'embed')), *ALL])


PATTERNS = [
    'enc/.*',
    '.*/kernel',
    'dec/kernel',
    '.*',
    '(enc|dec)/bias',
    'kernel',
    'enc/ke.',
    '[^/]+/[^/]+',
    '',
]


@settings(max_examples=60)
@given(st.lists(st.sampled_from(PATTERNS), max_size=4, unique=True))
def test_any_rules_agree_with_re_fullmatch(patterns):
    """Both arrays have the same rank, so any rule may name either of them."""
    tree = {'enc': {'kernel': jnp.zeros((2, 2))}, 'dec': {'kernel': jnp.zeros((2, 2))}}
    rules = [(pattern, (f'a{i}', f'b{i}')) for i, pattern in enumerate(patterns)]
    winner = {
        path: next((i for i, p in enumerate(patterns) if re.fullmatch(p, path)), None)
        for path in ('enc/kernel', 'dec/kernel')
    }
    complete = None not in winner.values() and set(winner.values()) == set(range(len(patterns)))
    for names_by in (by_function, by_partitioner):
        if complete:
            expected = {path: AxisNames(f'a{i}', f'b{i}') for path, i in winner.items()}
            assert names_by(rules, tree) == expected
        elif rules or names_by is by_function:
            with pytest.raises(ValueError, match='path rule'):
                names_by(rules, tree)


@BOTH
def test_a_parameter_that_no_rule_matches(names_by):
    """The message contains the rule to add, and this rule then works."""
    with pytest.raises(ValueError, match='no path rule matches enc/bias') as error:
        names_by(ALL[:1])
    (line,) = re.findall(r"Add \('(\S+)', ", str(error.value))
    assert names_by([*ALL[:1], (line, ('mlp',))]) == NAMES


@BOTH
def test_the_rule_to_add_is_escaped(names_by):
    tree = {'layer+1': {'kernel': jnp.zeros((8, 8))}, 'layer1': {'kernel': jnp.zeros((8, 8))}}
    with pytest.raises(ValueError) as error:
        names_by([('layer1/kernel', (None, None))], tree)
    (line,) = re.findall(r"Add \('(\S+)', ", str(error.value))
    assert re.fullmatch(line, 'layer+1/kernel') and not re.fullmatch(line, 'layer1/kernel')


@BOTH
def test_the_first_of_many_unmatched_parameters_are_listed(names_by):
    tree = {f'layer_{i}': {'kernel': jnp.zeros((8, 8))} for i in range(6)}
    with pytest.raises(ValueError, match=r'layer_0/kernel, layer_1/kernel, .* and 2 more'):
        names_by([('layer_5/kernel', (None, None))], tree)


@BOTH
@pytest.mark.parametrize(
    'rule, message',
    [
        (('enc/kernl', ('mlp', 'embed')), "'enc/kernl' is never used.*mean 'enc/kernel'"),
        (('zzz', ()), "'zzz' is never used: .* Paths are dec/kernel, enc/bias, enc/kernel"),
        (SWAPPED, "'enc/kernel' is never used: earlier rules .* enc/kernel .*move it up"),
        (ALL[0], "'.*/kernel' is never used: earlier rules .*move it up"),
    ],
)
def test_a_rule_that_is_never_used(names_by, rule, message):
    """The last rule is misspelt, or the rules before it match everything that it matches."""
    with pytest.raises(ValueError, match=message):
        names_by([*ALL, rule])


@BOTH
@pytest.mark.parametrize('names', [(), ('mlp',), ('layers', 'embed', 'mlp')])
def test_names_of_the_wrong_rank(names_by, names):
    message = rf'enc/kernel.*{len(names)} entr(y|ies).* 2 dimensions, \(8, 16\)'
    with pytest.raises(ValueError, match=message):
        names_by([('enc/kernel', names), *ALL])


@pytest.mark.parametrize(
    'rules, message',
    [
        ('enc/kernel', "must be a list.*not 'enc/kernel'"),
        (7, 'must be a list.*not 7'),
        ([('enc/kernel', ('embed', 1))], "not .*'embed', 1"),
        ([('enc/(kernel', ('embed', 'mlp'))], r"'enc/\(kernel' is not a valid regular expression"),
    ],
)
def test_malformed_rules(rules, message):
    with pytest.raises(ValueError, match=message):
        override_params_axes_names(params(), rules)
    with pytest.raises(ValueError, match=message):
        partitioner_of(rules)  # before it sees a state


def test_rules_may_be_lists_as_in_gin():
    assert by_partitioner([['.*/kernel', ['embed', 'mlp']], ['.*/bias', ['mlp']]]) == NAMES


def test_scalars_need_no_names():
    tree = {**params(), 'temperature': jnp.float32(1)}
    expected = NAMES | {'temperature': AxisNames()}
    assert by_function(ALL, tree) == by_partitioner(ALL, tree) == expected


def test_paths_from_the_top_of_the_state_match_too():
    rules = [('params/enc/kernel', ('mlp', 'embed')), ('params/.*/kernel', ('embed', 'mlp'))]
    assert by_partitioner([*rules, ALL[1]])['enc/kernel'] == AxisNames('mlp', 'embed')


# Parameters with names keep them if no rule matches.


@BOTH
def test_unmatched_boxes_keep_their_names(names_by):
    assert names_by([SWAPPED], params(boxed=True)) == NAMES | {
        'enc/kernel': AxisNames('mlp', 'embed')
    }


def test_a_new_box_has_no_rules_or_mesh():
    """The rules and the mesh of the old box were for the old names."""
    old = {'w': nn.LogicallyPartitioned(jnp.ones((8, 8)), ('a', 'b'), rules=(('a', 'model'),))}
    new = override_params_axes_names(old, [('w', ('embed', 'mlp'))])
    assert new['w'].value is old['w'].value and new['w'].rules is None
    assert isinstance(new['w'], nn.LogicallyPartitioned)
    assert partitioner_of(()).get_mesh_axes({'params': new})['params']['w'] == P('data', 'model')


@pytest.mark.parametrize('freeze', [lambda x: x, flax.core.freeze], ids=['dict', 'FrozenDict'])
def test_t5x_variables(freeze):
    variables = freeze(params(named=PATHS))
    new = override_params_axes_names(variables, [SWAPPED])
    axes = by_path(new['params_axes'])
    expected = {f'{k}_axes': AxisMetadata(names=v) for k, v in NAMES.items()}
    assert axes == expected | {'enc/kernel_axes': AxisMetadata(names=('mlp', 'embed'))}
    assert by_path(variables['params_axes']) == expected  # unchanged
    assert new['params']['enc']['kernel'] is variables['params']['enc']['kernel']


def test_path_rules_in_a_dict():
    with pytest.raises(ValueError, match=r"list of pairs.*\[\('enc', \('mlp',\)\), .*rules.items"):
        override_params_axes_names(params(named=PATHS), {'enc': ('mlp',)})


def nnx_state(tx=None, **metadata):
    """The variables of a model, with or without names, with or without an optimizer."""

    class Model(nnx.Module):
        def __init__(self):
            self.enc = nnx.Linear(8, 16, rngs=nnx.Rngs(0), **metadata)
            self.norm = nnx.BatchNorm(16, rngs=nnx.Rngs(0))

    with nnx.use_eager_sharding(False):
        model = Model()
        return nnx.state(model if tx is None else (model, nnx.Optimizer(model, tx, wrt=nnx.Param)))


NNX_RULES = [('enc/kernel', ('embed', 'mlp')), ('.*/(bias|scale)', ('mlp',))]


def test_nnx_variables():
    new = override_params_axes_names(nnx_state(), [*NNX_RULES, ('norm/mean', (None,))])
    assert new['enc']['kernel'].get_metadata()['out_sharding'] == ('embed', 'mlp')
    names = by_path(get_logical_axes(new))
    assert names['enc/kernel'] == AxisNames('embed', 'mlp')
    assert names['norm/scale'] == AxisNames('mlp')
    assert names['norm/mean'] == names['norm/var'] == AxisNames(None)


def test_nnx_parameters_without_a_rule():
    """The statistics of BatchNorm are not parameters, so they need no rule."""
    with pytest.raises(ValueError, match='no path rule matches enc/bias, norm/bias, norm/scale'):
        override_params_axes_names(nnx_state(), NNX_RULES[:1])
    with pytest.raises(ValueError, match=r'no path rule matches .*norm/bias, norm/scale'):
        partitioner_of(NNX_RULES[:1]).get_mesh_axes(nnx_state(optax.adam(1e-3)))


def test_nnx_state_with_optimizer():
    axes = partitioner_of(NNX_RULES).get_mesh_axes(nnx_state(optax.adam(1e-3)))
    model, statistics = by_path(axes[0]), by_path(axes[1]['opt_state'][0]['mu'])
    expected = {'enc/kernel': P('data', 'model')}
    expected |= dict.fromkeys(['enc/bias', 'norm/bias', 'norm/scale'], P('model'))
    assert statistics == expected
    assert model == expected | {'norm/mean': P(None), 'norm/var': P(None)}
