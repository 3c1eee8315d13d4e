"""Invalid gin files and flags: the message names the place, the mistake and the nearest name."""

import textwrap

import gin
import pytest
from gin_fixtures import load_config

from train.data.text.sources import TextFiles
from train.errors import ConfigError
from train.gin.parsing import find_config_root, read_bindings

pytestmark = pytest.mark.core

DYNAMIC = 'from __gin__ import dynamic_registration\n'


def seed():
    return gin.get_bindings('TrainConfig')['seed']


@pytest.mark.parametrize(
    ('text', 'line', 'expected'),
    [
        ('\ntrainn.seed = 1', 2, "no configurable 'trainn'. Did you mean 'train'?"),
        ('A = @optax.adamww', 1, "no configurable 'optax.adamww'. Did you mean 'optax.adamw'?"),
        ('A = [1,\n  @Transfomer()]', 1, "'Transfomer'. Did you mean 'Transformer'?"),
        ('TextFile:\n  pattern = 1', 1, "'TextFile'. Did you mean 'TextFiles'?"),
        (
            'TrainConfig.seedd = 1',
            1,
            "'TrainConfig' has no parameter 'seedd'. Did you mean 'seed'?",
        ),
        ('TrainConfig:\n  seed = 1\n  log_evry = 2', 3, "'log_evry'. Did you mean 'log_every'?"),
        (
            'TransformerConfig.num_layer = 1',
            1,
            "'TransformerConfig' has no parameter 'num_layer'. Did you mean 'num_layers'?",
        ),
        ('CheckpointConfig.zzz = 1', 1, 'It has period, keep'),
        (
            'TrainConfig.seed = %SEED',
            1,
            '%SEED has no value. Add --gin.SEED=... or a line SEED = ...',
        ),
        ('A = %B\nB = [%A]\nTrainConfig.seed = %A', 2, '%A needs %B needs %A: give one'),
        ('TrainConfig.seed = @TrainConfig()', 1, 'TrainConfig needs @train.config.TrainConfig'),
        ('SEED = 1\nTrainConfig.seed = [%SEDE]', 2, "%SEDE has no value. Did you mean 'SEED'?"),
        ('import train.optimizer', 1, "Did you mean 'train.optimizers'?"),
        ("# a\ninclude 'nowhere.gin'", 2, 'no such gin file: nowhere.gin'),
    ],
)
def test_unknown_names(refusal, text, line, expected):
    message = refusal(text + '\n')
    assert f'run.gin:{line}: ' in message
    assert expected in message


def test_an_ambiguous_name_lists_the_choices(refusal):
    def twin():
        pass

    gin.external_configurable(twin, name='twin', module='train.one')
    gin.external_configurable(lambda: None, name='twin', module='train.two')
    message = refusal('A = @twin\n')
    assert "'twin' is ambiguous: write one of train.one.twin, train.two.twin" in message


@pytest.mark.parametrize(
    ('text', 'lines', 'expected'),
    [
        ('A = 1\nB = [1,\n  2\nC = 3\n', (2, 3, 4, 5), ''),
        ('A = 1\nB = (1, 2]\n', (2,), ''),
        ('A = 1]\n', (1,), ''),
        ("A = 1\nB = 'abc\nC = 3\n", (2,), ''),
        ("A = 1\nB = '''abc\nC = 3\n", (2,), 'quote'),
        ('A = 1\nB =\nC = 3\n', (2,), ''),
        ('A = 1\nB\n', (2,), ''),
        ('A = 1\nTrainConfig.seed 3\n', (2,), ''),
        ('train:\nseed = 1\n', (2,), 'ndent'),
        ('TrainConfig:\n  seed = 1\n    log_every = 2\n', (3,), ''),
        ('train:\n    seed = 1\n  log_every = 2\n', (3,), 'indent'),
        ('train:\n', (1, 2), 'ndent'),
        ('A = 1\n$B = 1\n', (2,), ''),
        ('A = 1 2\n', (1,), ''),
        ('include configs/a.gin\n', (1,), ''),
    ],
)
def test_a_syntax_error_names_the_line(refusal, text, lines, expected):
    message = refusal(text)
    assert any(f'run.gin:{line}: syntax error: ' in message for line in lines), message
    assert expected in message
    assert '\n' not in message


def test_text_without_quotes_in_a_file(refusal):
    message = refusal('A = 1\nB = hello\n')
    assert 'run.gin:2' in message
    assert 'hello' in message
    assert ' at 0x' not in message, 'the message must not contain the address of a Python object'


@pytest.mark.parametrize(
    'text',
    ['/tmp/run', 'hello', 'gs://b/r', 'a b', 'ünï/côde', "it's", '~/x', '2024-01-01', 'v5e:4x4'],
)
def test_text_in_a_flag_needs_no_quotes_inside_quotes(text):
    for written in (text, repr(text)):
        (statement,) = read_bindings([f'MODEL_DIR={written}'])
        assert (statement.macro, statement.parsed.value) == ('MODEL_DIR', text)


