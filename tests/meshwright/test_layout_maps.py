"""Layout maps: entries that lay out the wrong arrays, none, or too few of their dimensions."""

import collections
import dataclasses
import re
import sys
import types
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import meshwright as mw

SIZES = {'batch': 2, 'model': 4}
PATHS = {
    'embedding/embeddings': (4096, 64),
    'embedding/reverse_embeddings': (64, 4096),
    'layer_0/attention/query/kernel': (64, 8, 16),
    'layer_0/attention/key/kernel': (64, 1, 16),
    'layer_0/moe/sparse_gate_dense/kernel': (64, 8),
    'layer_0/moe/shared/gate_dense/kernel': (64, 256),
    'layer_0/moe/expert_gate_dense': (8, 64, 512),
    'layer_1/moe_1/expert_gate_dense': (8, 64, 512),
}


@dataclasses.dataclass
class Layout:
    axes: tuple


class KerasMesh:
    shape, axis_names = (2, 4), ('batch', 'model')


class KerasMap(Mapping):
    """What a `keras.distribution.LayoutMap` answers: one entry, which matches the whole path."""

    def __init__(self, entries=(), device_mesh=None):
        self.entries, self.device_mesh = {k: Layout(v) for k, v in entries}, device_mesh

    def __setitem__(self, key, axes):
        self.entries[key] = Layout(axes)

    def __getitem__(self, key):
        found = [k for k in self.entries if k == key or re.fullmatch(k, key)]
        return self.entries[found[0]] if found else None

    def __iter__(self):
        return iter(self.entries)

    def __len__(self):
        return len(self.entries)


class SearchingMap(KerasMap):
    """A LayoutMap of Keras before 3.14."""

    def __getitem__(self, key):
        found = [k for k in self.entries if k == key or re.search(k, key)]
        return self.entries[found[0]] if found else None


Variable = collections.namedtuple('Variable', ['path', 'shape', 'dtype'])


def variables(**more):
    return [Variable(path, shape, 'float32') for path, shape in {**PATHS, **more}.items()]


GOOD = [
    ('embedding/embeddings', ('model', 'batch')),
    ('embedding/reverse_embeddings', ('batch', 'model')),
    ('layer.*query.kernel', ('batch', 'model', None)),
    ('layer.*key.kernel', ('batch', None, None)),
    ('layer.*sparse_gate_dense.kernel', ('batch', None)),
    ('layer.*/gate_dense.kernel', ('batch', 'model')),
    ('.*expert_gate_dense', (None, 'batch', 'model')),
]


def lint(entries, kind=KerasMap):
    return mw.lint_layout_map(kind(entries, KerasMesh()), variables())


def changed(pattern, axes=None, new=None):
    """The good map with another entry in the place of one; without it if there are no axes."""
    made = [(k, v) if k != pattern else (new or k, axes) for k, v in GOOD]
    return [(k, v) for k, v in made if v is not None]


def test_a_map_that_fits_has_no_findings():
    assert not lint(GOOD)


def test_an_array_without_an_entry_is_whole_on_each_device():
    (found,) = lint(changed('embedding/reverse_embeddings'))
    assert found.kind == 'whole array' and found.where == 'embedding/reverse_embeddings'
    assert '1.0 MB' in found.message and "'embedding/embeddings'" in found.message


def test_arrays_of_all_layers_are_one_finding():
    (found,) = lint(changed('.*expert_gate_dense'))
    assert 'with 1 more like it' in found.message  # 2 x 8 x 64 x 512 x 4 bytes
    assert '2.1 MB' in found.message and "'expert_gate_dense'" in found.message


def test_an_entry_for_a_name_that_also_matches_a_longer_name():
    entries = changed('layer.*/gate_dense.kernel', ('batch', 'model'), 'layer.*gate_dense.kernel')
    found = lint([(k, v) for k, v in entries if 'sparse' not in k])
    assert [one.kind for one in found] == ['loose']
    assert "'/gate_dense'" in found[0].message and "'sparse_gate_dense'" in found[0].message


def test_two_entries_for_one_array():
    (found,) = lint([*GOOD, ('.*query.kernel', (None, None, 'model'))])
    assert (found.severity, found.kind) == ('error', 'ambiguous')
    assert "'.*query.kernel'" in found.message


@pytest.mark.parametrize(
    ('axes', 'kind', 'text'),
    [
        (('model', None), 'rank', '3 dimensions'),
        (('batch', 'tensor', None), 'absent axis', "'tensor'"),
        (('model', 'model', None), 'conflict', 'twice'),
        (('batch', None, ('batch', 'model')), 'conflict', "'batch'"),
    ],
)
def test_axes_that_do_not_fit(axes, kind, text):
    found = [one for one in lint(changed('layer.*query.kernel', axes)) if one.kind == kind]
    assert found[0].severity == 'error' and text in found[0].message
    assert 'layer.*query.kernel' in found[0].where


def test_heads_that_the_devices_do_not_divide():
    (found,) = lint(changed('layer.*key.kernel', ('batch', 'model', None)))
    assert found.kind == 'indivisible'
    assert 'layer_0/attention/key/kernel' in found.message and 'size 1' in found.message


def test_an_entry_must_match_the_whole_path_and_in_old_versions_a_part():
    entries = changed('layer.*query.kernel', ('batch', 'model', None), 'query.kernel')
    (found,) = lint(entries)
    assert found.kind == 'unused' and "'.*query.kernel'" in found.message
    assert not lint(entries, SearchingMap)


