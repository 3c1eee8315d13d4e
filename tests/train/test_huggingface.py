"""Models of Hugging Face: read under our names, computed, trained, and written back bit for bit.

The models are in reference_models/, which transformers has written with their logits.
"""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small
from etils import epath
from flax.traverse_util import flatten_dict
from gin_fixtures import load_config
from hugging_face_models import FOLDER as MODELS, NAMES, config_of, copy
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file
from test_formats import convert
from tolerances import assert_equal_but_for_rounding, rounding_spread

from partitioning import TrainState
from partitioning.state import path_str
from train import evaluate
from train.checkpoints import RestoreConfig, find_checkpoint, open_restored
from train.checkpoints.arrays.stored import in_memory
from train.checkpoints.formats.opening import choose_place, open_checkpoint
from train.checkpoints.formats.safetensors_files import open_safetensors
from train.checkpoints.formats.safetensors_writer import write_safetensors
from train.checkpoints.huggingface.architectures import model_config
from train.checkpoints.huggingface.config_json import read_config
from train.checkpoints.huggingface.folders import (
    load_huggingface_model,
    load_huggingface_tokenizer,
    open_parameters,
)
from train.checkpoints.huggingface.writer import plan_model
from train.data.text.tokenizers import SentencePieceTokenizer
from train.errors import ConfigError
from train.gin.load import find_config
from train.models.parameters import list_parameters
from train.models.t5 import T5
from train.objectives import EncoderDecoder, NextToken

pytestmark = pytest.mark.core

RULES = [*small.RULES, ('joined_kv', 'model'), ('relpos_buckets', None)]
DECODERS = [name for name in NAMES if not name.startswith('t5')]


def shapes_of(model):
    """The shapes of the parameters of a decoder, by our names."""
    flat = flatten_dict(list_parameters(model), sep='/')
    return {f'params/{name}': in_memory(np.empty(p.shape, np.float32)) for name, p in flat.items()}


def read_decoder(name, **settings):
    """The arrays of a decoder under our names."""
    model = model_config(config_of(name), **settings)
    wanted = shapes_of(model)
    arrays = open_parameters(epath.Path(MODELS / name), wanted)
    assert arrays.keys() == wanted.keys()
    return arrays


def write_model(arrays, folder, *, like=None, max_file_bytes=2**30, **settings):
    planned = plan_model(arrays, like=like and epath.Path(like), **settings)
    planned = dataclasses.replace(planned, max_file_bytes=max_file_bytes)
    planned.write(epath.Path(folder))


def bits(array):
    return np.ascontiguousarray(array).view(np.uint8)


def assert_same_files(folder, other):
    """Two folders have the same arrays, bit for bit."""
    first, second = (open_safetensors(path) for path in (folder, other))
    assert first.keys() == second.keys()
    for name, array in first.items():
        assert (array.shape, array.dtype) == (second[name].shape, second[name].dtype), name
        np.testing.assert_array_equal(bits(array.read()), bits(second[name].read()), name)


# ---- arrays


def test_stacked_layers_are_those_of_separate_layers():
    for name in DECODERS:
        stacked, separate = read_decoder(name), read_decoder(name, scan_layers=False)
        for path, array in separate.items():
            number = path.split('/')[1].removeprefix('layer_')
            if number.isdecimal():
                path = path.replace(f'layer_{number}', 'layers')
            expected = stacked[path].read()
            expected = expected[int(number)] if number.isdecimal() else expected
            np.testing.assert_array_equal(array.read(), expected, path)


def test_matrices_are_transposed_divided_and_joined():
    """The arrays of GPT-2 and Llama, by their definitions in PyTorch."""
    ours, theirs = read_decoder('gpt2'), load_file(MODELS / 'gpt2/model.safetensors')
    fused = np.stack([theirs[f'transformer.h.{i}.attn.c_attn.weight'] for i in range(3)])
    for i, name in enumerate(('query', 'key', 'value')):
        expected = np.split(fused, 3, axis=-1)[i].reshape(3, 16, 4, 4)
        np.testing.assert_array_equal(ours[f'params/layers/attention/{name}'].read(), expected)
        bias = theirs['transformer.h.1.attn.c_attn.bias'][i * 16 : (i + 1) * 16].reshape(4, 4)
        found = ours[f'params/layers/attention/{name}_bias'].read()[1]
        np.testing.assert_array_equal(found, bias)
    ours, theirs = read_decoder('llama3_1'), open_safetensors(MODELS / 'llama3_1')
    for path, name, shape in (
        ('attention/key', 'self_attn.k_proj', (16, 2, 8)),
        ('attention/out', 'self_attn.o_proj', (4, 8, 16)),
        ('mlp/down', 'mlp.down_proj', (24, 16)),
    ):
        expected = theirs[f'model.layers.2.{name}.weight'].read().T.reshape(shape)
        np.testing.assert_array_equal(ours[f'params/layers/{path}'].read()[2], expected)
    expected = theirs['lm_head.weight'].read().T
    np.testing.assert_array_equal(ours['params/output'].read(), expected)


