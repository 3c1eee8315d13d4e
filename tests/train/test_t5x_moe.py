"""T5X's mixtures of experts: its trainer, models and network."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.errors import ConfigError
from train.optimizers import Optimizer, as_transformation
from train.t5x.moe_trainer import MoeTrainer

pytestmark = pytest.mark.core


class Model:
    """A model of T5X that has only an optimizer."""

    def __init__(self, clip_norm):
        self.clip_norm = clip_norm

    def optimizer(self, rate):
        if self.clip_norm == 'plain':
            return optax.sgd(rate)
        return Optimizer(transform=optax.sgd, learning_rate=rate, clip_norm=self.clip_norm)


PARAMS = {'mlp': {'expert': {'wi': np.float32(1.0)}, 'router': np.float32(1.0)}}


@pytest.mark.parametrize(
    'clip_norm, settings, updates',
    [
        (None, {}, (-12.0, -4.0)),
        ('plain', {}, (-12.0, -4.0)),
        (1.0, {}, (-0.6, -0.8)),  # (6, 8), clipped after the multiplication
        (None, {'num_expert_partitions': 1}, (-1.5, -4.0)),
        (None, {'sharded_match_fn': None}, (-1.5, -4.0)),
        (None, {'sharded_match_fn': lambda path: path == 'mlp/router'}, (-1.5, -32.0)),
    ],
)
def test_the_gradients_of_experts_are_multiplied(clip_norm, settings, updates):
    rate = (lambda step: 0.5) if clip_norm != 1.0 else (lambda step: 1.0)
    trainer = MoeTrainer(**{'learning_rate_fn': rate, 'num_expert_partitions': 8} | settings)
    tx = as_transformation(trainer.optimizer(Model(clip_norm)), PARAMS)
    grads = {'mlp': {'expert': {'wi': jnp.float32(3.0)}, 'router': jnp.float32(8.0)}}
    if clip_norm == 1.0:
        grads['mlp']['expert']['wi'] = jnp.float32(0.75)
    changed, _ = tx.update(grads, tx.init(PARAMS), PARAMS)
    found = (changed['mlp']['expert']['wi'], changed['mlp']['router'])
    np.testing.assert_allclose(found, updates, rtol=1e-6)


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'num_expert_partitions': 0}, 'MoeTrainer.num_expert_partitions is 0: it must be an int'),
        ({'sharded_match_fn': '.*'}, r"sharded_match_fn is '\.\*': it must be a function"),
    ],
)
def test_settings_of_the_trainer(settings, message):
    with pytest.raises(ConfigError, match=message):
        MoeTrainer(**{'learning_rate_fn': lambda step: 1.0, 'num_expert_partitions': 2} | settings)


def test_a_network_without_experts():
    trainer = MoeTrainer(learning_rate_fn=lambda step: 1.0, num_expert_partitions=2)
    tx = trainer.optimizer(Model(None)).build()
    with pytest.raises(ConfigError, match="selects none of the 1 parameters, such as 'mlp/wi'"):
        tx.update({'mlp': {'wi': jnp.ones(2)}}, tx.init(PARAMS), PARAMS)
