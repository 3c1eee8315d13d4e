"""The change that saves the most, found by compiling with the changes of all causes."""

import jax
import jax.numpy as jnp
import pytest
from flax.linen import LogicallyPartitioned
from plain_steps import compile_under

from meshwright.causes import find_change
from meshwright.causes.cause import (
    CodeChange,
    ConstraintChange,
    JoinedChange,
    LayoutChange,
    RuleChange,
    join_changes,
)
from meshwright.causes.layouts import KnownLayouts
from meshwright.causes.whole_dimensions import written_for
from meshwright.jaxpr.naming import trace_values
from partitioning import constrain

RULES = {'batch': 'data', 'embed': 'data', 'mlp': 'model', 'vocab': 'model', 'length': None}
SHAPES = {
    'down': (('mlp', 'embed'), (512, 64)),
    'head': (('embed', 'vocab'), (64, 1024)),
    'up': (('embed', 'mlp'), (64, 512)),
}
AXES = {'data': 4, 'model': 2}
BATCH = jax.ShapeDtypeStruct((16, 8, 64), jnp.float32)


def init():
    return {
        'params': {
            key: LogicallyPartitioned(jnp.zeros(shape), names)
            for key, (names, shape) in SHAPES.items()
        }
    }


def step(state, x_BLD):
    """A gradient step of a hidden layer and a head."""

    def loss(params):
        hidden_BLF = constrain(jnp.tanh(x_BLD @ params['up']), ('batch', 'length', 'mlp'))
        out_BLD = constrain(hidden_BLF @ params['down'], ('batch', 'length', 'embed'))
        logits_BLV = constrain(out_BLD @ params['head'], ('batch', 'length', 'vocab'))
        return jnp.mean(jax.nn.logsumexp(logits_BLV, axis=-1))

    gradient = jax.grad(loss)(state['params'])
    return {'params': jax.tree.map(lambda p, g: p - g, state['params'], gradient)}


def compile_changed(**changes):
    """The step under the rules with these changes."""
    return compile_under([*{**RULES, **changes}.items()], init, step, BATCH)


def needs(function):
    """What a program exchanges and holds, in bytes per device."""
    return sum(c.total_bytes for c in function.costs.collectives), function.costs.memory.peak


@pytest.fixture(scope='module')
def healthy():
    return needs(compile_changed())


@pytest.mark.parametrize(
    ('faults', 'most'),
    [
        ({'mlp': None, 'vocab': None}, 4),
        ({'mlp': ('data', 'model')}, 3),
        ({'length': 'model'}, 3),
        ({'batch': ('data', 'model'), 'mlp': None}, 6),
        ({'batch': 'model', 'vocab': None}, 6),  # neither helps alone
        ({'batch': None, 'mlp': 'data'}, 6),  # a rule that is right hides them
    ],
)
def test_rules_are_given_back_that_were_dropped_or_have_too_much(healthy, faults, most):
    """Rules that need each other are changed together; needless axes are taken away."""
    best = find_change(compile_changed(**faults), most=most)
    change = best.saved.change
    assert dict(change.after) == {name: RULES[name] for name in faults}
    assert all(f"('{name}', " in best.cause.change for name in faults)
    assert best.cause.confirmed and best.cause.rule in map(repr, faults.items())
    assert (best.saved.exchanged[1], best.saved.peak[1]) == healthy
    assert len(best.tried) <= most


def compile_layers(down):
    """A step of two layers of their own, under names for the 'down' of both."""

    def init():
        layer = {
            'down': LogicallyPartitioned(jnp.zeros((512, 64)), down),
            'up': LogicallyPartitioned(jnp.zeros((64, 512)), ('embed', 'mlp')),
        }
        return {'params': {'layer_0': layer, 'layer_1': layer}}

    def step(state, x_BLD):
        def loss(params):
            x = x_BLD
            for name in ('layer_0', 'layer_1'):
                hidden_BLF = jnp.tanh(x @ params[name]['up'])
                hidden_BLF = constrain(hidden_BLF, ('batch', 'length', 'mlp'))
                x = constrain(hidden_BLF @ params[name]['down'], ('batch', 'length', 'embed'))
            return jnp.mean(x**2)

        gradient = jax.grad(loss)(state['params'])
        return {'params': jax.tree.map(lambda p, g: p - g, state['params'], gradient)}

    return compile_under([*RULES.items()], init, step, BATCH)