@given(st.data())
def test_slices_are_those_of_the_whole_array(data):
    name = data.draw(st.sampled_from(['gpt2', 'llama3_1', 'gemma3']))
    arrays = read_decoder(name, vocab_size=272 if name == 'llama3_1' else 50)
    path = data.draw(st.sampled_from(sorted(arrays)))
    index = []
    for size in arrays[path].shape:
        first = data.draw(st.integers(0, size - 1))
        index.append(slice(first, data.draw(st.integers(first, size))))
    whole = arrays[path].read()
    np.testing.assert_array_equal(arrays[path].read(tuple(index)), whole[tuple(index)])


def test_a_larger_vocabulary_is_filled_with_zeros_and_cut_again(tmp_path):
    arrays, exact = read_decoder('llama3_1', vocab_size=272), read_decoder('llama3_1')
    embedding, output = (arrays[f'params/{name}'].read() for name in ('embedding', 'output'))
    np.testing.assert_array_equal(embedding[:264], exact['params/embedding'].read())
    np.testing.assert_array_equal(output[:, :264], exact['params/output'].read())
    assert not embedding[264:].any() and not output[:, 264:].any()
    write_model(arrays, tmp_path, like=MODELS / 'llama3_1')
    assert_same_files(tmp_path, MODELS / 'llama3_1')


# ---- restoring


def batch_of(name):
    """The tokens of a fixture as a batch of eight rows, and its logits."""
    arrays = {n: np.tile(x, (4,) + (1,) * (x.ndim - 1)) for n, x in load_logits(name).items()}
    tokens = arrays['tokens'].astype(np.int32)
    if 'inputs' not in arrays:
        batch = {
            'decoder_input_tokens': tokens,
            'decoder_target_tokens': tokens,
            'decoder_loss_weights': np.ones_like(tokens, np.float32),
        }
        return batch, arrays['logits']
    batch = {
        'encoder_input_tokens': arrays['inputs'].astype(np.int32),
        'decoder_input_tokens': np.pad(tokens, ((0, 0), (1, 0)))[:, :-1],
        'decoder_target_tokens': tokens,
    }
    return batch, arrays['logits']


def load_logits(name):
    return dict(np.load(MODELS / name / 'logits.npz').items())


def restore(folder, model, batch, mesh=(4, 2), **settings):
    """Restores a train state from a model as a run does, and computes its logits and spread."""
    objective = (EncoderDecoder if isinstance(model, T5) else NextToken)(model=model)
    partitioner = small.partitioner(*mesh, logical_axis_rules=RULES)
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in batch.items()}

    def init(key):
        return TrainState.create(objective.init(key, zeros), optax.adam(1e-3))

    plan = partitioner.plan(init, jax.random.key(0))
    structs = jax.tree_util.tree_leaves_with_path(plan.abstract_state)
    by_path = {path_str(path): struct for path, struct in structs}

    def initialize(paths):
        """The arrays that are new; their values do not matter here."""
        assert all(path.startswith('opt_state') for path in paths)
        zeros = {path: np.zeros(by_path[path].shape, by_path[path].dtype) for path in paths}
        return {path: jax.device_put(x, by_path[path].sharding) for path, x in zeros.items()}

    config = RestoreConfig(path=str(folder), **settings)
    path, step = find_checkpoint(config)
    reader = open_restored(config, path)
    preflight = reader.preflight(step, plan.abstract_state)
    preflight.check()
    state = reader.restore(step, plan.abstract_state, initialize)
    assert (step, int(state.step)) == (0, 0)
    assert jax.tree.map(lambda x: x.sharding, state) == plan.shardings

    def compute(params):
        args, kwargs = objective.model_inputs(batch)
        mode = {'deterministic': True}
        return model.apply({'params': params}, *args, **kwargs, **mode)

    compute = partitioner.partition(compute, (plan.specs.params,), None)
    spread = rounding_spread(compute, state.params, draws=2)
    return state, np.asarray(compute(state.params)), spread


