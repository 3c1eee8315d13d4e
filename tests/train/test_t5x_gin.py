"""T5X's gin files with other imports: pretraining, finetuning, evaluating, and wrong names."""

import json

import gin
import numpy as np
import pytest
from absl.testing import flagsaver
from gin_fixtures import load_config
from small import records, text_task
from small_t5x import T5X_MODEL, T5X_SMALL

from partitioning import PjitPartitioner
from train import HeldOut, TrainConfig
from train.checkpoints import CheckpointConfig
from train.cli import main
from train.data import ByT5Tokenizer, CausalLM, TextFiles
from train.errors import ConfigError
from train.gin.load import find_entry
from train.gin.parsing import find_config_root
from train.machine import devices as machine
from train.models.t5 import DecoderOnly, DecoderOnlyConfig
from train.running.training import train as train_here
from train.t5x import seqio
from train.t5x.adafactor import Adafactor, standard_logical_factor_rules
from train.t5x.metrics import T5XPrefixLanguageModel
from train.t5x.schedules import create_learning_rate_scheduler


@pytest.fixture
def pretrain(load_t5x):
    def pretrain(model_dir, *bindings):
        small = ['BATCH_SIZE=8', 'EVAL_PERIOD=10', 'EVAL_STEPS=None', 'TRAIN_STEPS=20']
        small += ['utils.SaveCheckpointConfig.period=10']
        return load_t5x('pretrain', *small, f"MODEL_DIR='{model_dir}'", *bindings)()

    return pretrain


def checkpoints(model_dir):
    return sorted(int(p.name.removeprefix('checkpoint_')) for p in model_dir.glob('checkpoint_*'))


# Runs.


@pytest.mark.long
def test_pretraining_finetuning_and_evaluating(pretrain, load_t5x, tmp_path, capsys):
    """Each run starts from the checkpoint of the previous run."""
    model_dir = tmp_path / 'model'
    pretrain(model_dir, 'TRAIN_STEPS=10')
    state = pretrain(model_dir)
    assert int(state.step) == 20
    output = capsys.readouterr().out
    assert ', chosen by the time' in output and ', of the earlier run' in output
    assert f'resumed from step 10 of {model_dir}' in output
    assert checkpoints(model_dir) == [10, 20]
    written = records(model_dir)
    name = 'train/loss_per_nonpadding_target_token'
    losses = [r[name] for r in written if name in r]
    assert len(losses) == 2 and max(losses) < np.log(264) + 1
    assert {'train/z_loss', 'train/weight_rms/decoder/token_embedder/embedding', 'eval/loss'} <= {
        k for r in written for k in r
    }

    tuned_dir = tmp_path / 'tuned'
    tune = [f"MODEL_DIR='{tuned_dir}'", f"INITIAL_CHECKPOINT_PATH='{model_dir}/checkpoint_20'"]
    tune += ['BATCH_SIZE=8', 'EVAL_PERIOD=4', 'utils.SaveCheckpointConfig.checkpoint_steps=[22]']
    tune += ['models.DecoderOnlyModel.predict_batch_with_aux.num_decodes=8']
    assert int(load_t5x('finetune', *tune, 'TRAIN_STEPS=24')().step) == 24
    output = capsys.readouterr().out
    assert f'restored from step 20 of {model_dir}' in output
    assert 'infer_eval_dataset_cfg is skipped' in output
    assert checkpoints(tuned_dir) == [22, 24]
    assert checkpoints(model_dir) == [10, 20]
    assert records(tuned_dir)[0]['step'] == 22

    # A run's own checkpoints take precedence over the path to restore.
    assert int(load_t5x('finetune', *tune, 'TRAIN_STEPS=25')().step) == 25
    assert f'resumed from step 24 of {tuned_dir}' in capsys.readouterr().out

    output = tmp_path / 'scores'
    path = [f"CHECKPOINT_PATH='{model_dir}/checkpoint_20'", f"EVAL_OUTPUT_DIR='{output}'"]
    scores = load_t5x('eval', *path, 'utils.DatasetConfig.batch_size=16')()
    [in_training] = [r for r in written if r['step'] == 20 and 'eval/loss' in r]
    names = {'loss', 'accuracy', 'z_loss', 'bits_per_byte', 'loss_per_nonpadding_target_token'}
    assert scores.keys() == in_training.keys() - {'step'} > {f'eval/{name}' for name in names}
    for name in names - {'loss', 'z_loss'}:  # which are means over batches of another size
        name = f'eval/{name}'
        assert scores[name] == pytest.approx(in_training[name], rel=1e-5)
    [noted] = [json.loads(line) for line in (output / '20/metrics.jsonl').read_text().splitlines()]
    assert noted == {'step': 20, **scores}

    # The newest checkpoint of the finetuned model, on another mesh.
    latest = ["utils.RestoreCheckpointConfig.mode='latest'"]
    path[0] = f"CHECKPOINT_PATH='{tuned_dir}'"
    other = load_t5x('eval', *path, *latest, 'partitioning.PjitPartitioner.num_partitions=2')()
    assert other['eval/loss'] != pytest.approx(scores['eval/loss'], rel=1e-6)
    assert sorted(p.name for p in output.iterdir()) == ['20', '25', 'config.gin']


