"""T5X's gin files with other imports: pretraining, finetuning, evaluating, and what is wrong."""

import json
import os
import subprocess
import sys

import gin
import jax
import numpy as np
import optax
import pytest
from small_runs import records
from test_gin_config import _own_registry  # noqa: F401  # a fixture of every test here

import train.configurables  # noqa: F401  # registered once, before any test
from partitioning import PjitPartitioner
from train.checkpoints import CheckpointConfig
from train.config import check_complete, find_entry, load_config
from train.config.load import REPOSITORY
from train.data import CausalLM, TextFiles
from train.errors import ConfigError
from train.models.transformer import Transformer, TransformerConfig
from train.optimizers import Optimizer
from train.steps import LossConfig
from train.t5x import seqio
from train.t5x.adafactor import Adafactor
from train.t5x.configs import create_learning_rate_scheduler
from train.t5x.network import with_kv_heads
from train.train import train as train_here

MODEL = 'configs/t5x/decoder_only_tiny.gin'
TASK = """
from __gin__ import dynamic_registration
from train import data

MIXTURE_OR_TASK_NAME = 'counts'
TASK_FEATURE_LENGTHS = {{'targets': 16}}
seqio.get_mixture_or_task.tasks = {{'counts': @data.CausalLM()}}
data.CausalLM.source = @data.TextFiles()
data.TextFiles:
  root = '{root}'
  pattern = '*.txt'
  holdout_percent = 20.0
""".replace('from train import data\n', 'from train import data\nfrom train.t5x import seqio\n')
SMALL = [
    'network.TransformerConfig.num_layers=1',
    'network.TransformerConfig.emb_dim=32',
    'network.TransformerConfig.head_dim=8',
    'network.TransformerConfig.mlp_dim=64',
    'network.TransformerConfig.vocab_size=264',
    'utils.create_learning_rate_scheduler.warmup_steps=100',
]


@pytest.fixture
def files(texts, tmp_path):
    """The gin files of a kind of run on a small task."""
    task = tmp_path / 'task.gin'
    task.write_text(TASK.format(root=texts))
    return lambda kind: [MODEL, f'configs/t5x/{kind}.gin', str(task)]


@pytest.fixture
def load(files):
    """Reads the files of a kind, with bindings over them, and finds what they run."""

    def load(kind, *bindings):
        gin.clear_config()
        small = SMALL if kind != 'eval' else SMALL[:-1]  # T5X evaluates without a learning rate
        load_config(files(kind), [*small, *bindings])
        entry = find_entry()
        check_complete(entry)
        return entry

    return load


@pytest.fixture
def pretrain(load):
    def pretrain(model_dir, *bindings):
        small = ['BATCH_SIZE=8', 'EVAL_PERIOD=10', 'EVAL_STEPS=None', 'TRAIN_STEPS=20']
        small += ['utils.SaveCheckpointConfig.period=10']
        return load('pretrain', *small, f"MODEL_DIR='{model_dir}'", *bindings)()

    return pretrain


def checkpoints(model_dir):
    return sorted(int(p.name) for p in (model_dir / 'checkpoints').iterdir())


# Runs.


