"""The settings of a run are checked when they are created: one line with the values, and a hint."""

import dataclasses
from pathlib import Path

import optax
import pytest
from small import Bigram, partitioner, small_config

from partitioning import PjitPartitioner
from partitioning.mesh import MeshConfig
from train import HeldOut, NextToken, Samples, TrainConfig
from train.checkpoints import CheckpointConfig, RestoreConfig
from train.data import CausalLM, Examples, Prefetch
from train.errors import ConfigError
from train.reporting.writers import JsonWriter, TensorBoardWriter
from train.running.run import choose_evaluators
from train.setting_checks import check_batch

pytestmark = pytest.mark.core

TEXTS = Path('texts')
EXPLICIT = MeshConfig(axes={'data': 8, 'model': 1}, axis_types='explicit')


class Every:
    """An evaluator whose attribute `every` is not a count."""

    every = 1.5

    def run(self, state, step):
        return {}


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'model_dir': 3}, 'model_dir is 3'),
        ({'model_dir': ' '}, "model_dir is ' '"),
        ({'model_dir': 'hdfs://x'}, "'hdfs://x' begins with hdfs://"),
        ({'objective': Bigram()}, r'objective is of type Bigram, .*write NextToken\(model'),
        ({'objective': NextToken}, r'the class NextToken, .*write NextToken\(\), or @NextToken\('),
        ({'partitioner': None}, 'partitioner is None, .*PjitPartitioner'),
        ({'optimizer': optax.adamw}, r'optimizer is <.*Optimizer or Gradient.*optax.adamw\(1e-3\)'),
        ({'task': CausalLM}, r'TrainConfig.task is the class CausalLM, .*@CausalLM\(\)'),
        ({'total_steps': 0.5}, r'total_steps is 0\.5: .*>= 0'),
        ({'batch_size': True}, 'batch_size is True'),
        ({'batch_size': 10}, r'10.* 4'),
        ({'num_microbatches': 3}, '8 .* 3 microbatches .* size 4: use a multiple of 12'),
        ({'sequence_length': 0}, 'sequence_length is 0'),
        ({'log_every': 0}, 'log_every is 0'),
        ({'seed': -1}, 'seed is -1: .*>= 0'),
        ({'seed': 1.5}, r'seed is 1\.5: .*>= 0'),
        ({'checkpoints': CheckpointConfig}, r'the class CheckpointConfig.*@CheckpointConfig\(\)'),
        ({'restore': 'runs/x'}, "restore is 'runs/x'.* RestoreConfig"),
        ({'prefetch': None}, 'prefetch is None.* Prefetch'),
        ({'evaluators': [HeldOut()]}, r"evaluators is \[HeldOut.*write \{'eval': HeldOut\(\)"),
        ({'evaluators': {'a': HeldOut}}, r"evaluators\['a'\] is <class .*an object with"),
        ({'evaluators': {'a': 3}}, r"evaluators\['a'\] is 3: .*run\(state, step\)"),
        ({'evaluators': {'a': Every()}}, r"evaluators\['a'\].every is 1\.5: .*>= 0"),
        ({'hooks': print}, 'hooks is <built-in function print>: it must be a list'),
        ({'hooks': [3]}, r'hooks is \[3\]'),
        (
            {'hooks': [print, TrainConfig]},
            r'hooks\[1\] is train\.config\.TrainConfig: write ',
        ),
        ({'writers': [JsonWriter, HeldOut]}, r'writers\[1\] is train\.eval.*HeldOut: write @Json'),
        ({'writers': 'json'}, "writers is 'json'"),
        ({'profile_steps': 3}, r'profile_steps is 3: .*\(10, 12\)'),
        ({'profile_steps': (3, 2)}, r'profile_steps is \(3, 2\)'),
        ({'profile_steps': (0, 2)}, r'profile_steps is \(0, 2\)'),
        ({'profile_steps': (5, 7)}, r'profile_steps is \(5, 7\), but the run ends at step 6'),
        ({'partitioner': partitioner(8, 1, params_on_devices=False)}, 'params_on_devices is False'),
        ({'partitioner': PjitPartitioner(1, backend='quark')}, 'no mesh: Unknown backend'),
        ({'partitioner': PjitPartitioner(mesh=EXPLICIT)}, 'Explicit.* needs Auto axes'),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else '',
)
def test_a_wrong_setting_of_a_run(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        small_config(**{'model_dir': Path('model'), 'texts': TEXTS} | changes)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    'make, message',
    [
        (lambda: CheckpointConfig(keep=0), 'keep is 0'),
        (lambda: CheckpointConfig(period=-1), 'period is -1'),
        (lambda: CheckpointConfig(steps=[2, 0]), r'steps\[1\] is 0'),
        (lambda: CheckpointConfig(steps='2'), "steps is '2': it must be a list"),
        (lambda: RestoreConfig(path=''), "path is ''"),
        (lambda: RestoreConfig(path='x', mode='all'), "mode is 'all'"),
        (lambda: HeldOut(limit=0), r'HeldOut\.limit is 0'),
        (lambda: HeldOut(task=CausalLM), r'HeldOut\.task is <class'),
        (lambda: Samples(prompts='a'), "prompts is 'a': it must be a list"),
        (lambda: Samples(prompts=[]), r'prompts is \[\]'),
        (lambda: Samples(length=-1), r'Samples\.length is -1'),
        (lambda: Samples(temperature=-1.0), r'temperature is -1\.0'),
        (lambda: NextToken(model=Bigram), r'the class Bigram: .* such as Mlp\(\)'),
    ],
)
def test_a_wrong_setting_of_its_parts(make, message):
    with pytest.raises(ConfigError, match=message) as error:
        make()
    assert len(str(error.value).splitlines()) == 1


def test_the_defaults_and_that_settings_cannot_be_changed():
    required = ('model_dir', 'objective', 'partitioner', 'optimizer', 'task')
    given = small_config(Path('model'), TEXTS)
    config = TrainConfig(total_steps=5, batch_size=8, **{n: getattr(given, n) for n in required})
    assert choose_evaluators(config) == {'eval': HeldOut()}
    assert config.writers == (JsonWriter, TensorBoardWriter)
    assert (config.checkpoints, config.prefetch) == (CheckpointConfig(), Prefetch())
    assert (config.seed, config.log_every, config.num_microbatches, config.hooks) == (0, 10, 1, ())
    no_held_out = dataclasses.replace(config, task=Examples(training={'x': [1]}), evaluators=None)
    assert choose_evaluators(no_held_out) == {}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1
    with pytest.raises(TypeError, match='positional'):
        TrainConfig('model')


def test_each_microbatch_has_the_same_rows_on_every_device():
    check_batch(partitioner(4, 2), 24, 3)
    with pytest.raises(ConfigError, match=r'batch_size 24 .* 4 microbatches .*a multiple of 16'):
        check_batch(partitioner(4, 2), 24, 4)
