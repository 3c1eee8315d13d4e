"""The command `meshwright`: its help, its names of runs, meshes and plans."""

import os
import re
import subprocess
import sys

import jax
import pytest

import train
from partitioning import PjitPartitioner
from train.cli import main, training
from train.errors import ConfigError
from train.gin.load import find_config

pytestmark = pytest.mark.usefixtures('meshwright')


@pytest.mark.parametrize('arguments', [[], ['--help'], ['help']])
def test_the_help_has_an_example_of_each_command(capsys, arguments):
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ('train', 'mesh', 'plan'):
        [number] = [n for n, line in enumerate(lines) if line.split()[:1] == [name]]
        assert f'$ meshwright {name} ' in lines[number + 1]
    assert max(map(len, lines)) <= 80


def test_output_that_nobody_reads_ends_in_silence():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, '-m', 'train.cli', '--help']
    ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b'')  # as a shell tells of SIGPIPE


@pytest.mark.parametrize(
    ('name', 'words'),
    [
        ('train', ['finetune, finetune_pairs', 'meshwright train quickstart', '--gin_allow']),
        ('eval', ['meshwright eval runs/quickstart --step=225', 'later files override']),
        ('predict', ['meshwright predict runs/translate --beams=4', '--mode', '--top_p']),
        ('generate', ['meshwright generate runs/quickstart --prompt', '--temperature']),
        ('mesh', ['usage: meshwright mesh [--mesh data=4,model=2]', '--num_partitions', '--png']),
        ('plan', ['show print a plan', 'diff']),
        ('checkpoint', ['inspect', 'diff', 'verify', 'convert', 'PATH is a step or the folder']),
    ],
)
def test_the_help_of_a_command(capsys, monkeypatch, name, words):
    monkeypatch.setenv('COLUMNS', '80')
    with pytest.raises(SystemExit, match='0'):
        main([name, '--help'])
    out = capsys.readouterr().out
    assert not [part for part in words if part not in ' '.join(out.split())]
    # Prose is folded; the lines of examples, which are indented, can be pasted.
    prose = [line for line in out.splitlines() if not line.startswith('  meshwright ')]
    assert '{' not in out and max(map(len, prose)) <= 80


@pytest.mark.parametrize(
    ('arguments', 'words'),
    [
        (['trian'], "Did you mean 'train'?"),
        (['train', 'quickstrat'], "Did you mean 'quickstart'?"),
        (
            ['train', 'nowhere'],
            'The runs are finetune, finetune_pairs, forecast, pretrain, quickstart;',
        ),
        (['train', 'nowhere.gin'], 'no such gin file: nowhere.gin'),
        (['train', 'quickstart', '--gin.TRAIN_STEP=1'], "Did you mean 'TRAIN_STEPS'?"),
        (
            ['train', 'quickstart', '--profile_steps=1'],
            "argument --profile_steps: '1' must be the first and",
        ),
        (['train'], 'no gin file: add --gin_file='),
        (['train', 'quickstart', '--modeldir=3'], "no gin file uses the macro 'MODELDIR'. Did you"),
        (
            ['train', '--modeldir'],
            'flag --modeldir: settings are written --gin.NAME=value or --name=value; see meshwrigh',
        ),
        (['train', 'quickstart', '--gin.A.b=1'], "--gin.A.b=1: no configurable 'A'"),
        (['train', '--cpu_devices=0'], "argument --cpu_devices: '0' must be an integer >= 1"),
        (['plan', 'show'], 'required: PLAN; see meshwright plan show --help'),
        (['plan', 'print', 'x'], 'choose from'),
        (['plan', 'show', 'nowhere'], 'nowhere'),
        (['mesh', '--num_partitions=3'], 'num_partitions=3 does not divide the 8 devices'),
        (['mesh', '--mesh=data'], 'data=-1,model=8'),
    ],
)
def test_errors_are_one_line(meshwright, tmp_path, monkeypatch, arguments, words):
    monkeypatch.chdir(tmp_path)
    status, out, err = meshwright(*arguments)
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1
    assert words in err


def test_a_run_is_a_name_a_file_or_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run').mkdir()
    (tmp_path / 'run/config.gin').touch()
    assert training.find_gin_file('quickstart') == 'configs/runs/quickstart.gin'
    assert training.find_gin_file('mine.gin') == 'mine.gin'
    assert training.find_gin_file('run') == 'run/config.gin'


def test_the_current_folder_comes_last_in_the_search_for_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    main(['mesh'])
    assert sys.path[-1] == str(tmp_path)


TASK = 'MIXTURE_OR_TASK_NAME=@data.CausalLM()'


def test_a_run_with_the_settings_of_t5x_can_be_scored_too(load_t5x):
    load_t5x('pretrain', TASK, 'TRAIN_STEPS=7', "MODEL_DIR='run'")
    config = find_config()
    assert (config.total_steps, list(config.evaluators)) == (7, ['eval'])
    load_t5x('eval', TASK, "CHECKPOINT_PATH='run'", "EVAL_OUTPUT_DIR='scores'")
    with pytest.raises(ConfigError, match='evaluate is configured, which trains nothing'):
        find_config()


WITHOUT_EXTRAS = """
import sys
sys.modules |= dict.fromkeys(('orbax', 'grain', 'rich', 'tensorboardX'))  # cannot be imported
from train.cli import main
main(['--help'])
assert 'jax' not in sys.modules
assert main(['mesh', '--mesh=data=8']) == 0
sys.exit(main(['train', 'quickstart']))
"""


def test_what_works_without_the_packages_of_the_trainer():
    run = subprocess.run([sys.executable, '-c', WITHOUT_EXTRAS], capture_output=True, text=True)
    assert run.returncode == 2
    assert re.fullmatch(
        r"error: this needs the package \w+: pip install 'meshwright\[train\]'\n", run.stderr
    )


@pytest.mark.parametrize('name', train.__all__)
def test_a_name_of_the_package_is_the_object_and_not_a_module(name):
    import train.running.training

    assert callable(getattr(train, name))


def test_a_mesh_is_drawn(capsys):
    assert main(['mesh', '--mesh=data=4,model=2']) == 0
    assert capsys.readouterr().out.splitlines()[-1].split() == [
        f'{data}.{model}' for data in range(4) for model in range(2)
    ]


def test_plans_are_shown_and_compared(capsys, tmp_path):
    run, file = tmp_path / 'run', tmp_path / 'b.json'
    run.mkdir()
    state = {'params': {'w': jax.ShapeDtypeStruct((64, 8), 'float32')}}
    PjitPartitioner(layout='fsdp').plan(state).save(run / 'plan.json')
    PjitPartitioner(layout='data_parallel').plan(state).save(file)
    assert main(['plan', 'show', str(run)]) == 0
    assert 'params/w' in capsys.readouterr().out
    assert main(['plan', 'diff', str(run), str(run / 'plan.json')]) == 0
    assert capsys.readouterr().out == 'the plans are the same\n'
    assert main(['plan', 'diff', str(run), str(file)]) == 1
    assert '256 -> 2,048' in capsys.readouterr().out  # 64 * 8 * 4 bytes over 8 devices, and whole