def test_pretraining_finetuning_and_evaluating(pretrain, load, tmp_path, capsys):
    """One after another, each from what the one before has left."""
    model_dir = tmp_path / 'model'
    pretrain(model_dir, 'TRAIN_STEPS=10')
    state = pretrain(model_dir)
    assert int(state.step) == 20
    said = capsys.readouterr().out
    assert 'train_script.train.random_seed is None, so any will do: it is 0' in said
    assert f'resumed from step 10 of {model_dir}/checkpoints' in said
    assert checkpoints(model_dir) == [10, 20]
    written = records(model_dir)
    losses = [r['train/loss'] for r in written if 'train/loss' in r]
    assert len(losses) == 2 and losses[1] < losses[0] < np.log(264) + 1
    assert {'train/z_loss', 'train/weight_rms/embedding', 'eval/loss'} <= {
        k for r in written for k in r
    }

    tuned_dir = tmp_path / 'tuned'
    tune = [f"MODEL_DIR='{tuned_dir}'", f"INITIAL_CHECKPOINT_PATH='{model_dir}/checkpoints/20'"]
    tune += ['BATCH_SIZE=8', 'EVAL_PERIOD=4', 'utils.SaveCheckpointConfig.checkpoint_steps=[22]']
    tune += ['models.DecoderOnlyModel.predict_batch_with_aux.num_decodes=8']
    assert int(load('finetune', *tune, 'TRAIN_STEPS=24')().step) == 24
    said = capsys.readouterr().out
    assert f'restored from step 20 of {model_dir}/checkpoints' in said
    assert 'infer_eval_dataset_cfg: tasks have no metrics of decoded text' in said
    assert checkpoints(tuned_dir) == [22, 24]
    assert checkpoints(model_dir) == [10, 20]
    assert records(tuned_dir)[0]['step'] == 22

    # What is in the folder of the run comes before the path to restore.
    assert int(load('finetune', *tune, 'TRAIN_STEPS=25')().step) == 25
    assert f'resumed from step 24 of {tuned_dir}/checkpoints' in capsys.readouterr().out

    output = tmp_path / 'scores'
    path = [f"CHECKPOINT_PATH='{model_dir}/checkpoints/20'", f"EVAL_OUTPUT_DIR='{output}'"]
    scores = load('eval', *path, 'utils.DatasetConfig.batch_size=16')()
    [in_training] = [r for r in written if r['step'] == 20 and 'eval/loss' in r]
    assert scores.keys() == {'eval/loss', 'eval/accuracy', 'eval/bits_per_byte'}
    for name, score in scores.items():
        assert score == pytest.approx(in_training[name], rel=1e-5)
    [noted] = [json.loads(line) for line in (output / '20/metrics.jsonl').read_text().splitlines()]
    assert noted == {'step': 20, **scores}

    # The newest one, on another mesh; the other model is another score.
    latest = ["utils.RestoreCheckpointConfig.mode='latest'"]
    path[0] = f"CHECKPOINT_PATH='{tuned_dir}'"
    other = load('eval', *path, *latest, 'partitioning.PjitPartitioner.num_partitions=2')()
    assert other['eval/loss'] != pytest.approx(scores['eval/loss'], rel=1e-6)
    assert sorted(p.name for p in output.iterdir()) == ['20', '25', 'config.gin']


def test_the_settings_are_those_of_this_trainer(pretrain, tmp_path, texts):
    """A run by T5X's settings is the run of this trainer by its own."""
    pretrain(tmp_path / 'theirs', 'RANDOM_SEED=3', 'trainer.Trainer.num_microbatches=1')
    gin.clear_config()
    source = TextFiles(pattern='*.txt', root=str(texts), holdout_percent=20.0)
    config = TransformerConfig(
        vocab_size=264,
        num_layers=1,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        mlp_dim=64,
        tie_embeddings=True,
        scan_layers=False,
    )
    rate = create_learning_rate_scheduler(
        factors='constant * rsqrt_decay', base_learning_rate=1.0, warmup_steps=100
    )
    train_here(
        model_dir=str(tmp_path / 'ours'),
        model=Transformer(config),
        partitioner=with_kv_heads(PjitPartitioner(num_partitions=1)),
        optimizer=Optimizer(transform=optax.adafactor, learning_rate=rate, clip_norm=None),
        task=CausalLM(source=source),
        total_steps=20,
        batch_size=8,
        sequence_length=16,
        eval_period=10,
        checkpoints=CheckpointConfig(period=10, keep=None),
        loss=LossConfig(z_loss=0.0001, divisor=1.0),
        weight_metrics=True,
        log_period=10,
        seed=3,
    )
    assert records(tmp_path / 'theirs') == records(tmp_path / 'ours')


def test_the_written_configuration_is_enough_to_go_on(pretrain, tmp_path):
    pretrain(tmp_path, 'TRAIN_STEPS=2')
    gin.clear_config()
    load_config([str(tmp_path / 'config.gin')], ['TRAIN_STEPS=3'])
    assert int(find_entry()().step) == 3


def test_parameters_of_another_size_are_not_restored(pretrain, load, tmp_path):
    pretrain(tmp_path / 'model', 'TRAIN_STEPS=1')
    path = f"INITIAL_CHECKPOINT_PATH='{tmp_path}/model/checkpoints/1'"
    tune = load(
        *('finetune', f"MODEL_DIR='{tmp_path}/tuned'", path, 'TRAIN_STEPS=2', 'BATCH_SIZE=8'),
        'network.TransformerConfig.mlp_dim=128',
    )
    with pytest.raises(ConfigError, match=r'mlp/down: \(64, 32\) float32 in the ch') as error:
        tune()
    assert 'or another utils.RestoreCheckpointConfig.path' in str(error.value)
    path = [f"CHECKPOINT_PATH='{tmp_path}/model'", f"EVAL_OUTPUT_DIR='{tmp_path}/scores'"]
    path += ["utils.RestoreCheckpointConfig.mode='latest'"]
    with pytest.raises(ConfigError, match=r'(?s)mlp/down: \(64, 32\).*\(128, 32\) float32'):
        load('eval', *path, 'network.TransformerConfig.mlp_dim=128')()
    assert not (tmp_path / 'scores').exists()


