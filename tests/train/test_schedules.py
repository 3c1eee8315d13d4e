"""The learning-rate schedules of train.t5x agree with T5X's formulas, written in plain Python."""

import math

import jax
import numpy as np
import pytest
import t5x_reference

from train.t5x.schedules import create_learning_rate_scheduler

pytestmark = [pytest.mark.core, pytest.mark.smoke]

STEPS = (0, 1, 7, 49, 50, 51, 99, 100, 101, 149, 150, 199, 200, 250, 349, 350, 1000)
BASE, WARMUP, DECAY, PER_DECAY, PER_CYCLE = 0.3, 100, 0.5, 70, 250

SETTINGS = {
    'base_learning_rate': BASE,
    'warmup_steps': WARMUP,
    'decay_factor': DECAY,
    'steps_per_decay': PER_DECAY,
    'steps_per_cycle': PER_CYCLE,
    'min_learning_rate': 0.0,
}

FORMULAS = {
    'constant': lambda s: BASE,
    'linear_warmup': lambda s: min(1.0, s / WARMUP),
    'linear_decay': lambda s: BASE * min(s / WARMUP, 1 + DECAY * (WARMUP - s)),
    'rsqrt_decay': lambda s: 1 / math.sqrt(max(s, WARMUP)),
    'rsqrt_normalized_decay': lambda s: math.sqrt(WARMUP) / math.sqrt(max(s, WARMUP)),
    'decay_every': lambda s: DECAY ** (s // PER_DECAY),
    'cosine_decay': lambda s: (
        0.5 * (1 + math.cos(math.pi * (max(0.0, (s - WARMUP) / PER_CYCLE) % 1)))
    ),
}


def schedule(factors, **changes):
    return create_learning_rate_scheduler(factors=factors, **(SETTINGS | changes))


@pytest.mark.parametrize('factor', FORMULAS)
def test_each_factor_follows_its_formula(factor):
    rates = [float(schedule(factor)(step)) for step in STEPS]
    expected = [max(0.0, FORMULAS[factor](step)) for step in STEPS]
    np.testing.assert_allclose(rates, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize(
    'factors',
    [
        'constant * linear_warmup * rsqrt_decay',
        'constant*linear_warmup*cosine_decay',
        ' constant  *  rsqrt_normalized_decay *decay_every ',
        'constant * constant',
    ],
)
def test_factors_are_multiplied(factors):
    names = [name.strip() for name in factors.split('*')]
    rates = [float(schedule(factors)(step)) for step in STEPS]
    expected = [math.prod(FORMULAS[name](step) for name in names) for step in STEPS]
    np.testing.assert_allclose(rates, expected, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize('case', t5x_reference.learning_rates(), ids=lambda c: str(c['settings']))
def test_rates_are_those_of_t5x_to_the_last_digit(case):
    rate = create_learning_rate_scheduler(**case['settings'])
    assert [float(rate(step)) for step in case['steps']] == case['values']


def test_the_default_is_the_inverse_square_root_of_t5():
    # T5's pretraining: 0.5 * min(1, s / 1000) / sqrt(max(s, 1000)).
    default = create_learning_rate_scheduler()
    for step in (1, 500, 1000, 4000, 1_000_000):
        expected = 0.5 * min(1, step / 1000) / math.sqrt(max(step, 1000))
        assert float(default(step)) == pytest.approx(expected, rel=2e-6)


def test_the_warmup_ends_at_the_full_rate():
    rate = schedule('constant * linear_warmup')
    assert float(rate(WARMUP - 1)) < BASE
    assert float(rate(WARMUP)) == pytest.approx(BASE)
    assert float(rate(10 * WARMUP)) == pytest.approx(BASE)


def test_the_cosine_repeats_every_cycle():
    rate = schedule('cosine_decay')
    assert float(rate(WARMUP)) == pytest.approx(1)
    assert float(rate(WARMUP + PER_CYCLE // 2)) == pytest.approx(0.5)
    assert float(rate(WARMUP + PER_CYCLE - 1)) < 1e-4
    assert float(rate(WARMUP + PER_CYCLE)) == pytest.approx(1)


def test_the_step_offset_shifts_every_step_and_earlier_ones_count_as_zero():
    factors = 'constant * linear_warmup * cosine_decay * decay_every'
    shifted, plain = schedule(factors, step_offset=40), schedule(factors)
    for step in (0, 39, 40, 41, 140, 400):
        assert float(shifted(step)) == float(plain(max(0, step - 40)))


def test_no_rate_is_below_the_minimum():
    rate = schedule('constant * linear_warmup', min_learning_rate=0.01)
    assert float(rate(0)) == pytest.approx(0.01)
    assert float(rate(WARMUP)) == pytest.approx(BASE)


def test_without_a_warmup_step_1_has_the_full_rate():
    rate = schedule('constant * linear_warmup * rsqrt_decay', warmup_steps=0)
    assert float(rate(0)) == 0
    assert float(rate(1)) == pytest.approx(BASE)
    assert float(rate(4)) == pytest.approx(BASE / 2)


def test_the_rate_is_the_same_for_a_traced_step():
    rate = schedule('constant * linear_warmup * cosine_decay')
    traced = jax.jit(rate)
    for step in STEPS:
        assert float(traced(np.int32(step))) == pytest.approx(float(rate(step)), rel=1e-5)
    assert rate(3).dtype == np.float32


@pytest.mark.parametrize('name', ['rsqrt_decy', '', 'Constant'])
def test_an_unknown_factor_is_an_error_with_the_known_ones(name):
    with pytest.raises(ValueError) as error:
        create_learning_rate_scheduler(factors=f'constant * {name}')
    for known in (repr(name), *FORMULAS):
        assert known in str(error.value)
    if name == 'rsqrt_decy':
        assert "Did you mean 'rsqrt_decay'" in str(error.value)


def test_numbers_out_of_range_are_errors():
    with pytest.raises(ValueError, match=r'warmup_steps \(-1\).*steps_per_decay \(0\)'):
        create_learning_rate_scheduler(warmup_steps=-1, steps_per_decay=0)