@pytest.mark.parametrize('name', NAMES)
def test_a_run_that_starts_from_a_model_computes_its_logits(name, tmp_path):
    """On a mesh of 4x2. What is written back from the restored state is bit-equal."""
    batch, expected = batch_of(name)
    model = load_huggingface_model(str(MODELS / name))
    state, logits, spread = restore(MODELS / name, model, batch)
    assert np.abs(expected).max() > 1 > 1e4 * spread
    assert_equal_but_for_rounding(logits, expected, spread)
    flat = jax.tree_util.tree_leaves_with_path(state)
    arrays = {path_str(path): in_memory(np.asarray(x)) for path, x in flat}
    write_model(arrays, tmp_path, like=MODELS / name)
    assert_same_files(tmp_path, MODELS / name)


def test_a_larger_vocabulary_does_not_change_the_other_logits():
    batch, expected = batch_of('llama3_1')
    model = load_huggingface_model(str(MODELS / 'llama3_1'), vocab_multiple=128)
    _, logits, spread = restore(MODELS / 'llama3_1', model, batch)
    assert logits.shape[-1] == 384
    assert_equal_but_for_rounding(logits[..., :264], expected, spread)
    assert not logits[..., 264:].any()


def test_safetensors_with_our_names_are_restored(tmp_path):
    batch, expected = batch_of('qwen3')
    arrays = read_decoder('qwen3') | {'step': in_memory(7), 'opt_state/0/count': in_memory(7)}
    write_safetensors(tmp_path, arrays)
    model = load_huggingface_model(str(MODELS / 'qwen3'))
    _, logits, spread = restore(tmp_path, model, batch)
    assert_equal_but_for_rounding(logits, expected, spread)


def refused(folder, match, **settings):
    batch, _ = batch_of('llama3_1')
    model = load_huggingface_model(str(MODELS / 'llama3_1'), **settings)
    with pytest.raises(ConfigError, match=match) as error:
        restore(folder, model, batch)
    assert len(str(error.value).splitlines()) == 1


def test_other_arrays_than_those_of_the_run_are_named(tmp_path):
    folder, q = copy('llama3_1', tmp_path), 'model.layers.1.self_attn.q_proj'
    whole = load_file(folder / 'model.safetensors')
    save_file({n: x for n, x in whole.items() if not n.startswith(q)}, folder / 'model.safetensors')
    refused(
        folder, rf'has no {re.escape(q)}\.weight, which params/layers/attention/query of this run'
    )
    few = {name: x for name, x in whole.items() if 'q_proj' not in name}
    save_file(few, folder / 'model.safetensors')
    refused(folder, r'1 arrays differ.*params/layers/attention/query: absent in the checkpoint')
    extra = {
        f'{q}.bias': np.ones(32, np.float32),
        'model.layers.3.mlp.gate_proj.weight': whole['lm_head.weight'],
    }
    save_file(whole | extra, folder / 'model.safetensors')
    refused(
        folder, rf'2 arrays differ.*{re.escape(q)}\.bias: \(32,\) float32 in the checkpoint, absent'
    )
    # Frequencies of rotary positions are not weights.
    buffer = {'model.layers.0.self_attn.rotary_emb.inv_freq': np.ones(4, np.float32)}
    save_file(whole | buffer, folder / 'model.safetensors')
    batch, _ = batch_of('llama3_1')
    restore(folder, load_huggingface_model(str(folder)), batch)
    refused(folder, r'has no model\.layers\.3\.', num_layers=4)
    refused(folder, r'9 arrays differ.*model\.layers\.2\.', num_layers=2)


def test_a_model_of_another_size_is_refused():
    where = r'another size: .* \(264, 16\).*params/{} .* needs \({}, 16\).* config\.json'
    refused(MODELS / 'llama3_1', where.format('embedding', 256), vocab_size=256)
    refused(MODELS / 'llama3_1', r'o_proj\.weight is \(16, 32\).*needs \(16, 64\)', num_heads=8)


def test_a_missing_file_and_a_pickle_are_refused(tmp_path):
    folder = copy('llama3_1', tmp_path)
    (folder / 'model.safetensors').rename(folder / 'pytorch_model.bin')
    refused(folder, r'pytorch_model\.bin is a pickle')
    (folder / 'pytorch_model.bin').rename(folder / 'model-00001-of-00002.safetensors')
    weight_map = {'a': 'model-00001-of-00002.safetensors', 'b': 'model-00002-of-00002.safetensors'}
    index = json.dumps({'weight_map': weight_map})
    (folder / 'model.safetensors.index.json').write_text(index)
    refused(folder, r'no file model-00002-of-00002\.safetensors')