@pytest.mark.parametrize(
    'path, mode, said',
    [
        ('nowhere', 'latest', r'RestoreCheckpointConfig\.path \S+nowhere does not exist'),
        ('model/checkpoint_20', 'specific', r'(?m)T5X.* is \S+/model/checkpoints/20$'),
        ('model', 'specific', r"checkpoints/<step>.*mode 'latest'"),
        (
            'model/checkpoints/7',
            'specific',
            r'not a complete checkpoint; \S+/checkpoints has .* \[\]',
        ),
        ('model', 'latest', 'not a complete checkpoint'),
    ],
)
def test_checkpoints_that_are_not_there(load, tmp_path, path, mode, said):
    (tmp_path / 'model/checkpoints/7').mkdir(parents=True)
    entry = load(
        *('finetune', f"MODEL_DIR='{tmp_path}/tuned'", 'TRAIN_STEPS=2'),
        f"INITIAL_CHECKPOINT_PATH='{tmp_path}/{path}'",
        f"utils.RestoreCheckpointConfig.mode='{mode}'",
    )
    with pytest.raises(ConfigError, match=said):
        entry()
    assert not (tmp_path / 'tuned').exists()


# What a command runs.


def test_a_command_runs_one_thing(load, files, tmp_path):
    assert load('pretrain', 'TRAIN_STEPS=1', "MODEL_DIR='x'").__module__ == 'train.t5x.train_script'
    where = ["CHECKPOINT_PATH='x'", "EVAL_OUTPUT_DIR='x'"]
    assert load('eval', *where).__module__ == 'train.t5x.eval_script'
    gin.clear_config()
    both = ['configs/t5x/eval.gin', *files('pretrain')]
    load_config(both, [*SMALL, 'TRAIN_STEPS=1', "MODEL_DIR='x'", *where])
    with pytest.raises(ConfigError, match=r'train_script\.train and .*eval_script\.evaluate'):
        find_entry()
    gin.clear_config()
    assert find_entry().__module__ == 'train.train'


@pytest.mark.parametrize('kind', ['pretrain', 'finetune', 'eval'])
def test_what_a_file_requires(files, kind):
    with pytest.raises(ConfigError, match=r'gin:\d+: \w+ needs a value: add --gin\.\w+=\.\.\.'):
        load_config(files(kind), [])


def lines(text):
    return text.strip().splitlines()


@pytest.mark.parametrize(
    'line, said',
    [
        ('train_script.train.total_step = 1', "Did you mean 'total_steps'?"),
        ('train_script.train:\n  eval_perod = 1', "Did you mean 'eval_period'?"),
        ('train/utils.DatasetConfig.shufle = True', "Did you mean 'shuffle'?"),
        ('train_eval/utils.DatasetConfig:\n  batchsize = 1', "Did you mean 'batch_size'?"),
        ('utils.SaveCheckpointConfig.perid = 1', "Did you mean 'period'?"),
        ('utils.RestoreCheckpointConfig:\n  paht = []', "Did you mean 'path'?"),
        ('trainer.Trainer.num_microbatch = 1', "Did you mean 'num_microbatches'?"),
        ('partitioning.PjitPartitioner.num_partition = 1', "Did you mean 'num_partitions'?"),
        ('utils.DatasetConfg.pack = True', "Did you mean 'DatasetConfig'?"),
        ('util.DatasetConfig.pack = True', "Did you mean 'utils'?"),
        ('partitioning.PjitPartitoner.num_partitions = 1', "Did you mean 'PjitPartitioner'?"),
        (
            'partitioning.ModelBasedPjitPartitioner.num_partitions = 1',
            'write partitioning.PjitPartitioner',
        ),
        ('trian/utils.DatasetConfig.batch_size = 64', "Did you mean 'train'?"),
        ('somewhere/utils.DatasetConfig.batch_size = 64', 'no reference enters'),
        ('train_script.train.total_steps = %TRAIN_STEP', "Did you mean 'TRAIN_STEPS'?"),
        ('from t5x import utils', 'from train.t5x import configs as utils'),
        ('import seqio', 'from train.t5x import seqio'),
        ('import __main__ as train_script', 'from train.t5x import train_script'),
    ],
)
def test_a_wrong_name_says_the_nearest_right_one(files, tmp_path, line, said):
    file, text = tmp_path / 'mine.gin', (REPOSITORY / 'configs/t5x/pretrain.gin').read_text()
    head, _, rest = text.partition('import partitioning\n')
    written = f'{head}import partitioning\n{rest}{line}\n'
    file.write_text(written)
    place = f'{file}:{len(lines(written))}: '
    with pytest.raises(ConfigError) as error:
        load_config([MODEL, str(file), files('x')[-1]], ['TRAIN_STEPS=1', "MODEL_DIR='x'"])
    assert said in str(error.value)
    assert str(error.value).startswith(place)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    'flag, said',
    [
        ('utils.SaveCheckpointConfig.perid=1', "Did you mean 'period'?"),
        ('train/utils.DatasetConfig.shufle=True', "Did you mean 'shuffle'?"),
        ('trian/utils.DatasetConfig.batch_size=64', "Did you mean 'train'?"),
        ('TRAIN_STEP=1', "Did you mean 'TRAIN_STEPS'?"),
    ],
)
def test_a_wrong_flag_says_the_nearest_right_one(files, flag, said):
    with pytest.raises(ConfigError) as error:
        load_config(files('pretrain'), ['TRAIN_STEPS=1', "MODEL_DIR='x'", flag])
    assert said in str(error.value)
    assert str(error.value).startswith(f'--gin.{flag}: ')


