"""Flags as one types them, commands as they are printed, and what the lists of commands lead to."""

import contextlib
import http.server
import json
import re
import shlex
import threading
from types import SimpleNamespace

import flax.linen as nn
import pytest
from etils import epath

from train.cli import main
from train.cli.command import CommandParser, gin_settings
from train.errors import ConfigError
from train.gin.load import load_config
from train.objectives import NextToken
from train.planning.huggingface.models import find_model
from train.running.loop import report_results

PRETRAIN = ['configs/runs/pretrain.gin']


# Flags.


def bindings(*arguments):
    return gin_settings(CommandParser('meshwright train', '', '').read(arguments))[0]


def test_a_macro_is_a_flag_in_small_letters():
    expected = ["MODEL_DIR='my runs/ünï'"]
    assert bindings('--model_dir=my runs/ünï') == expected
    assert bindings('--gin.MODEL_DIR=my runs/ünï') == expected
    assert bindings("--gin.MODEL_DIR='my runs/ünï'") == expected
    assert bindings('--train_steps=20', '--gin.x=1') == ['x=1', 'TRAIN_STEPS=20']


@pytest.mark.parametrize(
    ('flag', 'words'),
    [
        ('--model-dir=x', 'unknown flag --model-dir'),
        ('--process_cuont=2', 'did you mean --process_count?'),
        ('--model_dir', 'unknown flag --model_dir: settings are written --gin.NAME=value or'),
        ('--cpu_devices=two', "'two' must be an integer >= 1"),
    ],
)
def test_a_flag_that_does_not_exist_is_one_line(flag, words, capsys):
    with pytest.raises(SystemExit) as ended:
        bindings(flag)
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count('\n') == 1


def refused(*flags):
    with pytest.raises(ConfigError) as caught:
        load_config(PRETRAIN, ['TEXT=a', *flags])
    assert '\n' not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ('flag', 'wanted'),
    [
        ('LEARNING_RATE=abc', 'peak_value is .* a number'),
        ('BATCH_SIZE=16x', 'TrainConfig.batch_size is .* an integer'),
        ('BATCH_SIZE=1.5', 'TrainConfig.batch_size is 1.5: it must be an integer'),
        ('TRAIN_STEPS=many', 'an integer'),
        ('Optimizer.clip_norm=x', 'a number or None'),
        ('optax.adamw.b1=x', 'optax.adamw.b1 is .* a number'),
        ('TrainConfig.seed=a', 'an integer or None'),
        ('TrainConfig.evaluate_first=yes', 'True or False'),
        ('TextFiles.holdout_percent=5%', 'a number'),
    ],
)
def test_a_wrong_type_is_one_line_that_begins_with_the_flag(flag, wanted):
    name, value = flag.split('=')
    shown = value if value == '1.5' else repr(value)
    message = refused(flag)
    assert message.startswith(f'--gin.{name}={shown}: ')
    assert re.search(wanted, message), message


@pytest.mark.parametrize(
    ('flag', 'wanted'),
    [
        (
            'Transformer.config=@HeldOut()',
            'is @HeldOut(): it must be a TransformerConfig',
        ),
        ('Transformer.config=@x/HeldOut', 'is @x/HeldOut: it must be a TransformerConfig'),
        ('Transformer.config=[@HeldOut()]', 'is a list: it must be a TransformerConfig'),
        ('TrainConfig.weight_metrics=@HeldOut()', 'it must be True or False'),
        ("TrainConfig.log_every={'a': @train.train}", 'is a dict: it must be an integer'),
    ],
)
def test_a_reference_to_what_a_setting_does_not_take_is_one_line(flag, wanted):
    assert wanted in refused(flag, *(['x/HeldOut.every=1'] if '@x/' in flag else []))


@pytest.mark.parametrize(
    ('flag', 'proposed'),
    [
        ('holdout_percent=5', '--gin.TextFiles.holdout_percent=5'),
        ('LOG_EVERY=3', '--gin.TrainConfig.log_every=3'),
        ('b1=0.8', '--gin.optax.adamw.b1=0.8'),
    ],
)
def test_a_macro_that_does_not_exist_leads_to_the_parameter(flag, proposed):
    assert refused(flag).endswith(f'Write {proposed}')
    load_config(PRETRAIN, ['TEXT=a', proposed.removeprefix('--gin.')])