@pytest.mark.parametrize(
    ('written', 'value'), [('3', 3), ('1e-3', 1e-3), ('True', True), ('None', None), ('[1]', [1])]
)
def test_other_values_in_a_flag_stay_as_they_are(written, value):
    (statement,) = read_bindings([f'Model.size={written}'])
    assert statement.parsed.value == value and type(statement.parsed.value) is type(value)


@pytest.mark.parametrize('value', ['', '[1,', "'a", '{a}'])
def test_a_broken_value_in_a_flag_is_no_text(refusal, value):
    message = refusal('A = %MODEL_DIR\n', f'MODEL_DIR={value}')
    assert message.startswith(f'--gin.MODEL_DIR={value}: ')
    assert f'--gin.MODEL_DIR="{value!r}"' in message


def test_a_flag_for_an_unused_macro(refusal):
    message = refusal('MODEL_DIR = 1\nA = %MODEL_DIR\n', 'MODLE_DIR=2')
    assert message == (
        "--gin.MODLE_DIR=2: no gin file uses the macro 'MODLE_DIR'. Did you mean 'MODEL_DIR'?"
    )


def test_at_least_one_file_is_required():
    with pytest.raises(ConfigError, match='no gin file: add --gin_file='):
        load_config([])


def test_a_missing_file_lists_the_searched_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        load_config(['nowhere.gin'], search_paths=['some/folder'])
    message = str(error.value)
    assert 'no such gin file: nowhere.gin' in message
    assert '--gin_search_paths' in message
    for place in (tmp_path, tmp_path / 'some/folder', find_config_root()):
        assert str(place) in message


def test_a_file_that_includes_itself(tmp_path):
    one, two = tmp_path / 'one.gin', tmp_path / 'two.gin'
    one.write_text(f"A = 1\ninclude '{two}'\n")
    two.write_text(f"include '{one}'\n")
    with pytest.raises(ConfigError, match=r'two\.gin:1: .*one\.gin includes itself'):
        load_config([str(one)])


def test_a_file_may_be_included_twice(tmp_path, load):
    (tmp_path / 'shared.gin').write_text('TrainConfig.seed = 3\n')
    load("include 'shared.gin'\ninclude 'shared.gin'\n", search_paths=[str(tmp_path)])
    assert seed() == 3


def test_a_file_that_is_not_text(tmp_path):
    file = tmp_path / 'binary.gin'
    file.write_bytes(b'\xff\xfe\x00\x01')
    with pytest.raises(ConfigError, match=r'binary\.gin'):
        load_config([str(file)])


@pytest.mark.parametrize('statement', ['import optax.adamw', 'from train.optimizers import walk'])
def test_an_import_of_a_name_that_is_not_a_module(refusal, statement):
    message = refusal(f'{statement}\n')
    assert 'run.gin:1: ' in message


@pytest.mark.parametrize(
    'statement', ['TrainConfig.seed = 1', 'A = @decay_matrices_only', 'TextFiles:\n  pattern = 1']
)
def test_dynamic_registration_requires_imports(refusal, statement):
    # A file with dynamic registration cannot use registered names without importing them.
    message = refusal(f'{DYNAMIC}import optax\n{statement}\n')
    assert 'run.gin:3: ' in message
    assert 'import' in message


@pytest.mark.parametrize(
    'text', ['scope/A = 1\nTrainConfig.seed = %A\n', 'A = 1\nTrainConfig.seed = %scope/A\n']
)
def test_a_macro_of_another_scope_has_no_value(refusal, text):
    message = refusal(text)
    assert 'run.gin:2: ' in message
    assert 'has no value' in message


SCOPED = """
    a/b/TextFiles.pattern = 'x'
    a/CausalLM.source = @a/b/TextFiles()
    a/TextFiles.root = 'y'
    TrainConfig.task = @a/CausalLM()
"""


def test_a_scope_in_use_may_contain_any_binding(load):
    load(SCOPED, "a/JsonLines.field='text'")
    with gin.config_scope('a/b'):
        source = gin.get_configurable(TextFiles)()
    assert (source.pattern, source.root) == ('x', 'y')


@pytest.mark.parametrize('scope', ['a/c', 'b', 'a/b/c'])
def test_a_scope_that_is_never_used_is_refused(refusal, scope):
    message = refusal(SCOPED + f"    {scope}/TextFiles.exclude = 'z'\n")
    assert f'scope {scope!r} is never used' in message
    assert ':6: ' in message


def test_modules_of_the_user_may_enter_scopes(load, refusal, intruder):
    text = 'import intruder\n' + textwrap.dedent(SCOPED)
    load(text + "entirely/TextFiles.exclude = 'z'\n", allow=['intruder'])
    assert "Did you mean 'a/b'" in refusal(
        text + "a/bb/TextFiles.exclude = 'z'\n", allow=['intruder']
    )


def test_a_refused_configuration_sets_nothing(refusal):
    refusal('TrainConfig.seed = 1\nTrainConfig.seedd = 2\n')
    assert gin.config_str().strip() == ''