def test_a_misspelt_entry_names_the_nearest():
    (found,) = lint([*GOOD, ('layer.*qeury/kernel', ('batch', 'model', None))])
    assert found.kind == 'unused' and "Did you mean 'query'" in found.message


def test_partition_rules_match_in_their_order():
    params = {'wq': {'kernel': jnp.zeros((64, 64))}, 'wo': {'kernel': jnp.zeros((64, 64))}}
    rules = [('wq/kernel', P('fsdp', 'mp')), ('wo/kernel', P('mp')), ('.*', P())]
    mesh = {'fsdp': 2, 'mp': 4}
    assert not mw.lint_layout_map(rules, params, mesh=mesh)
    found = mw.lint_layout_map([('kernel', P('fsdp', 'mp')), *rules], params, mesh=mesh)
    assert {one.kind for one in found} == {'shadowed'}
    big = {**params, 'wx': {'kernel': jnp.zeros((256, 256))}}
    (found,) = mw.lint_layout_map(rules, big, mesh=mesh)
    assert found.where == 'wx/kernel' and found.kind == 'whole array'


@pytest.mark.parametrize(
    ('layout_map', 'arrays', 'mesh', 'text'),
    [
        ([('a', P('x'))], {'a': jnp.zeros(4)}, None, 'mesh='),
        ([], {'a': jnp.zeros(4)}, {'x': 2}, 'no entries'),
        ('a', {'a': jnp.zeros(4)}, {'x': 2}, 'LayoutMap'),
        (['a'], {'a': jnp.zeros(4)}, {'x': 2}, 'pair'),
        ([('(', P('x'))], {'a': jnp.zeros(4)}, {'x': 2}, 'regular expression'),
        ([('a', 'x')], {'a': jnp.zeros(4)}, {'x': 2}, "('x',)"),
        ([('a', P('x'))], {}, {'x': 2}, 'no arrays'),
        ([('a', P('x'))], {'a': 'text'}, {'x': 2}, 'ShapeDtypeStructs'),
    ],
)
def test_misuse_is_one_line(layout_map, arrays, mesh, text):
    with pytest.raises(ValueError, match=re.escape(text)) as raised:
        mw.lint_layout_map(layout_map, arrays, mesh=mesh)
    assert '\n' not in str(raised.value)


class Trainer:
    """A Keras model as far as its train step can be seen."""

    def __init__(self, mesh, layouts):
        self.trainable_variables = [Variable(p, (256, 256), 'float32') for p in layouts]
        self.non_trainable_variables = []
        self.optimizer = types.SimpleNamespace(
            variables=[Variable(f'adamw/{p}_momentum', (256, 256), 'float32') for p in layouts]
        )
        self.metrics_variables = []
        self.state = tuple(
            [
                jax.ShapeDtypeStruct((256, 256), 'float32', sharding=NamedSharding(mesh, P(*axes)))
                for axes in layouts.values()
            ]
            for _ in range(2)
        )

    def train_step(self, state, data):
        weights, momenta = state

        def loss(weights):
            return jnp.mean((jax.nn.relu(data @ weights[0]) @ weights[1]) ** 2)

        gradients = jax.grad(loss)(weights)
        momenta = [0.9 * m + g for m, g in zip(momenta, gradients, strict=True)]
        return [w - m for w, m in zip(weights, momenta, strict=True)], momenta


def test_findings_of_a_keras_step_name_the_variable_and_the_entry(monkeypatch):
    mesh = jax.make_mesh((2, 4), ('batch', 'model'), axis_types=(AxisType.Auto,) * 2)
    layouts = {'up/query/kernel': ('model', 'batch'), 'down/kernel': ('model', 'batch')}
    entries = [('.*query.kernel', ('model', 'batch')), ('down.kernel', ('model', 'batch'))]
    used = types.SimpleNamespace(_layout_map=KerasMap(entries, KerasMesh()))
    keras = types.SimpleNamespace(distribution=types.SimpleNamespace(distribution=lambda: used))
    monkeypatch.setitem(sys.modules, 'keras', keras)
    trainer = Trainer(mesh, layouts)
    data = jax.ShapeDtypeStruct((64, 256), 'float32', sharding=NamedSharding(mesh, P('batch')))
    step = jax.jit(trainer.train_step, donate_argnums=0)
    found = mw.lint(step, trainer.state, data, compile=False)
    (cut,) = [one for one in found if one.kind == 'cut product']
    assert 'state/up/query/kernel' in cut.message
    assert "entry '.*query.kernel': ('model', 'batch')" in cut.message
    assert not [one for one in found if one.kind == 'whole array']
    del used._layout_map.entries['.*query.kernel']
    whole = Trainer(mesh, {**layouts, 'up/query/kernel': ()})
    step = jax.jit(whole.train_step, donate_argnums=0)
    found = mw.lint(step, whole.state, data, compile=False)
    messages = [one.message for one in found if one.where == 'state/up/query/kernel']
    assert messages and messages[0].endswith('no entry of the layout map matches it')
    step = jax.jit(trainer.train_step, donate_argnums=0)
    held = mw.audit(step, trainer.state, data, compile=False).bytes_per_device
    assert held['optimizer'] == held['parameters'] == 2 * 256 * 256 * 4 // 8
