"""Rows of zeros, made without data, have the arrays of the rows that the data makes."""

import numpy as np
import pytest

from train.data import (
    ByT5Tokenizer,
    CausalLM,
    Examples,
    InputsToTargets,
    Mixture,
    PrefixLM,
    RandomTokens,
    SpanCorruption,
    Task,
)
from train.data.rows.subset import Subset
from train.data.text.sources import Records, TextFiles
from train.errors import ConfigError

pytestmark = pytest.mark.core

TEXTS = Records(records=[b'the quick brown fox jumps ' * 4] * 4, holdout_percent=0.0)
PAIRS = [('one two', 'eins zwei'), ('three', 'drei')]
BOTH = {'inputs': 16, 'targets': 12}
T5 = ByT5Tokenizer()
TASKS = {
    'causal': (CausalLM(source=TEXTS), 8),
    'packed': (CausalLM(source=TEXTS, packing='pack'), 8),
    'spans': (SpanCorruption(source=TEXTS), BOTH),
    'packed spans': (SpanCorruption(source=TEXTS, pack=True), {'inputs': 16}),
    'prefix': (PrefixLM(source=TEXTS), 16),
    'prefix of an encoder': (PrefixLM(source=TEXTS, architecture='encoder_decoder'), BOTH),
    'pairs': (InputsToTargets(source=PAIRS), BOTH),
    'packed pairs': (InputsToTargets(source=PAIRS, pack=True), BOTH),
    'pairs in a row': (InputsToTargets(source=PAIRS, architecture='decoder_only'), BOTH),
    'targets': (InputsToTargets(source=PAIRS, inputs=None, architecture='decoder_only'), 16),
    'random': (RandomTokens(vocab_size=9), 8),
    'subset': (Subset(task=CausalLM(source=TEXTS), training='train[:50%]'), 8),
    'mixture': (Mixture(tasks=[CausalLM(source=TEXTS)] * 2, weights=[1, 2]), 8),
    'examples': (Examples(training={'x': np.ones((3, 2)), 'y': np.arange(3)}), None),
}


@pytest.mark.parametrize('name', TASKS)
def test_a_blank_row_has_the_arrays_of_the_rows_of_the_data(name, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    task, length = TASKS[name]
    blank, row = task.blank_row(length), dict(task.open(length).training(seed=0)[0])
    described = [{k: (x.shape, x.dtype) for k, x in r.items()} for r in (blank, row)]
    assert described[0] == described[1]
    assert not any(x.any() for x in blank.values())


def test_no_file_is_needed():
    task = CausalLM(source=TextFiles(pattern='there/is/no/such/file'))
    assert task.blank_row(1024)['decoder_loss_weights'].shape == (1024,)


def test_rows_that_only_the_data_knows_are_refused():
    with pytest.raises(ConfigError, match=r"None.*longest text.*'inputs': 512"):
        InputsToTargets(source=PAIRS).blank_row(None)

    class Own(Task):
        def open(self, length=None, progress=None):
            raise AssertionError

    with pytest.raises(ConfigError, match=r'Own .*define its method blank_row'):
        Own().blank_row(8)