# The command line.


def command(*args):
    environment = os.environ | {'JAX_PLATFORMS': 'cpu'}
    environment.pop('XLA_FLAGS', None)
    return subprocess.run(
        [sys.executable, '-m', 'train', *args],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_the_command_line(files, tmp_path):
    given = [f'--gin_file={file}' for file in files('pretrain')]
    given += [f'--gin.{binding}' for binding in SMALL]
    given += [f"--gin.MODEL_DIR='{tmp_path}/model'", '--gin.TRAIN_STEPS=2', '--gin.BATCH_SIZE=8']
    done = command(*given)
    assert done.returncode == 0, done.stderr
    assert 'step 2/2' in done.stdout
    assert checkpoints(tmp_path / 'model') == [2]

    refused = command(*given, "--gin.utils.SaveCheckpointConfig.dtype='bfloat16'")
    assert refused.returncode == 2
    [said] = refused.stderr.splitlines()
    assert said.startswith("error: utils.SaveCheckpointConfig.dtype is 'bfloat16': ")
    assert said.endswith("write utils.SaveCheckpointConfig.dtype = 'float32'")


# Names.


def test_tasks_have_names(texts):
    task = CausalLM(source=TextFiles(pattern='*.txt', root=str(texts)))
    seqio.TaskRegistry.add('mine', task)
    try:
        assert seqio.get_mixture_or_task('mine') is task
        assert seqio.MixtureRegistry.names() == ['mine']
        with pytest.raises(ConfigError, match=r"Did you mean 'mine'\?"):
            seqio.get_mixture_or_task('mines')
        with pytest.raises(ConfigError, match='another task'):
            seqio.TaskRegistry.add('mine', CausalLM(source=task.source, packing='pack'))
        with pytest.raises(ConfigError, match='no Task'):
            seqio.TaskRegistry.add('other', 'mine')
    finally:
        seqio.TaskRegistry.remove('mine')
    assert seqio.get_mixture_or_task(task) is task


def test_adafactor_moves_by_the_scale_of_a_parameter():
    """Its first step, by hand: the sign of the gradient, times the root mean square."""
    optimizer = Adafactor(factored=False, weight_decay_rate=0.1).optimizer(lambda step: 0.5)
    p, g = np.array([[3.0, -4.0]]), np.array([[0.2, -7.0]])
    params, grads = {'w': jax.numpy.asarray(p)}, {'w': jax.numpy.asarray(g)}
    tx = optimizer.build()
    updates, _ = tx.update(grads, tx.init(params), params)
    expected = -0.5 * np.sqrt(12.5) * np.sign(g) - 0.1 * p
    np.testing.assert_allclose(updates['w'], expected, rtol=1e-5)


def test_restoring_in_the_words_of_this_trainer(run, tmp_path, capsys):
    run(tmp_path / 'one', 'TRAIN_STEPS=2')
    path = f"RestoreConfig.path='{tmp_path}/one'"
    state = run(tmp_path / 'two', 'TRAIN_STEPS=3', 'train.restore=@RestoreConfig()', path)
    assert int(state.step) == 3
    assert f'restored from step 2 of {tmp_path}/one/checkpoints' in capsys.readouterr().out
    assert checkpoints(tmp_path / 'two') == [3]
    assert [r['step'] for r in records(tmp_path / 'two') if 'train/loss' in r] == [3]
    with pytest.raises(ConfigError, match=r'train\.restore is the class RestoreConfig'):
        run(tmp_path / 'three', 'train.restore=@RestoreConfig', path)
