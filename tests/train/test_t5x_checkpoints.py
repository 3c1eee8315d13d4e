"""T5X's checkpoints: restored onto meshes, written, and found in the folder of a run."""

import functools
import json
import shutil

import gin
import jax
import numpy as np
import pytest
import t5x_reference
from flax import serialization
from small import partitioner

from partitioning import TrainState, standard_logical_axis_rules
from partitioning.state import path_str
from train.checkpoints import CheckpointConfig, find_checkpoint, open_checkpoints, open_restored
from train.checkpoints.arrays.placing import read_all
from train.checkpoints.formats.t5x_files import read_arrays
from train.checkpoints.formats.t5x_writer import check_can_write
from train.errors import ConfigError
from train.gin.load import find_entry
from train.optimizers import as_transformation
from train.t5x import state_utils
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.checkpoints import (
    Checkpointer,
    T5XCheckpointConfig,
    T5XCheckpoints,
    UpcycleCheckpointer,
    names_of,
)


@functools.cache
def make_plan(name, data=4, model=2, **changes):
    """The layout of the state of a reference model under T5X's rules, with its Adafactor."""
    facts = t5x_reference.facts(name)
    net = t5x_reference.net(name, **changes)
    settings = dict(facts['train'][facts['checkpoint_step10_run']]['adafactor'])
    if settings.pop('logical_factor_rules', None) == 'standard':
        settings['logical_factor_rules'] = standard_logical_factor_rules()
    shapes = facts['model']['init_input_shapes']
    shapes = {k: v for k, v in shapes.items() if k != 'decoder_loss_weights'}

    def init(key):
        variables = net.init(key, **{k: np.ones(v, np.int32) for k, v in shapes.items()})
        optimizer = Adafactor(**settings).optimizer(lambda step: 0.01)
        return TrainState.create(variables, as_transformation(optimizer, variables))

    mesh = partitioner(data, model, logical_axis_rules=standard_logical_axis_rules())
    return mesh.plan(init, jax.random.key(0))


def restore(path, plan, *, variables=False, initialize=None, **settings):
    [config] = RestoreCheckpointConfig(path=str(path), **settings).each()
    folder, step = find_checkpoint(config)
    checkpoints = open_restored(config, folder)
    if variables:
        return checkpoints.restore(step, plan.abstract_state, initialize, variables_only=True)
    return checkpoints.restore(step, plan.abstract_state, initialize)


def named_leaves(state):
    return dict(zip(names_of(state), jax.tree.leaves(state), strict=True))


@pytest.mark.parametrize(
    'name, mesh',
    [('t5_1_1-orbax-10', (4, 2)), ('t5_1_1-orbax-10', (2, 4)), ('decoder_only-legacy-10', (2, 4))],
)
def test_a_state_is_restored_onto_a_mesh(name, mesh):
    plan = make_plan(name.split('-')[0], *mesh)
    path = t5x_reference.checkpoint(name)
    state = restore(path, plan, mode='specific')
    plan.check(state)
    stored, found = read_arrays(path), named_leaves(state)
    assert found.keys() == stored.keys(), 'every array of the checkpoint is used'
    for key, array in found.items():
        assert array.dtype == stored[key].dtype
        np.testing.assert_array_equal(array, stored[key].read(), err_msg=key)
    wi = found['target/decoder/layers_0/mlp/wi_0/kernel']
    assert wi.sharding.shard_shape(wi.shape)[1] == wi.shape[1] // mesh[1]
    assert int(state.step) == 10