@pytest.mark.long
def test_t5x_settings_equal_native_settings(pretrain, tmp_path, texts):
    """A run with T5X's settings equals a run with this trainer's own settings."""
    pretrain(tmp_path / 'theirs', 'RANDOM_SEED=3', 'trainer.Trainer.num_microbatches=1')
    gin.clear_config()
    config = DecoderOnlyConfig(
        vocab_size=264,
        num_layers=1,
        emb_dim=32,
        num_heads=4,
        head_dim=8,
        mlp_dim=64,
        mlp_activations=('gelu', 'linear'),
        dropout_rate=0.0,
        logits_via_embedding=True,
    )
    model = DecoderOnly(config)
    rate = create_learning_rate_scheduler(
        factors='constant * rsqrt_decay', base_learning_rate=1.0, warmup_steps=100
    )
    rules = standard_logical_factor_rules()
    train_here(
        TrainConfig(
            model_dir=tmp_path / 'ours',
            objective=T5XPrefixLanguageModel(model=model, z_loss=0.0001, loss_divisor=1.0),
            partitioner=PjitPartitioner(num_partitions=1),
            optimizer=Adafactor(logical_factor_rules=rules).optimizer(rate),
            task=text_task(texts, tokenizer=ByT5Tokenizer()),
            total_steps=20,
            batch_size=8,
            sequence_length=16,
            evaluators={'eval': HeldOut(every=10)},
            checkpoints=CheckpointConfig(period=10, keep=None, when_busy='wait'),
            weight_metrics=True,
            seed=3,
            split_key=True,
        )
    )
    assert records(tmp_path / 'theirs') == records(tmp_path / 'ours')


