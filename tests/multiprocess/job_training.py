"""Trains a small model in all processes together."""

import contextlib
import io

from small import small_config

from train import HeldOut, train
from train.data import CausalLM, Records
from train.machine import compiling


def config(folder, total_steps):
    texts = [f'text {i} counts: {" ".join(map(str, range(i, 60)))}' for i in range(30)]
    return small_config(
        folder,
        None,
        task=CausalLM(source=Records(records=texts, holdout_percent=20.0)),
        evaluators={'eval': HeldOut(every=2, limit=500)},
        total_steps=total_steps,
    )


def run(folder):
    """Trains 4 steps; reports what this process prints, and the folder of the run."""
    compiling._WORTH_KEEPING_SECONDS = 0.0  # also programs that a fast machine compiles at once
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        train(config(f'{folder}/run', 4))
    return {'output': output.getvalue(), 'folder': f'{folder}/run'}
