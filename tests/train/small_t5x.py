"""A small model and task in T5X's gin files."""

T5X_MODEL = 'configs/t5x/decoder_only.gin'
T5X_TASK = """
from __gin__ import dynamic_registration
from train import data
from train.t5x import seqio

MIXTURE_OR_TASK_NAME = 'counts'
TASK_FEATURE_LENGTHS = {{'targets': 16}}
seqio.get_mixture_or_task.tasks = {{'counts': @data.CausalLM()}}
data.CausalLM.source = @data.TextFiles()
data.TextFiles:
  root = '{root}'
  pattern = '*.txt'
  holdout_percent = 20.0
"""
T5X_SMALL = [
    'network.TransformerConfig.num_layers=1',
    'network.TransformerConfig.emb_dim=32',
    'network.TransformerConfig.head_dim=8',
    'network.TransformerConfig.mlp_dim=64',
    'network.TransformerConfig.vocab_size=264',
    'LOSS_NORMALIZING_FACTOR=None',
    'RANDOM_SEED=None',
    'utils.create_learning_rate_scheduler.warmup_steps=100',
]