@pytest.mark.long
def test_the_settings_of_a_run(pretrain, tmp_path, capsys):
    """Relative steps, an evaluation at the start, random numbers of the hardware, and actions."""
    actions = (
        "actions={'TRAIN': [@trainer.TerminateOnNanAction()],"
        " 'TRAIN_EVAL': [@trainer.EarlyStoppingAction()]}"
    )
    settings = [
        'total_steps=0',
        'relative_steps=4',
        'run_eval_before_training=True',
        'use_hardware_rng=True',
        'random_seed=7',
        'eval_period=2',
        'stats_period=1',
        'gc_period=2',
        'get_dataset_fn=@utils.get_dataset',
        'train_eval_get_dataset_fn=@utils.get_training_eval_datasets',
        'train_state_initializer_cls=@utils.TrainStateInitializer',
        actions,
    ]
    bindings = [f'train_script.train.{setting}' for setting in settings]
    bindings += [
        'utils.get_training_eval_datasets.deterministic=False',
        'train/utils.DatasetConfig.seed=3',
        'EVAL_STEPS=1',
        "trainer.EarlyStoppingAction.metric=('counts', 'loss')",
        "trainer.EarlyStoppingAction.mode='max'",  # the loss falls, so no value is better
    ]
    assert int(pretrain(tmp_path, *bindings).step) == 4
    evaluated = [r['step'] for r in records(tmp_path) if 'eval/loss' in r]
    trained = [r['step'] for r in records(tmp_path) if 'train/loss' in r]
    assert (evaluated, trained) == ([0, 2, 4], [1, 2, 3, 4])
    assert 'step 4: stopping early, because eval/loss has not improved' in capsys.readouterr().out
    recorded = json.loads((tmp_path / 'data.json').read_text())['settings']
    assert recorded['prng_impl'] == 'unsafe_rbg'
    assert (recorded['random_seed'], recorded['seed']) == (7, 3)
    assert int(pretrain(tmp_path, *bindings).step) == 8, 'the steps count from the checkpoint'


def test_actions_name_tasks_that_are_evaluated(pretrain, tmp_path):
    binding = "train_script.train.actions={'TRAIN_EVAL': [@trainer.TerminateOnNanAction()]}"
    with pytest.raises(ConfigError, match=r"the task 'cuonts' .*the tasks are 'counts'"):
        pretrain(tmp_path, binding, "trainer.TerminateOnNanAction.task='cuonts'")


@pytest.mark.long
def test_the_command_resumes_a_run_from_its_folder(pretrain, tmp_path, capsys, monkeypatch):
    pretrain(tmp_path, 'TRAIN_STEPS=2')
    gin.clear_config()
    monkeypatch.setattr(machine, 'use_virtual_devices', lambda count: None)  # jax has its devices
    with flagsaver.flagsaver():
        assert main(['train', str(tmp_path), '--gin.TRAIN_STEPS=3']) == 0
    assert 'step 3/3' in capsys.readouterr().out
    assert checkpoints(tmp_path) == [2, 3]


@pytest.mark.long
def test_parameters_of_another_size_are_not_restored(pretrain, load_t5x, tmp_path):
    pretrain(tmp_path / 'model', 'TRAIN_STEPS=1')
    path = f"INITIAL_CHECKPOINT_PATH='{tmp_path}/model/checkpoint_1'"
    tune = load_t5x(
        *('finetune', f"MODEL_DIR='{tmp_path}/tuned'", path, 'TRAIN_STEPS=2', 'BATCH_SIZE=8'),
        'network.TransformerConfig.mlp_dim=128',
    )
    with pytest.raises(ConfigError, match=r'wi_0/kernel: \(32, 64\) float32 in the ch') as error:
        tune()
    assert 'or another utils.RestoreCheckpointConfig.path' in str(error.value)
    path = [f"CHECKPOINT_PATH='{tmp_path}/model'", f"EVAL_OUTPUT_DIR='{tmp_path}/scores'"]
    path += ["utils.RestoreCheckpointConfig.mode='latest'"]
    with pytest.raises(ConfigError, match=r'(?s)mlp/wi_0/kernel: \(32, 64\).*\(32, 128\) float32'):
        load_t5x('eval', *path, 'network.TransformerConfig.mlp_dim=128')()
    assert not (tmp_path / 'scores').exists()


def test_a_missing_checkpoint_names_the_setting(load_t5x, tmp_path):
    where = [f"MODEL_DIR='{tmp_path}/tuned'", f"INITIAL_CHECKPOINT_PATH='{tmp_path}/nowhere'"]
    with pytest.raises(ConfigError, match=r'RestoreCheckpointConfig\.path \S+nowhere does not'):
        load_t5x('finetune', 'TRAIN_STEPS=2', *where)()
    assert not (tmp_path / 'tuned').exists()


# Entry points.