@pytest.mark.parametrize('down', [(None, None), ('embed', 'mlp')])
def test_the_parameters_of_all_layers_are_laid_out_together(down):
    """One line of a program names the parameters of all its layers."""
    best = find_change(compile_layers(down))
    change = best.saved.change
    assert (change.path, change.likewise) == ('params/layer_0/down', ('params/layer_1/down',))
    assert 'params/layer_0/down and' in best.cause.change
    # It is the program whose names say so; whether 'embed' is sharded is a matter of bytes.
    names = tuple({('model',): 'mlp', ('data',): 'embed', (): None}[axes] for axes in change.layout)
    assert names in {('mlp', 'embed'), ('mlp', None)}
    found = best.saved.exchanged[1], best.saved.peak[1]
    assert found == needs(compile_layers(names))


def test_changes_are_joined_if_they_are_of_different_places():
    mlp = RuleChange(before=(('mlp', None),), after=(('mlp', 'model'),))
    vocab = RuleChange(before=(), after=(('vocab', 'model'),))
    assert str(join_changes(vocab, mlp)) == (
        "write ('vocab', 'model') and ('mlp', 'model') in place of ('mlp', None) in the rules"
    )
    layout = LayoutChange(path='params/w', layout=(('model',), ()))
    line = ConstraintChange(
        source='train.py:3', shape=(8, 8), names=('batch', None), layout=((), ()), replaces=True
    )
    both = join_changes(join_changes(line, mlp), layout)
    assert isinstance(both, JoinedChange) and both.parts == (mlp, line, layout)
    for one, other in (
        (mlp, mlp),
        (both, layout),
        (CodeChange(source='train.py:3', text=''), line),
    ):
        with pytest.raises(ValueError, match='change the same'):
            join_changes(one, other)


def test_names_with_other_axes_than_usual_are_unusual():
    rules = [*{**RULES, 'length': 'model', 'vocab': ('data', 'model'), 'own': 'model'}.items()]
    layouts = KnownLayouts(rules, AXES, ())
    assert {*layouts.unusual_names()} == {'length', 'vocab'}
    # A batch over all axes is as intended, unless another name also uses one of them.
    for vocab, unusual in ((None, {'batch'}), ('model', {'batch', 'mlp'})):
        both = {**RULES, 'batch': ('data', 'model'), 'mlp': None, 'vocab': vocab}
        assert {*KnownLayouts([*both.items()], AXES, ()).unusual_names()} == unusual
    assert [change.after for change in layouts.fewer_axes('vocab')] == [
        (('vocab', 'model'),),
        (('vocab', 'data'),),
        (('vocab', None),),
    ]


@pytest.mark.parametrize(
    ('shape', 'sharded', 'merges'),
    [((8, -1), 2, True), ((8, -1), 1, False), ((-1, 16), 2, False), ((8, 4, 4, 16), 1, False)],
)
def test_a_reshape_that_merges_a_sharded_dimension_is_found(shape, sharded, merges):
    """[8, 16, 16] is reshaped; only the first of merged dimensions can stay sharded."""

    def f(x):
        return jnp.exp(jnp.sin(x).reshape(shape))

    jaxpr = jax.make_jaxpr(f)(jax.ShapeDtypeStruct((8, 16, 16), jnp.float32))
    values = {v.primitive: v for v in trace_values(jaxpr, (), {}).values}
    found = list(written_for(values['exp'], values['sin'], sharded, {}))
    assert [change.source.rpartition('/')[2].partition(':')[0] for change in found] == [
        'test_blame_suggestions.py'
    ] * merges
