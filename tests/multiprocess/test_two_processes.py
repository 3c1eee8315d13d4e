"""`python -m train` with two real processes gives the same results as with one process."""

import json
import sys

from processes import reserved_port, run_together

SMALL = [
    '--gin_file=configs/runs/quickstart.gin',
    '--gin.EVAL_PERIOD=2',
    '--gin.CHECKPOINT_PERIOD=2',
    '--gin.SEQUENCE_LENGTH=16',
    '--gin.TransformerConfig.num_layers=1',
    '--gin.TransformerConfig.embed_dim=32',
    '--gin.TransformerConfig.head_dim=8',
    '--gin.TransformerConfig.mlp_dim=64',
    '--gin.create_learning_rate_scheduler.steps_per_cycle=5',
    '--gin.train.eval_tokens=500',
    '--gin.train.log_period=1',
    '--gin.SampleConfig.length=12',
]


def command(model_dir, steps, *flags):
    settings = [f"--gin.MODEL_DIR='{model_dir}'", f'--gin.TRAIN_STEPS={steps}']
    return [sys.executable, '-m', 'train', *SMALL, *settings, *flags]


def records(model_dir):
    """The metrics of a run, without times."""
    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [
        {k: v for k, v in json.loads(line).items() if 'second' not in k and 'wait' not in k}
        for line in lines
    ]


def test_two_processes_train_like_one_and_one_process_resumes_their_run(tmp_path):
    with reserved_port() as port:
        joint = ['--cpu_devices=4', f'--coordinator_address=127.0.0.1:{port}', '--process_count=2']
        _, first, second = run_together(
            [
                command(tmp_path / 'one', 5),
                *(command(tmp_path / 'two', 4, *joint, f'--process_index={i}') for i in range(2)),
            ]
        )
    assert 'step 4/4' in first
    assert 'step' not in second, 'only the first process logs'

    # One process resumes the checkpoint of two: the shardings differ, and the state is the same.
    [resumed] = run_together([command(tmp_path / 'two', 5)])
    assert 'resumed from step 4' in resumed
    one, two = records(tmp_path / 'one'), records(tmp_path / 'two')
    assert [r['step'] for r in one] == [r['step'] for r in two] == [1, 2, 2, 3, 4, 4, 5, 5]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert abs(a[name] - b[name]) <= 1e-5 * max(abs(a[name]), 1e-3), (name, a, b)
