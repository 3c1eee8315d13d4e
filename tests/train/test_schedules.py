"""The learning-rate schedules of train.t5x give the rates that T5X gave."""

import jax
import numpy as np
import pytest
import t5x_reference

from train.t5x.schedules import create_learning_rate_scheduler

pytestmark = [pytest.mark.core, pytest.mark.smoke]

FACTORS = ('constant', 'linear_warmup', 'linear_decay', 'rsqrt_decay', 'rsqrt_normalized_decay')
FACTORS += ('decay_every', 'cosine_decay')


@pytest.mark.parametrize('case', t5x_reference.learning_rates(), ids=lambda c: str(c['settings']))
def test_rates_are_those_of_t5x_to_the_last_digit(case):
    rate = create_learning_rate_scheduler(**case['settings'])
    assert [float(rate(step)) for step in case['steps']] == case['values']


def test_steps_before_the_offset_count_as_step_0():
    plain, shifted = (
        create_learning_rate_scheduler('constant * decay_every', step_offset=n) for n in (0, 40)
    )
    assert [float(shifted(step)) for step in (0, 39, 40)] == [float(plain(0))] * 3


def test_without_a_warmup_step_1_has_the_full_rate():
    rate = create_learning_rate_scheduler(base_learning_rate=0.3, warmup_steps=0)
    assert [float(rate(step)) for step in (0, 1, 4)] == pytest.approx([1e-8, 0.3, 0.15])


def test_the_rate_is_the_same_for_a_traced_step():
    rate = create_learning_rate_scheduler('constant * linear_warmup * cosine_decay')
    traced = jax.jit(rate)
    for step in (0, 1, 150, 1000, 30_000):
        assert float(traced(np.int32(step))) == pytest.approx(float(rate(step)), rel=1e-5)
    assert rate(3).dtype == np.float32


@pytest.mark.parametrize('name', ['rsqrt_decy', '', 'Constant'])
def test_an_unknown_factor_is_an_error_with_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        create_learning_rate_scheduler(factors=f'constant * {name}')
    for known in (repr(name), *FACTORS):
        assert known in str(error.value)
    if name == 'rsqrt_decy':
        assert "Did you mean 'rsqrt_decay'" in str(error.value)


def test_numbers_out_of_range_are_errors():
    with pytest.raises(ValueError, match=r'warmup_steps \(-1\).*steps_per_decay \(0\)'):
        create_learning_rate_scheduler(warmup_steps=-1, steps_per_decay=0)
