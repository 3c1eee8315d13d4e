"""The search for a run on a described TPU, with settings of Python."""

import json
import os
import subprocess
import sys
from pathlib import Path

import optax
import pytest
from described_machines import needs_libtpu
from etils import epath

from meshwright.time.step_model import TimePart
from partitioning import PjitPartitioner
from train import NextToken, Optimizer, TrainConfig
from train.data import RandomTokens
from train.models.transformer import Transformer, TransformerConfig
from train.planning.candidates import change_run
from train.planning.forecasts import least_seconds, plan_step, predict_step
from train.planning.machines import move_to, parse_machine
from train.planning.presets import Layout
from train.planning.search_runs import search_run
from train.planning.searching import Outcome
from train.planning.space import Choices

pytestmark = needs_libtpu

MACHINE = parse_machine('v5e:2x2')
CHOICES = Choices(
    layouts=[Layout('fsdp'), Layout('fsdp_tensor', (('NUM_PARTITIONS', 2),))],
    num_microbatches=(1, 16),
    remats=('full',),
    output_chunks=(None,),
    compiler_options=((), (('xla_a', 1),)),
)


def make_config(**changes):
    """A run of the model of configs/models/tiny.gin."""
    sizes = {'num_layers': 2, 'embed_dim': 128, 'num_heads': 4, 'num_kv_heads': 4, 'head_dim': 32}
    model = TransformerConfig(vocab_size=384, mlp_dim=256, tie_embeddings=True, **sizes)
    settings = {
        'model_dir': 'runs/none',
        'objective': NextToken(model=Transformer(model)),
        'partitioner': PjitPartitioner(num_partitions=1),
        'optimizer': Optimizer(transform=optax.adamw, learning_rate=1e-3),
        'task': RandomTokens(vocab_size=384),
        'total_steps': 10,
        'batch_size': 32,
        'sequence_length': 256,
    }
    return TrainConfig(**settings | changes)


@pytest.mark.long
def test_a_run_is_searched(tmp_path):
    """16 microbatches need 64 rows on 4 devices of fsdp, and 32 on 2 x 2 of fsdp_tensor.

    The made-up compiler likes the option and two-way tensor parallelism. Its times are above every
    bound by formula, so that nothing is ruled out.
    """
    compiled = []

    def compile_candidate(candidate):
        compiled.append(candidate)
        fast = bool(candidate.compiler_options) + (candidate.layout.preset == 'fsdp_tensor')
        return Outcome(fits=True, peak=2**28, seconds=100.0 * (3 - fast), compile_seconds=1.0)

    found = search_run(
        make_config(),
        MACHINE,
        epath.Path(tmp_path),
        choices=CHOICES,
        best=4,
        compile_candidate=compile_candidate,
        say=lambda text: None,
    )
    assert found.result.dropped == {'the batch cannot be divided': 2}
    assert len(found.result.found) == 6
    winner = found.result.winner.candidate
    assert winner.layout.preset == 'fsdp_tensor' and winner.compiler_options == (('xla_a', 1),)
    assert len(compiled) == found.result.num_compiled == 4

    written = json.loads(found.files['search'].read_text())
    assert written['found'][0]['name'] == str(winner) and written['num_compiled'] == 4
    assert found.files['picture'].read_bytes()[:4] == b'\x89PNG'
    there = change_run(make_config(), winner, MACHINE)
    assert there.compiler_options == {'xla_a': 1}
    assert dict(there.partitioner.mesh.shape) == {'data': 2, 'model': 2}


@pytest.mark.long
def test_a_search_and_a_fit_need_no_gin_and_write_no_file_per_candidate(tmp_path):
    """In a new process, because gin is loaded in this one."""
    code = f"""
import dataclasses, sys
from test_search_runs import CHOICES, MACHINE, make_config
from etils import epath
from train.planning.candidates import Workload
from train.planning.candidates import change_run
from train.planning.fits import fit_machine
from train.planning.search_runs import search_run

config = make_config()
before = dict(vars(config))
fit = fit_machine(Workload.of_run(config), MACHINE)
assert fit.fits and change_run(config, fit.candidate, MACHINE).num_microbatches == 1
one = {{'layouts': CHOICES.layouts[:1], 'num_microbatches': (1,), 'compiler_options': ((),)}}
choices = dataclasses.replace(CHOICES, **one)
found = search_run(config, MACHINE, epath.Path({str(tmp_path)!r}), choices=choices, best=1)
assert found.result.winner.seconds > 0, found.result
assert vars(config) == before
assert 'gin' not in sys.modules
"""
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    environment = os.environ | {'PYTHONPATH': path, 'JAX_PLATFORMS': 'cpu'}
    environment.pop('XLA_FLAGS', None)  # compilers for TPUs do not know conftest's flags
    done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    assert {file.name for file in tmp_path.iterdir()} == {'search.json', 'search.png'}


def test_formulas_and_the_bound_of_a_step():
    """The tiny model: 6 FLOPs per parameter of a product and token, and attention as a product.

    By hand, per layer: attention 128 x 128 four times, MLP 128 x 256 three times; the output layer
    is 128 x 384; 32 x 256 tokens on 4 devices. Scores are 2 products of 256 x 256 x 128 per row.
    """
    prediction = predict_step(plan_step(move_to(make_config(), MACHINE)))
    weights = 2 * (4 * 128 * 128 + 3 * 128 * 256) + 128 * 384
    tokens = 32 * 256 / 4
    flops = 6 * weights * tokens + 3 * 2 * (2 * 2 * 256 * 128) * tokens
    assert prediction.bound >= flops / 197e12 * 0.5
    assert prediction.bound <= prediction.seconds
    # Parameters, their gradients and two moments, in float32, on 4 devices.
    assert prediction.peak > 4 * (weights + 384 * 128) * 3 / 4


def test_the_bound_counts_shares_of_the_parts_of_a_step():
    """By hand: 3 + 0.35 x 0.6 + 0.95 x 1 + 0.15 x 0.5 + 0.5 x 0.4, and 1% for what slices wait."""
    exposed = {
        'matrix products': 3.0,
        'other operations': 0.6,
        'all-gather over data (ICI)': 1.0,
        'latency of exchanges': 0.5,
        'copies to and from the host': 0.4,
        'waiting for the slowest slice or GPU': 0.055,
    }
    parts = [TimePart(name=name, seconds=9.0, exposed=s) for name, s in exposed.items()]
    assert least_seconds(parts) == pytest.approx(4.435 * 1.01)
