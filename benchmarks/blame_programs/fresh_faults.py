"""Faults for seed 4, of kinds that no other file has, for figures that are blind once more.

They are rules of three names, layers over devices, moments elsewhere, constraints of another array,
and gradients that a line makes whole. `fresh_operations` has those of operations.
"""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.blame_programs.fault_kinds import (
    LINEN,
    PLAIN,
    Fault,
    constraints_of,
    edit,
    layout_fault,
    rules_fault,
)
from benchmarks.blame_programs.fresh_operations import fresh_operations

_LAYERS = 'train/models/layers.py'
_ATTENTION = 'train/models/attention.py'
_STEPS = 'train/running/steps.py'
# The last dimension of an array, and that of another array of the same rank.
_OF_OTHERS = {"'embed'": "'mlp'", "'kv'": "'heads'", "'heads'": "'kv'", "'vocab'": "'embed'"}


def fresh_faults() -> Iterator[Fault]:
    """Yields every fault that seed 4 draws from."""
    for program in ('linen_trainer', 'our_transformer'):
        yield from _rules(program)
    yield from _layouts()
    yield from _constraints_of_others()
    yield from _whole_gradients()
    yield from fresh_operations()


def _rules(program: str) -> Iterator[Fault]:
    whole = dict.fromkeys
    for kind, rules in (
        ('three dropped rules', whole(('mlp', 'heads', 'vocab'))),
        ('three dropped rules', whole(('embed', 'heads', 'vocab'))),
        ('three dropped rules', whole(('embed', 'mlp', 'heads'))),
        ('layers over devices', {'layers': 'data', 'embed': None}),
        ('layers over devices', {'layers': 'model', 'mlp': None, 'heads': None}),
        ('layers over devices', {'layers': 'data'}),
        ('embed over the axis of models', {'embed': 'model', 'mlp': None, 'heads': None}),
        ('embed over the axis of models', {'embed': 'model', 'vocab': None}),
        ('a name of attention on another axis', {'kv': 'model', 'heads': None}),
        ('a name of attention on another axis', {'kv': 'data', 'heads': None}),
        ('a name of attention on another axis', {'heads': None, 'length': 'model'}),
        ('rows on both axes', {'batch': ['data', 'model'], 'mlp': None}),
        ('rows on both axes', {'batch': ['data', 'model'], 'vocab': None, 'heads': None}),
    ):
        yield rules_fault(program, kind, rules)


def _layouts() -> Iterator[Fault]:
    none = (None, None, None)
    for kind, layout in (
        ('layers over devices', {'up': ('data', None, 'model')}),
        ('layers over devices', {'down': ('data', 'model', None)}),
        ('layers over devices', {'qkv': ('model', None, None, None, None)}),
        ('layers over devices', {'out': ('model', None, None)}),
        ('moments elsewhere', {'momentum/up': (None, 'model', None)}),
        ('moments elsewhere', {'momentum/down': (None, None, 'model')}),
        ('moments elsewhere', {'momentum/embedding': (None, 'model')}),
        ('moments elsewhere', {'momentum/head': ('model', None)}),
        ('moments elsewhere', {'momentum/qkv': (None, None, 'model', None, None)}),
        ('three wrong layouts', {'up': none, 'down': none, 'out': none}),
        ('three wrong layouts', {'embedding': none[:2], 'head': none[:2], 'up': none}),
        (
            'three wrong layouts',
            {'up': (None, 'model', None), 'down': (None, None, 'model'), 'out': none},
        ),
        ('the parts of a joined matrix', {'qkv': (None, None, 'data', 'model', None)}),
        ('the parts of a joined matrix', {'qkv': (None, None, None, 'model', 'data')}),
    ):
        yield layout_fault(kind, layout)


def _constraints_of_others() -> Iterator[Fault]:
    """Constraints whose last dimensions have the names of another array of the same rank."""
    kind = 'constraint of another array'
    for found in constraints_of(LINEN):
        new = [*found.entries[:2], *(_OF_OTHERS.get(e, e) for e in found.entries[2:])]
        if new != found.entries:
            yield found.relaid('linen_trainer', LINEN, kind, new)
    for found in constraints_of(PLAIN):
        if len(found.entries) == 3 and found.entries[2] == 'None':
            yield found.relaid('plain_trainer', PLAIN, kind, [*found.entries[:2], "'model'"])
    for file, old, new in (
        (_ATTENTION, "(q_BLHN, ('batch', 'length', 'heads', 'kv'))", "'kv', 'heads'"),
        (_ATTENTION, "(attended_BLHN, ('batch', 'length', 'heads', 'kv'))", "'kv', 'heads'"),
        (_LAYERS, "(hidden_BLF, ('batch', 'length', 'mlp'))", "'embed'"),
    ):
        before = "'mlp'" if 'mlp' in old else "'heads', 'kv'"
        text = old.replace(before, new)
        yield edit('our_transformer', file, kind, f'{old} -> {new}', old, text)


def _whole_gradients() -> Iterator[Fault]:
    """Gradients that are laid out whole, or joined for a norm."""
    joined = 'jnp.linalg.norm(jnp.concatenate([g.ravel() for g in jax.tree.leaves({0})]))'
    linen = '    updates, opt_state = OPTIMIZER.update(gradient, state.opt_state, state.params)\n'
    plain = '    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, gradient)\n'
    grads = (
        '            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)\n'
    )
    norm = "            'gradient_norm': global_norm(grads),\n"
    after = "            'parameter_norm': optax.tree.norm(new_state.params),\n"
    linen_whole = 'jax.tree.map(lambda g: constrain(g, (None,) * g.ndim), gradient)'
    for program, file, kind, old, part, text in (
        ('linen_trainer', LINEN, 'whole gradient', linen, 'gradient', linen_whole),
        (
            'linen_trainer',
            LINEN,
            'joined for a norm',
            linen,
            'gradient',
            f'jax.tree.map(lambda g: g / {joined.format("gradient")}, gradient)',
        ),
        ('plain_trainer', PLAIN, 'whole gradient', plain, '+ g', '+ lay_out(g, P())'),
        (
            'plain_trainer',
            PLAIN,
            'joined for a norm',
            plain,
            '+ g',
            f'+ g / {joined.format("gradient")}',
        ),
        (
            'our_transformer',
            _STEPS,
            'whole gradient',
            grads,
            'g.astype(p.dtype)',
            'with_sharding_constraint(g.astype(p.dtype), jax.sharding.PartitionSpec())',
        ),
        (
            'our_transformer',
            _STEPS,
            'joined for a norm',
            norm,
            'global_norm(grads)',
            joined.format('grads'),
        ),
        (
            'our_transformer',
            _STEPS,
            'joined for a norm',
            after,
            'optax.tree.norm(new_state.params)',
            joined.format('new_state.params'),
        ),
    ):
        yield edit(program, file, kind, part, old, old.replace(part, text, 1), suggested=True)
