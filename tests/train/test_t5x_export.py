"""T5X's export: the program of a checkpoint predicts what T5X predicted."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import t5x_reference

from partitioning import PjitPartitioner, standard_logical_axis_rules
from train.data import ByT5Tokenizer
from train.errors import ConfigError
from train.exporting import load_program
from train.t5x import decoding, export_lib, models
from train.t5x.adafactor import Adafactor
from train.t5x.checkpoint_configs import RestoreCheckpointConfig

GREEDY = functools.partial(decoding.temperature_sample, temperature=0.0)


def encoder_decoder(decode_fn=GREEDY, **settings):
    vocabulary = ByT5Tokenizer()
    return models.EncoderDecoderModel(
        module=t5x_reference.net('t5_1_1'),
        input_vocabulary=vocabulary,
        output_vocabulary=vocabulary,
        optimizer_def=Adafactor(),
        decode_fn=decode_fn,
        **settings,
    )


def decoder_only():
    return models.DecoderOnlyModel(
        module=t5x_reference.net('decoder_only'),
        vocabulary=ByT5Tokenizer(),
        optimizer_def=Adafactor(),
        decode_fn=GREEDY,
        inputs_bidirectional_attention=True,
    )


def save(model, name, folder, **settings):
    path = str(t5x_reference.checkpoint(name))
    defaults = {
        'model': model,
        'inference_mode': 'predict',
        'restore_checkpoint_cfg': RestoreCheckpointConfig(path=path, mode='specific'),
        'task_feature_lengths': {'inputs': 16, 'targets': 14},
        'batch_size': None,
        'output_dir': str(folder),
        'model_name': 'test',
    }
    return export_lib.save(**defaults | settings)


def inputs(model, program):
    batch = t5x_reference.batch(model)
    return {name: batch[name].astype(np.int32) for name in program['inputs']}


def decoded(model, kind):
    arrays = t5x_reference.arrays(model)
    return arrays[f'decode/step10/{kind}/tokens'], arrays[f'decode/step10/{kind}/scores']


@pytest.mark.long
def test_a_program_decodes_the_tokens_that_t5x_decoded(tmp_path):
    """With four beams; the number of rows is open."""
    beams = models.DecoderParams(return_all_decodes=True, num_decodes=4)
    model = encoder_decoder(decoding.beam_search, default_decoder_params=beams)
    description = save(model, 't5_1_1-orbax-10', tmp_path / 'one')
    assert (description['step'], description['vocabularies']['targets']['end_token']) == (10, 1)
    program = load_program(tmp_path / 'one')
    tokens, scores = decoded('t5_1_1', 'beam4')
    batch = inputs('t5_1_1', description)
    found = program(batch)
    np.testing.assert_array_equal(found['tokens'], tokens)
    np.testing.assert_allclose(found['scores'], scores, 1e-4)
    two = program({name: x[1:3] for name, x in batch.items()})
    np.testing.assert_array_equal(two['tokens'], tokens[1:3])


def test_a_program_scores_as_t5x_did_from_parameters_on_a_mesh(tmp_path):
    rules = standard_logical_axis_rules()
    mesh = PjitPartitioner(num_partitions=2, logical_axis_rules=rules)
    mode = {'inference_mode': 'score', 'partitioner': mesh, 'batch_size': 4}
    description = save(encoder_decoder(), 't5_1_1-orbax-10', tmp_path / 'one', **mode)
    found = load_program(tmp_path / 'one')(inputs('t5_1_1', description))
    expected = t5x_reference.arrays('t5_1_1')['padded/step10/score']
    np.testing.assert_allclose(found['scores'], expected, 1e-5)
    assert description['outputs'] == {'scores': {'shape': [4], 'dtype': 'float32'}}


@pytest.mark.long
def test_a_decoder_continues_its_inputs(tmp_path):
    description = save(decoder_only(), 'decoder_only-legacy-10', tmp_path / 'one')
    batch = inputs('decoder_only', description)
    tokens, _ = decoded('decoder_only', 'greedy')
    np.testing.assert_array_equal(load_program(tmp_path / 'one')(batch)['tokens'], tokens[:, -1])


@pytest.mark.parametrize(
    'settings, expected',
    [
        ({'inference_mode': 'generate'}, r"write export_lib\.save\.inference_mode = 'predict'"),
        ({'warmup_examples': ['a']}, 'it is a part of TensorFlow Serving; leave it out'),
        ({'enable_xla': False}, r'enable_xla = True'),
        ({'create_preprocessor_fn': print}, r'needs TensorFlow; write @export_lib\.create_pre'),
        ({'output_dir': {'cpu': 'x'}}, 'one program runs on all platforms'),
        (
            {'task_feature_lengths': {'targets': 4}},
            r"write \{'inputs': \.\.\., 'targets': \.\.\.\}",
        ),
        ({'decode_outputs': True}, 'the program returns tokens'),
        ({'batch_size': 0}, '>= 1'),
    ],
)
def test_settings_that_cannot_be_honoured(tmp_path, settings, expected):
    with pytest.raises(ConfigError, match=expected):
        save(encoder_decoder(), 't5_1_1-orbax-10', tmp_path / 'one', **settings)
    assert not (tmp_path / 'one').exists()


def test_what_has_no_equivalent_is_reported_and_parameters_may_be_bfloat16(tmp_path, capsys):
    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Batching(export_lib.ExportableModule):
        use_batch_function: bool = True

    with pytest.raises(ConfigError, match='requests are batched by what serves'):
        save(encoder_decoder(), 't5_1_1-orbax-10', tmp_path, exportable_module_cls=Batching)
    path = str(t5x_reference.checkpoint('t5_1_1-orbax-10'))
    restore = RestoreCheckpointConfig(path=path, mode='specific', dtype='bfloat16')
    settings = {
        'create_preprocessor_fn': export_lib.create_preprocessor_from_task,
        'restore_checkpoint_cfg': restore,
        'inference_mode': 'score',
        'batch_size': 4,
    }
    description = save(encoder_decoder(), 't5_1_1-orbax-10', tmp_path / 'one', **settings)
    output = ' '.join(capsys.readouterr().out.split())
    assert 'serialized tf.Examples are not an input' in output
    assert 'the outputs are tokens, not texts' in output
    assert {x['dtype'] for x in description['parameters'].values()} == {'bfloat16'}
    program = load_program(tmp_path / 'one')
    assert {x.dtype for x in jax.tree.leaves(program.params)} == {np.dtype('bfloat16')}