# ---- writing


def as_float32(arrays):
    return {n: in_memory(array.read().astype(np.float32)) for n, array in arrays.items()}


@pytest.mark.parametrize('name', DECODERS)
@pytest.mark.parametrize('scan_layers', [True, False])
def test_every_array_is_written_back_bit_for_bit(name, scan_layers, tmp_path):
    """From parameters in float32, in the dtype of the files."""
    arrays = as_float32(read_decoder(name, scan_layers=scan_layers))
    arrays['opt_state/0/count'] = in_memory(np.int32(3))
    write_model(arrays, tmp_path / 'like', like=MODELS / name)
    assert_same_files(tmp_path / 'like', MODELS / name)
    theirs, ours = (
        json.loads((p / 'config.json').read_text()) for p in (MODELS / name, tmp_path / 'like')
    )
    assert ours.pop('torch_dtype') == theirs.pop('dtype')
    assert ours == theirs
    # Without the original, config.json follows from the settings of the run.
    model = model_config(config_of(name), scan_layers=scan_layers)
    dtype = str(open_safetensors(MODELS / name).popitem()[1].dtype)
    write_model(arrays, tmp_path / 'own', model=model, dtype=dtype, max_file_bytes=10_000)
    assert_same_files(tmp_path / 'own', MODELS / name)
    assert (tmp_path / 'own/model.safetensors.index.json').exists()
    written = read_config(epath.Path(tmp_path / 'own'))
    assert written.values['torch_dtype'] == dtype
    assert model_config(written, scan_layers=scan_layers) == model
    # What both configurations have is equal. Rotary positions have no length of their own.
    for key in written.values.keys() & theirs.keys() - {'max_position_embeddings'}:
        assert theirs[key] in (None, written.values[key]), key


def test_tokenizers_are_copied_with_a_model(tmp_path):
    write_model(read_decoder('llama3_1'), tmp_path, like=MODELS / 'llama3_1')
    copied = (tmp_path / 'tokenizer.json').read_bytes()
    assert copied == (MODELS / 'llama3_1/tokenizer.json').read_bytes()


def test_a_model_that_no_architecture_computes_is_refused(tmp_path):
    model = dataclasses.replace(model_config(config_of('qwen3')), activation='relu2')
    with pytest.raises(ConfigError, match=r"qwen3 comes closest, .* activation = 'relu2'"):
        write_model(read_decoder('qwen3'), tmp_path, model=model)
    assert list(tmp_path.iterdir()) == []


def test_parameters_of_another_model_are_not_written(tmp_path):
    arrays = read_decoder('qwen2')
    with pytest.raises(
        ConfigError, match=r'these are not the parameters of .*llama3_1: .* Give the folder'
    ):
        write_model(arrays, tmp_path, like=MODELS / 'llama3_1')
    with pytest.raises(ConfigError, match=r'15 arrays .* no name .*params/embedding'):
        write_model(arrays, tmp_path, like=MODELS / 't5')
    gpt2 = read_decoder('gpt2')
    del gpt2['params/layers/attention/key']
    with pytest.raises(ConfigError, match=r'c_attn\.weight needs 3 arrays of which there are 2'):
        write_model(gpt2, tmp_path, like=MODELS / 'gpt2')


# ---- runs of the command