def test_a_written_checkpoint_has_the_layout_of_t5x(tmp_path):
    """T5X wrote the reference from one device, so this state is on one device, too."""
    path = t5x_reference.checkpoint('t5_1_1-orbax-10')
    state = restore(path, make_plan('t5_1_1', 1, 1), mode='specific')
    saved = T5XCheckpoints(tmp_path, CheckpointConfig())
    saved.save(10, state)
    saved.close()
    assert saved.steps() == [10]
    written = tmp_path / 'checkpoint_10'
    ours, theirs = (
        {name for p in folder.rglob('*') if '/d/' not in (name := f'/{p.relative_to(folder)}')}
        for folder in (written, path)
    )
    added = {'/manifest.json', '/run', '/run/step.json', '/run/commit_success.txt'}
    assert ours == theirs | added, 'all files and folders but the arrays'
    for file in ('state/_METADATA', 'state/array_metadatas/process_0'):
        assert json.loads((written / file).read_text()) == json.loads((path / file).read_text())
    handlers = [json.loads((f / '_CHECKPOINT_METADATA').read_text()) for f in (written, path)]
    assert handlers[0]['item_handlers']['state'] == handlers[1]['item_handlers']['state']
    assert handlers[0]['item_handlers'].keys() == handlers[1]['item_handlers'].keys() | {'run'}
    ours, theirs = read_arrays(written), read_arrays(path)
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype
        assert ours[name].read().tobytes() == array.read().tobytes(), name


def test_a_state_in_shards_is_written_and_read_on_another_mesh(tmp_path):
    """Parameters are saved in bfloat16, the optimizer state in float32, as T5X's older format."""
    path = t5x_reference.checkpoint('t5_1_1-orbax-10')
    saved = T5XCheckpoints(tmp_path, CheckpointConfig(dtype='bfloat16'))
    saved.save(10, restore(path, make_plan('t5_1_1', 2, 4), mode='specific'))
    saved.close()
    expected = read_arrays(t5x_reference.checkpoint('t5_1_1-legacy_bfloat16-10'))
    found = read_arrays(tmp_path / 'checkpoint_10')
    assert {n: a.dtype for n, a in found.items()} == {n: a.dtype for n, a in expected.items()}
    state = restore(tmp_path, make_plan('t5_1_1', 4, 2), mode='latest')
    for name, array in named_leaves(state).items():
        np.testing.assert_array_equal(array, expected[name].read().astype(array.dtype))


