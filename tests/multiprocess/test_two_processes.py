"""Real JAX processes: the run of two is the run of one."""

import json
import socket
import subprocess
import sys

SMALL = [
    '--gin_file=configs/runs/quickstart.gin',
    '--gin.TRAIN_STEPS=4',
    '--gin.EVAL_PERIOD=2',
    '--gin.CHECKPOINT_PERIOD=2',
    '--gin.SEQUENCE_LENGTH=16',
    '--gin.TransformerConfig.num_layers=1',
    '--gin.TransformerConfig.embed_dim=32',
    '--gin.TransformerConfig.head_dim=8',
    '--gin.TransformerConfig.mlp_dim=64',
    '--gin.train.eval_tokens=500',
    '--gin.train.log_period=1',
    '--gin.SampleConfig.length=12',
]


def _start(model_dir, *flags):
    command = [sys.executable, '-m', 'train', *SMALL, f"--gin.MODEL_DIR='{model_dir}'", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _run_two(model_dir, *flags):
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        port = free.getsockname()[1]
    together = ['--cpu_devices=4', f'--coordinator_address=127.0.0.1:{port}', '--process_count=2']
    processes = [_start(model_dir, *together, f'--process_index={i}', *flags) for i in range(2)]
    return [_finished(process) for process in processes]


def _finished(process):
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-3000:]
    return out


def without_times(record):
    return {k: v for k, v in record.items() if 'second' not in k and 'wait' not in k}


def _records(model_dir):
    lines = (model_dir / 'metrics.jsonl').read_text().splitlines()
    return [without_times(json.loads(line)) for line in lines]


def test_two_processes_train_and_evaluate_like_one_and_resume_each_other(tmp_path):
    _finished(_start(tmp_path / 'one'))
    outputs = _run_two(tmp_path / 'two')
    one, two = _records(tmp_path / 'one'), _records(tmp_path / 'two')
    assert [r['step'] for r in one] == [r['step'] for r in two] == [1, 2, 2, 3, 4, 4]
    for a, b in zip(one, two, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert abs(a[name] - b[name]) <= 1e-5 * max(abs(a[name]), 1e-3), (name, a, b)
    assert 'step 4/4' in outputs[0]
    assert 'step' not in outputs[1], 'only the first process speaks'

    # What two processes saved, one goes on with: other shardings, the same state.
    resumed = _finished(_start(tmp_path / 'two', '--gin.TRAIN_STEPS=5'))
    assert 'resumed from step 4' in resumed
    straight = _finished(_start(tmp_path / 'one', '--gin.TRAIN_STEPS=5'))
    assert 'resumed from step 4' in straight
    last = [_records(tmp_path / d)[-1] for d in ('one', 'two')]
    assert last[0]['step'] == last[1]['step'] == 5
    assert abs(last[0]['eval/loss'] - last[1]['eval/loss']) <= 1e-5 * last[0]['eval/loss']