@pytest.fixture
def command(meshwright, monkeypatch, tmp_path):
    """Returns a function that runs the command in an empty folder, and returns what it printed."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status, out, err = meshwright(*arguments)
        assert status == 0, err
        return out

    return run


@pytest.mark.long
def test_finetuning_and_generating(command, tmp_path):
    for i in range(60):
        (tmp_path / f'{i}.txt').write_text(f'the quick brown fox number {i} ' * 30)
    out = command(
        *('train', 'finetune', f"--gin.WEIGHTS='{MODELS / 'llama3_1'}'", "--gin.TEXT='*.txt'"),
        *('--gin.TRAIN_STEPS=8', '--gin.BATCH_SIZE=8', '--gin.SEQUENCE_LENGTH=32'),
        '--gin.LEARNING_RATE=0.03',
    )
    assert 'which has only parameters: the steps begin at 0, with a new optimizer state' in out
    first, last = map(float, re.findall(r'held-out bits per byte ([\d.]+)', out))
    assert last < 0.8 * first
    out = command('generate', 'runs/finetune', '--prompt=the quick', '--length=12')
    assert 'restored step 8 of' in out and 'the quick' in out
    # The run becomes a model of the same architecture, with its own values.
    out = command('checkpoint', 'convert', 'runs/finetune', 'tuned', '--to=huggingface')
    assert re.search(r'tuned: 12 arrays.*27 arrays besides parameters', out, re.S)
    model = model_config(read_config(epath.Path('tuned')))
    assert model == model_config(config_of('llama3_1'))
    tuned = open_parameters(epath.Path('tuned'))
    saved = open_checkpoint(choose_place(epath.Path('runs/finetune'), None)[0]).arrays
    for path, array in tuned.items():
        np.testing.assert_array_equal(array.read(), saved[path].read(), path)


@pytest.mark.long
def test_finetuning_on_pairs_starts_from_the_weights(tmp_path, monkeypatch, capsys):
    """The run is evaluated as it starts; its train step takes long to compile."""
    monkeypatch.chdir(tmp_path)
    pairs = [{'inputs': f'{a}{b}', 'targets': b + a} for a in 'abcdefgh' for b in 'ijklmnopqr']
    (tmp_path / 'pairs.jsonl').write_text('\n'.join(map(json.dumps, pairs)))
    macros = [f"WEIGHTS='{MODELS / 't5_1_1'}'", "PAIRS='pairs.jsonl'", 'BATCH_SIZE=8']
    macros.append("SEQUENCE_LENGTH={'inputs': 4, 'targets': 4}")
    load_config(['configs/runs/finetune_pairs.gin'], macros)
    config = find_config()
    scores = evaluate(config, restore=config.restore)
    assert f'restored {MODELS / "t5_1_1"}, which has only parameters' in capsys.readouterr().out
    # Other weights of the same sizes would score otherwise.
    weights = {n: x * 0.5 for n, x in load_file(MODELS / 't5_1_1/model.safetensors').items()}
    other = copy('t5_1_1', tmp_path)
    save_file(weights, other / 'model.safetensors')
    others = evaluate(config, restore=RestoreConfig(path=str(other)))
    assert abs(scores['eval/loss'] - others['eval/loss']) > 0.1


@pytest.mark.parametrize(('name', 'kind'), [('t5', 'decoder'), ('gpt2', 'encoder_decoder')])
def test_a_run_that_cannot_train_a_model_names_one_that_can(name, kind):
    run = {'t5': 'finetune_pairs', 'gpt2': 'finetune'}[name]
    with pytest.raises(ConfigError, match=rf'{name} is of kind .* {kind!r}: .* the run {run}$'):
        load_huggingface_model(str(MODELS / name), kind=kind, remat='full')


def test_a_tokenizer_is_found_or_missed(tmp_path):
    found = load_huggingface_tokenizer(str(MODELS / 'llama3_1'))
    [tokens] = found.encode(['here'], [b'caf\xc3\xa9'])
    assert found.num_tokens == 257 and len(tokens) == 5 and tokens.max() < 257
    assert found.decode(tokens) == b'caf\xc3\xa9'
    with pytest.raises(ConfigError, match=r'has no tokenizer \(expected tokenizer\.json or'):
        load_huggingface_tokenizer(str(MODELS / 'gpt2'))
    (tmp_path / 'spiece.model').write_bytes(b'x')
    assert type(load_huggingface_tokenizer(str(tmp_path))) is SentencePieceTokenizer
    with pytest.raises(ConfigError, match='remove separator_token'):
        load_huggingface_tokenizer(str(tmp_path), separator_token='</s>')


@pytest.mark.parametrize(
    'name, through',
    [
        *(('gpt2', format) for format in ('meshwright', 'orbax', 'safetensors', 'huggingface')),
        ('llama3_1', 'safetensors'),
        ('t5_1_1', 't5x'),
    ],
)
def test_models_are_converted_to_other_formats_and_back(name, through, tmp_path):
    between = convert(MODELS / name, tmp_path / 'between', through)
    back = convert(between, tmp_path / 'back', 'huggingface', like=epath.Path(MODELS / name))
    assert_same_files(back, MODELS / name)
    if through != 'huggingface':
        with pytest.raises(ConfigError, match=r'does not say which model it has.*--like=FOLDER'):
            convert(between, tmp_path / 'other', 'huggingface')