def test_a_command_runs_one_entry_point(load_t5x, t5x_files):
    assert (
        load_t5x('pretrain', 'TRAIN_STEPS=1', "MODEL_DIR='x'").__module__
        == 'train.t5x.train_script'
    )
    where = ["CHECKPOINT_PATH='x'", "EVAL_OUTPUT_DIR='x'"]
    assert load_t5x('eval', *where).__module__ == 'train.t5x.eval_script'
    gin.clear_config()
    both = ['configs/t5x/eval.gin', *t5x_files('pretrain')]
    load_config(both, [*T5X_SMALL, 'TRAIN_STEPS=1', "MODEL_DIR='x'", *where])
    with pytest.raises(ConfigError, match=r'train_script\.train and .*eval_script\.evaluate'):
        find_entry()
    gin.clear_config()
    with pytest.raises(ConfigError, match='describe no run'):
        find_entry()


@pytest.mark.parametrize('kind', ['pretrain', 'finetune', 'eval'])
def test_files_require_the_users_settings(t5x_files, kind):
    with pytest.raises(ConfigError, match=r'gin:\d+: \d settings need values: add --gin\.\w+='):
        load_config(t5x_files(kind), [])


def lines(text):
    return text.strip().splitlines()


@pytest.mark.parametrize(
    'line, expected',
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
        ('somewhere/utils.DatasetConfig.batch_size = 64', "scope 'somewhere' is never used"),
        ('train_script.train.total_steps = %TRAIN_STEP', 'Add --gin.TRAIN_STEP=...'),
        ('from t5x import models as utils', 'import t5x.models under another name'),
        ('import seqio as gin', "'gin' is gin itself"),
    ],
)
def test_wrong_names_suggest_the_nearest(t5x_files, tmp_path, line, expected):
    file, text = (
        tmp_path / 'mine.gin',
        (find_config_root() / 'configs/t5x/pretrain.gin').read_text(),
    )
    head, _, rest = text.partition('import partitioning\n')
    written = f'{head}import partitioning\n{rest}{line}\n'
    file.write_text(written)
    place = f'{file}:{len(lines(written))}: '
    with pytest.raises(ConfigError) as error:
        load_config([T5X_MODEL, str(file), t5x_files('x')[-1]], ['TRAIN_STEPS=1', "MODEL_DIR='x'"])
    assert expected in str(error.value)
    assert str(error.value).startswith(place)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    'flag, expected',
    [
        ('utils.SaveCheckpointConfig.perid=1', "Did you mean 'period'?"),
        ('train/utils.DatasetConfig.shufle=True', "Did you mean 'shuffle'?"),
        ('trian/utils.DatasetConfig.batch_size=64', "Did you mean 'train'?"),
        ('TRAIN_STEP=1', "Did you mean 'TRAIN_STEPS'?"),
    ],
)
def test_wrong_flags_suggest_the_nearest(t5x_files, flag, expected):
    with pytest.raises(ConfigError) as error:
        load_config(t5x_files('pretrain'), ['TRAIN_STEPS=1', "MODEL_DIR='x'", flag])
    assert expected in str(error.value)
    assert str(error.value).startswith(f'--gin.{flag}: ')


# Tasks and optimizers.


def test_tasks_by_name(texts):
    task = CausalLM(source=TextFiles(pattern='*.txt', root=str(texts)))
    seqio.TaskRegistry.add('mine', task)
    try:
        assert seqio.get_mixture_or_task('mine') is task
        assert seqio.MixtureRegistry.names() == ['mine']
        with pytest.raises(ConfigError, match=r"Did you mean 'mine'\?"):
            seqio.get_mixture_or_task('mines')
        with pytest.raises(ConfigError, match='another task'):
            seqio.TaskRegistry.add('mine', CausalLM(source=task.source, packing='pack'))
        with pytest.raises(ConfigError, match='must be a Task'):
            seqio.TaskRegistry.add('other', 'mine')
    finally:
        seqio.TaskRegistry.remove('mine')
    assert seqio.get_mixture_or_task(task) is task