@pytest.mark.parametrize('name', ['decoder_only-legacy-10', 't5_1_1-legacy_bfloat16-10'])
def test_the_older_format_is_written_as_t5x_writes_it(tmp_path, name):
    """The same files, the same description of each array and the same values."""
    path, dtype = t5x_reference.checkpoint(name), 'bfloat16' if 'bfloat16' in name else None
    state = restore(path, make_plan(name.split('-')[0], 1, 1), mode='specific', dtype='float32')
    config = T5XCheckpointConfig(use_orbax=False, dtype=dtype)
    saved = open_checkpoints(config, tmp_path)
    saved.save(10, state)
    saved.close()
    assert saved.steps() == [10]
    written = tmp_path / 'checkpoint_10'
    ours, theirs = ({str(p.relative_to(f)) for p in f.rglob('*')} for f in (written, path))
    assert ours == theirs | {'manifest.json', 'run', 'run/step.json'}
    for file in path.rglob('.zarray'):
        assert json.loads((written / file.relative_to(path)).read_text()) == json.loads(
            file.read_text()
        )
    ours, theirs = (
        serialization.msgpack_restore((f / 'checkpoint').read_bytes()) for f in (written, path)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    ours, theirs = read_arrays(written), read_arrays(path)
    assert ours.keys() == theirs.keys()
    for key, array in theirs.items():
        assert ours[key].dtype == array.dtype
        assert ours[key].read().tobytes() == array.read().tobytes(), key


def test_the_older_format_is_written_from_shards_and_resumed(tmp_path, monkeypatch):
    path = t5x_reference.checkpoint('t5_1_1-orbax-10')
    config = T5XCheckpointConfig(use_orbax=False)
    saved, plan = open_checkpoints(config, tmp_path), make_plan('t5_1_1', 2, 4)
    saved.save(10, restore(path, plan, mode='specific'))
    saved.close()
    kernel = json.loads(
        (tmp_path / 'checkpoint_10/target.decoder.layers_0.mlp.wi_0.kernel/.zarray').read_text()
    )
    assert kernel['chunks'] == [kernel['shape'][0], kernel['shape'][1] // 4]
    again = open_checkpoints(config, tmp_path)
    assert again.newest_step(print) == 10 and not again.restarts_data(10)
    expected = read_arrays(path)
    for name, array in named_leaves(again.restore(10, make_plan('t5_1_1').abstract_state)).items():
        np.testing.assert_array_equal(array, expected[name].read(), err_msg=name)
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    with pytest.raises(ConfigError, match='2 processes, and only one can write this format'):
        check_can_write(tmp_path)


# The settings of a restored checkpoint.


def test_names_that_differ_are_mapped(tmp_path):
    """T5X: the first pattern that matches a whole name counts; others keep their names."""
    plan, path = make_plan('t5_1_1'), t5x_reference.checkpoint('t5_1_1-orbax-10')
    swapped = [
        [r'(.*)/layers_0/mlp/(.*)', r'\1/layers_1/mlp/\2'],
        [r'(.*)/layers_(.)/mlp/(.*)', r'\1/layers_0/mlp/\3'],
    ]
    stored = read_arrays(path)
    by_function = functools.partial(state_utils.apply_assignment_map, assignment_map=swapped)
    functions = [by_function, lambda stored, wanted: by_function(stored, wanted)]
    in_turn = ({'state_transformation_fns': [function]} for function in functions)
    for settings in ({'assignment_map': swapped}, *in_turn):
        found = named_leaves(restore(path, plan, mode='specific', **settings))
        for i, other in ((0, 1), (1, 0)):
            for start in ('target', 'state/param_states'):
                name = f'{start}/encoder/layers_%d/mlp/wo/kernel'
                ending = '' if start == 'target' else '/v_row'
                expected = stored[name % other + ending].read()
                np.testing.assert_array_equal(found[name % i + ending], expected)
        name = 'target/encoder/layers_0/attention/out/kernel'
        np.testing.assert_array_equal(found[name], stored[name].read())


def test_what_is_not_restored_is_initialized(tmp_path):
    plan, path = make_plan('t5_1_1'), t5x_reference.checkpoint('t5_1_1-orbax-10')
    made = []

    def initialize(paths):
        made.extend(paths)
        flat = jax.tree_util.tree_leaves_with_path(plan.abstract_state)
        found = {path_str(p): x for p, x in flat}
        return {p: jax.device_put(np.zeros(found[p].shape), found[p].sharding) for p in paths}

    settings = {'mode': 'specific', 'assignment_map': [['state/.*', None]]}
    with pytest.raises(ConfigError, match=r'fallback_to_scratch = True'):
        restore(path, plan, initialize=initialize, **settings)
    settings['fallback_to_scratch'] = True
    state = restore(path, plan, initialize=initialize, **settings)
    assert int(state.step) == 0 and {p.split('/')[0] for p in made} == {'step', 'opt_state'}
    name = 'target/decoder/decoder_norm/scale'
    np.testing.assert_array_equal(named_leaves(state)[name], read_arrays(path)[name].read())
    [config] = RestoreCheckpointConfig(path=str(path), **settings).each()
    assert open_restored(config, find_checkpoint(config)[0]).first_step(10) == 0, (
        'the step is one of these arrays'
    )


def test_an_evaluation_reads_parameters_only_and_can_use_bfloat16(tmp_path):
    path = t5x_reference.checkpoint('t5_1_1-orbax-10')
    plan = make_plan('t5_1_1')
    state = restore(path, plan, variables=True, mode='specific', dtype='bfloat16')
    assert state.opt_state is None
    expected = read_arrays(t5x_reference.checkpoint('t5_1_1-legacy_bfloat16-10'))
    name = 'encoder/layers_0/attention/query/kernel'
    array = state.params['encoder']['layers_0']['attention']['query']['kernel']
    assert array.dtype == 'bfloat16'
    np.testing.assert_array_equal(array, expected[f'target/{name}'].read())
    with pytest.raises(ConfigError, match=r"dtype is 'bfloat16', but this run trains"):
        restore(path, plan, mode='specific', dtype='bfloat16')


# Which checkpoints there are.


@pytest.fixture
def run_of_t5x(tmp_path):
    """A folder of T5X with checkpoints of both formats, an unfinished one, and other files."""
    folder = tmp_path / 'run'
    folder.mkdir()
    shutil.copytree(t5x_reference.checkpoint('decoder_only-legacy-10'), folder / 'checkpoint_10')
    shutil.copytree(t5x_reference.checkpoint('decoder_only-orbax-10'), folder / 'checkpoint_12')
    (folder / 'checkpoint_14.tmp-1700000000').mkdir()
    (folder / 'checkpoint_16').mkdir()
    (folder / 'config.gin').write_text('# T5X\n')
    return folder


def files_in(folder):
    return {p: p.read_bytes() for p in folder.rglob('*') if p.is_file()}


def test_checkpoints_of_t5x_are_found(run_of_t5x):
    path = str(run_of_t5x)
    latest = RestoreCheckpointConfig(path=path, mode='latest').translated()
    assert find_checkpoint(latest) == (run_of_t5x, 12)
    every = RestoreCheckpointConfig(path=[path], mode='all').each()
    assert [find_checkpoint(one)[1] for one in every] == [10, 12]
    several = RestoreCheckpointConfig(
        path=[f'{path}/checkpoint_12', f'{path}/checkpoint_10'], mode='specific'
    )
    assert [find_checkpoint(one)[1] for one in several.each()] == [12, 10]
    for config in (several, RestoreCheckpointConfig(path=path, mode='all')):
        with pytest.raises(ConfigError, match='a run starts from one checkpoint'):
            config.translated()
    said: list[str] = []
    one = RestoreCheckpointConfig(path=f'{path}/checkpoint_10', mode='latest').translated()
    assert find_checkpoint(one, said.append) == (run_of_t5x, 10) and one.is_one
    assert open_restored(one, run_of_t5x).path(10) == run_of_t5x / 'checkpoint_10'
    assert len(said) == 1 and 'checkpoint_10 is itself a checkpoint, which is restored' in said[0]
    every = RestoreCheckpointConfig(path=[f'{path}/checkpoint_10'], mode='all').each()
    assert [find_checkpoint(one, said.append)[1] for one in every] == [10] and len(said) == 1
    missing = RestoreCheckpointConfig(path=f'{path}/checkpoint_16', mode='specific').translated()
    with pytest.raises(ConfigError, match=r'not a complete checkpoint; complete .*: 10, 12$'):
        find_checkpoint(missing)


def test_new_checkpoints_leave_those_of_t5x_alone(run_of_t5x):
    plan, before = make_plan('decoder_only'), files_in(run_of_t5x)
    for keep, left in ((None, [10, 12, 20]), (1, [10, 12, 21])):
        saved = open_checkpoints(T5XCheckpointConfig(keep=keep, dtype='float32'), run_of_t5x)
        step = saved.latest_step()
        state = saved.restore(step, plan.abstract_state)
        saved.save(10, state)  # There is one already.
        saved.save(max(left), state)
        saved.close()
        assert saved.steps() == left
        assert before.items() <= files_in(run_of_t5x).items()
    (run_of_t5x / 'checkpoints/3/state').mkdir(parents=True)
    (run_of_t5x / 'checkpoints/3/state/_METADATA').write_text('')
    with pytest.raises(ConfigError, match=r'of T5X, up to checkpoint_21, and .*checkpoints/3'):
        open_checkpoints(T5XCheckpointConfig(), run_of_t5x)


def test_a_model_of_other_sizes_is_refused(run_of_t5x):
    saved = open_checkpoints(T5XCheckpointConfig(), run_of_t5x)
    plan = make_plan('decoder_only', 4, 2, mlp_dim=32)
    changed = r'\([\d, ]*64[\d, ]*\) float32 in the checkpoint, \([\d, ]*32[\d, ]*\) float32 in'
    with pytest.raises(ConfigError, match=rf'checkpoint_12 .*{changed} .*MODEL_DIR') as error:
        saved.restore(12, plan.abstract_state)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize(
    'settings, expected',
    [
        ({'mode': 'newest'}, r"write utils\.RestoreCheckpointConfig\.mode = 'latest'"),
        ({'dtype': 'int8'}, r'RestoreCheckpointConfig\.dtype = None'),
        ({'assignment_map': [['(a', 'b']]}, r'assignment_map\[0\] is .*regular expression'),
        ({'checkpointer_cls': int}, r'write @checkpoints\.Checkpointer, without parentheses'),
        ({'checkpointer_cls': UpcycleCheckpointer}, r'UpcycleCheckpointer\.num_experts = '),
        ({'checkpointer_cls': Checkpointer()}, 'without parentheses'),
        ({'state_transformation_fns': [1]}, r'\[@state_utils\.apply_assignment_map\]'),
        ({'path': ['a', 3]}, 'write a path, or a list of paths'),
    ],
)
def test_settings_that_cannot_be_honoured(settings, expected):
    with pytest.raises(ConfigError, match=expected):
        RestoreCheckpointConfig(**{'path': 'x', **settings}).each()


def test_a_function_that_computes_is_refused():
    def doubled(stored, wanted):
        return jax.tree.map(lambda x: x * 2, stored)

    path = t5x_reference.checkpoint('t5_1_1-orbax-10')
    settings = {'mode': 'specific', 'state_transformation_fns': [doubled]}
    with pytest.raises(ConfigError, match=r'doubled fails .*can rename them, but not compute'):
        restore(path, make_plan('t5_1_1'), **settings)


def test_the_idiom_of_sparse_upcycling_in_a_gin_file(load):
    load(r"""
        from __gin__ import dynamic_registration
        import __main__ as eval_script
        from t5x import utils
        from t5x.contrib.moe import checkpoints

        eval_script.evaluate.restore_checkpoint_cfg = @utils.RestoreCheckpointConfig()
        utils.RestoreCheckpointConfig:
          path = ['a/checkpoint_7']
          mode = 'specific'
          fallback_to_scratch = True
          use_gda = False
          checkpointer_cls = @checkpoints.UpcycleCheckpointer
          assignment_map = (
            (r'target(.*)mlp\/expert(.*)', r'target\1mlp\2'),
            (r'state\/param_states.*', None),
          )
        checkpoints.UpcycleCheckpointer.num_experts = 4
    """)
    config = gin.get_bindings(find_entry())['restore_checkpoint_cfg'].translated()
    assert (config.path, config.mode, config.num_experts) == ('a/checkpoint_7', 'specific', 4)
    assert config.renames[1] == (r'state\/param_states.*', None)
    assert config.initialize_missing and not config.strict


# Reading of checkpoints that T5X wrote, against the sums that it computed.


def sums(array):
    values = array.read().astype(np.float64)
    return [list(array.shape), str(array.dtype), values.sum(), (values**2).sum()]


@pytest.mark.parametrize(
    'name', ['t5_1_1-orbax-10', 'decoder_only-orbax-10', 'decoder_only-legacy-10']
)
def test_every_array_of_a_checkpoint_has_the_sums_that_t5x_computed(name):
    facts = t5x_reference.facts(name.split('-')[0])
    run = facts['train'][facts['checkpoint_step10_run']]
    expected = {f'target/{k}': v for k, v in run['params_after'].items()}
    expected |= {f'state/param_states/{k}': v for k, v in run['state_after'].items()}
    arrays = read_arrays(t5x_reference.checkpoint(name))
    assert arrays.pop('state/step').read() == 10
    placeholders = {k for k, v in arrays.items() if k.endswith('/m') and not v.read().any()}
    assert arrays.keys() - placeholders == expected.keys() - placeholders
    for key, values in expected.items():
        assert sums(arrays[key])[:2] == values[:2], key
        np.testing.assert_allclose(sums(arrays[key])[2:], values[2:], 1e-6, 1e-6, err_msg=key)


def test_bfloat16_is_the_rounded_float32():
    exact = read_arrays(t5x_reference.checkpoint('t5_1_1-orbax-10'))
    rounded = read_arrays(t5x_reference.checkpoint('t5_1_1-legacy_bfloat16-10'))
    assert exact.keys() == rounded.keys()
    for name, array in rounded.items():
        dtype = 'bfloat16' if name.startswith('target/') else exact[name].dtype
        assert array.dtype == dtype
        np.testing.assert_array_equal(array.read(), exact[name].read().astype(dtype))


def test_an_old_checkpoint_is_one_file_and_stores_bfloat16_as_uint16(tmp_path):
    one_and_a_half = np.array([[0x3F80, 0x3FC0]], np.uint16)  # 1.0 and 1.5 in bfloat16
    target = {'dense': {'kernel': one_and_a_half}}
    content = {'version': 2, 'optimizer': {'target': target, 'state': {'step': np.int32(7)}}}
    file = tmp_path / 'old.checkpoint_7'
    file.write_bytes(serialization.msgpack_serialize(content))
    arrays = read_arrays(file)
    assert arrays['state/step'].read() == 7
    kernel = arrays['target/dense/kernel']
    assert (kernel.shape, str(kernel.dtype)) == ((1, 2), 'bfloat16')
    assert kernel.read((slice(0, 1), slice(1, 2))).tolist() == [[1.5]]
    file.write_bytes(serialization.msgpack_serialize(content | {'version': 1}))
    with pytest.raises(ConfigError, match='version 1: only 2 and 3'):
        read_arrays(file)
    file.write_bytes(b'\xc1')
    with pytest.raises(ConfigError, match='damaged'):
        read_arrays(file)


@pytest.mark.parametrize('kind', ['orbax', 'legacy'])
def test_devices_read_only_their_shards(kind):
    """Files of chunks that no device asks for are not opened: they may be missing."""
    arrays = read_arrays(t5x_reference.checkpoint(f'decoder_only-{kind}-10'))
    array = arrays['target/decoder/layers_0/mlp/wo/kernel']
    read = []
    counted = type(array)(
        shape=array.shape, dtype=array.dtype, start=lambda i: read.append(i) or array.start(i)
    )
    mesh = partitioner(4, 2).mesh
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, 'model'))
    struct = jax.ShapeDtypeStruct(array.shape, np.float32, sharding=sharding)
    placed = read_all({'x': counted}, {'x': struct})['x']
    assert placed.sharding == sharding
    np.testing.assert_array_equal(placed, array.read())
    half = array.shape[1] // 2
    assert sorted(i[1].indices(array.shape[1])[:2] for i in read) == [(0, half), (half, 2 * half)]


def test_damage_is_named_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r'is not a T5X checkpoint \(expected'):
        read_arrays(tmp_path)
    (tmp_path / 'state').mkdir()
    metadata = {'tree_metadata': {"('target', 'x')": {}}, 'use_ocdbt': True, 'use_zarr3': False}
    (tmp_path / 'state/_METADATA').write_text(json.dumps(metadata))
    with pytest.raises(ConfigError, match=r'the T5X checkpoint \S+ is damaged \(.*') as error:
        read_arrays(tmp_path)
    assert '\n' not in str(error.value)
