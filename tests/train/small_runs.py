"""The settings of a run that takes a few seconds, and its metrics."""

import json

SMALL = [
    'TRAIN_STEPS=6',
    'EVAL_PERIOD=2',
    'CHECKPOINT_PERIOD=2',
    'SEQUENCE_LENGTH=16',
    'BATCH_SIZE=8',
    'TransformerConfig.num_layers=1',
    'TransformerConfig.embed_dim=32',
    'TransformerConfig.head_dim=8',
    'TransformerConfig.mlp_dim=64',
    'CausalLM.source=@TextFiles()',
    'train.log_period=1',
    'train.sample=None',
    'create_learning_rate_scheduler.steps_per_cycle=6',
]


def without_times(record):
    return {k: v for k, v in record.items() if 'second' not in k and 'wait' not in k}


def records(model_dir):
    """The records of metrics.jsonl, without measured times."""
    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]
