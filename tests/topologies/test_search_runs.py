"""The search for a run on a described TPU, with a compiler that is made up."""

import dataclasses
import json

import gin
import pytest
from described_machines import needs_libtpu
from etils import epath

from meshwright.time import Work
from train.gin.entry import find_config
from train.gin.load import load_config
from train.planning.forecasting import parse_machine
from train.planning.searching import Choices, Layout, Outcome, runs
from train.planning.searching.predicting import (
    Source,
    least_work,
    plan_candidate,
    predict_step,
    read_config,
)
from train.planning.searching.runs import search_run

pytestmark = needs_libtpu

SOURCE = Source(
    files=['configs/runs/pretrain.gin', 'configs/models/tiny.gin'],
    bindings=["TEXT = 'none'", 'BATCH_SIZE = 32', 'SEQUENCE_LENGTH = 256'],
)
MACHINE = parse_machine('v5e:2x2')
CHOICES = Choices(
    layouts=[Layout('fsdp'), Layout('fsdp_tensor', (('NUM_PARTITIONS', 2),))],
    num_microbatches=(1, 16),
    remats=('full',),
    output_chunks=(None,),
    compiler_options=((), (('xla_a', 1),)),
)


@pytest.fixture(autouse=True)
def _forget():
    yield
    gin.clear_config()


def test_a_run_is_searched(tmp_path, monkeypatch):
    """16 microbatches on 4 devices need 64 rows; those of fsdp_tensor on 2 need 32.

    The made-up compiler likes the option and two-way tensor parallelism. Its times are above every
    bound by formula, so that nothing is ruled out.
    """
    compiled = []

    def compile_text(text):
        compiled.append(request := json.loads(text))
        [file] = request['source']['files']
        settings = epath.Path(file).read_text()
        fast = ('xla_a' in settings) + ('fsdp_tensor' in settings)
        return Outcome(fits=True, peak=2**28, seconds=100.0 * (3 - fast), compile_seconds=1.0)

    def run(**settings):
        folder = epath.Path(tmp_path / 'out')
        return search_run(
            SOURCE, MACHINE, folder, compile_text=compile_text, say=lambda text: None, **settings
        )

    found = run(choices=CHOICES, best=4)
    assert found.result.dropped == {'the batch cannot be divided': 2}
    assert len(found.result.found) == 6
    winner = found.result.winner.candidate
    assert winner.layout.preset == 'fsdp_tensor' and winner.compiler_options == (('xla_a', 1),)
    assert {request['machine'] for request in compiled} == {'v5e:2x2'}
    assert len(compiled) == found.result.num_compiled == 4

    monkeypatch.setattr(runs, 'predict_step', None)
    again = run(choices=CHOICES, best=4)
    assert again.result == found.result and len(compiled) == 4

    written = json.loads(found.files['search'].read_text())
    assert written['found'][0]['name'] == str(winner) and written['num_compiled'] == 4
    assert found.files['picture'].read_bytes()[:4] == b'\x89PNG'
    gin.clear_config()
    load_config([str(found.files['winner'])])
    config = find_config()
    assert config.batch_size == 32 and config.compiler_options == {'xla_a': 1}
    assert dict(config.partitioner.mesh.shape) == {'data': 4, 'model': 2}  # of the 8 devices here


def test_formulas_and_the_bound_of_a_step():
    """The tiny model: 6 FLOPs per parameter of a product and token, and attention as a product.

    By hand, per layer: attention 128 x 128 four times, MLP 128 x 256 three times; the output layer
    is 128 x 384; 32 x 256 tokens on 4 devices. Scores are 2 products of 256 x 256 x 128 per row.
    """
    step = plan_candidate(read_config(SOURCE, MACHINE), MACHINE)
    prediction = predict_step(step)
    weights = 2 * (4 * 128 * 128 + 3 * 128 * 256) + 128 * 384
    tokens = 32 * 256 / 4
    flops = 6 * weights * tokens + 3 * 2 * (2 * 2 * 256 * 128) * tokens
    assert prediction.bound >= flops / 197e12 * 0.5
    assert prediction.bound <= prediction.seconds
    # Parameters, their gradients and two moments, in float32, on 4 devices.
    assert prediction.peak > 4 * (weights + 384 * 128) * 3 / 4


def test_machines_without_data_are_refused():
    with pytest.raises(ValueError, match='unknown topology'):
        parse_machine('v9:4x4')
    with pytest.raises(ValueError, match=r'\(3\).*data mesh size \(4\)'):
        read_config(
            Source(files=SOURCE.files, bindings=[*SOURCE.bindings, 'BATCH_SIZE = 3']), MACHINE
        )


def test_the_least_work_has_products_at_the_peak_rate():
    work = Work(
        origin='jaxpr',
        chip='v5e',
        matmul_flops=197e12,
        matmul_seconds=None,
        other_seconds=None,
        other_bytes=1e9,
        kernels=(),
        collectives=(),
        host_bytes=5.0,
    )
    least = least_work(work, even_share=300e12)
    assert least.matmul_seconds == pytest.approx(1.0)
    assert (least.other_seconds, least.other_bytes, least.host_bytes) == (0, 0, 0)
    assert least_work(work, even_share=98.5e12).matmul_seconds == pytest.approx(0.5)
    gpu = least_work(dataclasses.replace(work, chip='h100'), even_share=300e12)
    assert gpu.matmul_seconds is None, 'products take what the model says'