# Commands that are printed.


def test_the_commands_at_the_end_of_a_run_can_be_pasted(tmp_path):
    said, folder = [], epath.Path(tmp_path / "it's ünï")
    folder.mkdir()
    (folder / 'config.gin').write_text('')
    console = SimpleNamespace(say=said.append, heading=lambda _: None, files=lambda _: None)
    run = SimpleNamespace(
        console=console,
        directory=folder,
        config=SimpleNamespace(objective=NextToken(model=nn.Embed(4, 4))),
        data=SimpleNamespace(tokenizer='any'),
    )
    report_results(run, SimpleNamespace(directory=folder), SimpleNamespace(paths={}))
    assert [shlex.split(line) for line in said] == [
        ['meshwright', 'generate', str(folder), '--prompt', 'def '],
        ['meshwright', 'eval', str(folder)],
    ]


# Shipped configurations.


@pytest.mark.parametrize('columns', [80, 100])
def test_the_list_of_configurations_fits_and_is_complete(columns, capsys, monkeypatch):
    monkeypatch.setenv('COLUMNS', str(columns))
    assert main(['configs']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= columns
    names = {line.split()[0] for line in lines if line.startswith('  ') and line[2] not in ' $'}
    found = {
        path.name if path.suffix != '.gin' else path.stem
        for folder in ('runs', 'models', 'partitioning', 'launch', 't5x')
        for path in (epath.Path('configs') / folder).iterdir()
    }
    assert names == found
    alone = [line for line in lines if line[2:] in found]
    assert not alone, f'{alone} say nothing of what they are for'


def test_a_configuration_is_printed_as_it_is(capsys):
    for name in ('8b', 'models/8b', 'configs/models/8b.gin'):
        assert main(['configs', name]) == 0
        assert capsys.readouterr().out == epath.Path('configs/models/8b.gin').read_text()
    assert main(['configs', 'pipline']) == 2
    error = capsys.readouterr().err
    assert "Did you mean 'pipeline'?" in error and error.count('\n') == 1


# Models on the hub.


@contextlib.contextmanager
def hub(answers, asked):
    """A server with the files of a hub: path -> (status, content)."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append((self.path, self.headers.get('Authorization')))
            status, content = answers.get(self.path, (404, b''))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}'
    server.shutdown()


GPT2 = {'model_type': 'gpt2', 'vocab_size': 512, 'n_embd': 64, 'n_layer': 2, 'n_head': 4}
GPT2 |= {'n_positions': 128, 'n_ctx': 128, 'layer_norm_epsilon': 1e-5}


def test_a_name_is_looked_up_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    asked = []
    path = '/owner/gpt/resolve/main/config.json'
    answers = {
        path: (200, json.dumps(GPT2).encode()),
        '/owner/closed/resolve/main/config.json': (401, b''),
        '/owner/page/resolve/main/config.json': (200, b'<html>'),
    }
    with hub(answers, asked) as address:
        monkeypatch.setenv('HF_ENDPOINT', address)
        monkeypatch.setenv('HF_TOKEN', 'secret')
        assert find_model('owner/gpt').config.embed_dim == 64
        assert asked == [(path, 'Bearer secret')]
        for name, words in {
            'owner/none': 'HTTP 404.*write OWNER/NAME',
            'owner/closed': 'HTTP 401.*HF_TOKEN',
            'owner/page': 'hf download owner/page config.json',
        }.items():
            with pytest.raises(ConfigError, match=words) as caught:
                find_model(name)
            assert '\n' not in str(caught.value) and 'secret' not in str(caught.value)
        (tmp_path / 'owner/gpt').mkdir(parents=True)
        (tmp_path / 'owner/gpt/config.json').write_text(json.dumps(GPT2 | {'n_embd': 32}))
        assert find_model('owner/gpt').config.embed_dim == 32, 'a folder comes first'
    with pytest.raises(ConfigError, match=r'cannot be asked .*hf download a/b config.json'):
        find_model('a/b')
    with pytest.raises(ConfigError, match=r'no/such/config.json cannot be read'):
        find_model('no/such/config.json')
