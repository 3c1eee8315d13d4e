"""Dry runs of a script, next to compiling its step by hand for the described devices."""

import json
import subprocess
import sys
from pathlib import Path

import dry_script
import jax
import pytest
from contract import check_answers
from described_machines import needs_cuda_plugin, needs_libtpu
from dry_script import HIDDEN, ROWS, WIDTH
from jax.sharding import NamedSharding, PartitionSpec

from meshwright.dry import command
from meshwright.program.costs import costs_of_text, mesh_axes
from partitioning.hardware import describe_topology

pytestmark = needs_libtpu
SCRIPT = Path(dry_script.__file__)


@pytest.fixture
def run_dry(tmp_path, monkeypatch, capfd):
    """Runs the command in this process, in an empty folder; returns its status and its texts."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        status = command.main(arguments)
        return status, *capfd.readouterr()

    return run


def compiled_by_hand(devices):
    mesh = dry_script.make_mesh(devices)
    params = {
        'up': jax.ShapeDtypeStruct((WIDTH, HIDDEN), 'float32'),
        'down': jax.ShapeDtypeStruct((HIDDEN, WIDTH), 'float32'),
    }
    params = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        params,
        dry_script.shardings(mesh),
    )
    rows = NamedSharding(mesh, PartitionSpec('data'))
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), 'float32', sharding=rows)
    step = jax.jit(dry_script.train_step, donate_argnums=0)
    return step.lower(params, x).compile()


@pytest.mark.parametrize('topology', ['v5e:2x4', pytest.param('h100:1x8', marks=needs_cuda_plugin)])
def test_a_script_runs_as_if_the_machine_were_there(run_dry, topology, tmp_path):
    """Its step has the memory and the exchanges of the same step that was compiled by hand."""
    status, out, _ = run_dry(topology, '--json', '--', str(SCRIPT))
    *printed, last = out.splitlines()
    assert printed == [
        f'process 0 of 1, shards of {(WIDTH // 2, HIDDEN // 4)}',
        '8 of 8 shards are here',
        f'{(ROWS, WIDTH)}: loss 0.00, 1 lines',
    ]
    found = json.loads(last)
    check_answers(found)
    [made] = [answer['details'] for answer in found['answers']]
    by_hand = compiled_by_hand(describe_topology(topology).devices)
    sizes = by_hand.memory_analysis()
    parts = sizes.argument_size_in_bytes + sizes.output_size_in_bytes + sizes.temp_size_in_bytes
    peak = min(parts - sizes.alias_size_in_bytes, sizes.peak_memory_in_bytes)
    assert (status, found['details']['ending'], made['function']) == (0, 'steps', 'train_step')
    assert made['memory']['peak'] == peak
    assert made['memory']['parameters'] == 2 * 4 * WIDTH * HIDDEN // 8
    mesh = mesh_axes(dry_script.make_mesh(describe_topology(topology).devices))
    sent = costs_of_text(by_hand.as_text(), mesh=mesh, chip=made['chip']).collectives
    expected = [(c.kind, [*c.axes], c.wire_bytes, c.count) for c in sent]
    keys = ('kind', 'axes', 'wire_bytes', 'count')
    exchanges = [tuple(c[key] for key in keys) for c, _ in made['collectives']]
    assert sorted(exchanges) == sorted(expected) != []
    assert {
        cause['source'].rpartition('/')[2]
        for _, cause in made['collectives']
        if cause and cause['source']
    } <= {f'dry_script.py:{line}' for line in range(1, 80)}
    assert not list(tmp_path.iterdir()), 'nothing is written'


def test_the_script_is_one_of_many_processes(run_dry):
    status, out, _ = run_dry('v5p:4x4x4', '--process=3', '--steps=1', '--', 'python', str(SCRIPT))
    assert status == 0
    assert f'process 3 of 16, shards of {(WIDTH // 16, HIDDEN // 4)}' in out
    assert '4 of 64 shards are here' in out
    assert 'the run ended after 1 call of train_step' in out
    assert 'imitated:\n  jax.distributed.initialize\n' in out
    assert 'not written:\n  runs (2 files)\n' in out


def test_a_script_that_fails_shows_its_own_traceback(run_dry):
    status, out, err = run_dry('v5e:2x4', '--', str(SCRIPT), '--fail')
    assert status == 2 and 'the script failed' in out
    assert err.startswith('Traceback (most recent call last):\n') and 'meshwright' not in err
    assert err.endswith("KeyError: 'no such dataset'\n")
    assert 'dry_script.py:' in out.partition('read as zeros')[2]


def test_what_jax_asks_is_answered_by_jax_again(run_dry):
    before = jax.devices, jax.device_put, open, jax.config.jax_default_device
    run_dry('v5e:2x2', '--', str(SCRIPT), '--fail')
    assert (jax.devices, jax.device_put, open, jax.config.jax_default_device) == before
    assert jax.devices()[0].platform == 'cpu' and float(jax.numpy.ones(3).sum()) == 3


LARGE = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
rows = NamedSharding(mesh, PartitionSpec('x'))
step = jax.jit(lambda: jax.numpy.ones((2**32, 8)) + 1, out_shardings=rows)
print('before'); step(); print('after')
"""


def test_a_function_that_does_not_fit_ends_the_run(run_dry, tmp_path):
    Path('large.py').write_text(LARGE)
    status, out, _ = run_dry('v5e:2x2', '--', 'python', '-u', 'large.py')
    assert status == 1 and 'before' in out and 'after' not in out
    assert 'the run ended at <lambda>: it needs more memory than a device has' in out
    assert 'NO, lacks' in out


CHANGING = """
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((4,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
put = lambda spec: jax.device_put(np.ones((8, 8), np.float32), NamedSharding(mesh, spec))
step = jax.jit(lambda w: w @ w)
step(put(P())); step(put(P('x'))); step(put(P('x')))
raise SystemExit('enough')
"""


def test_a_function_that_is_compiled_again_says_why(run_dry, tmp_path):
    Path('changing.py').write_text(CHANGING)
    status, out, _ = run_dry('v5e:2x2', '--steps=3', '--', 'changing.py')
    assert status == 0
    assert 'memory of this process' not in out  # nobody has measured it
    changed = "w was laid out by P(None, None) and is laid out by P('x', None)"
    assert f'<lambda> was compiled again: {changed}' in out


def test_a_script_that_ends_itself_tells_its_status(run_dry, tmp_path):
    Path('changing.py').write_text(CHANGING)
    status, out, _ = run_dry('v5e:2x2', '--steps=9', '--', 'changing.py')
    assert status == 2 and "the script ended with sys.exit('enough')" in out


@pytest.mark.parametrize(
    ('arguments', 'message'),
    [
        (['v5e:2x2'], 'no script: write it behind --'),
        (['v5e:2x2', '--', 'python', 'no_such.py'], 'no_such.py: there is no such script'),
        (['v5e:2x2', '--', 'bash', 'train.sh'], 'bash is no Python: write `python train.py`'),
        (['v5e:2x2', '--', 'python'], 'python names no script: write `python train.py`'),
        (['v5e:2x2', '--', '/usr/nowhere/python', 'a.py'], 'is not the Python of this command'),
        (['v9z:2x2', '--', 'python', 'a.py'], "'v9z:2x2'"),
        (['v5e:2x2', '--process=4', '--', str(SCRIPT)], 'v5e:2x2 has 1 process, so it must be 0'),
        (['v5e:2x2', '--steps=0', '--', str(SCRIPT)], '--steps=0 must be at least 1'),
    ],
)
def test_one_line_says_why_there_is_no_dry_run(run_dry, arguments, message):
    status, out, err = run_dry(*arguments)
    assert (status, out) == (2, '')
    assert err.startswith('error: ') and err.count('\n') == 1 and message in err


@pytest.mark.long
def test_a_module_may_have_the_name_of_the_trainer(tmp_path):
    """The command starts this module, in whose process `train` is the user's."""
    (tmp_path / 'train.py').write_text('import sys\nprint("mine", sys.argv[1:])\n')
    (tmp_path / 'main.py').write_text('import train\n')
    start = [sys.executable, '-m', 'meshwright.dry', 'v5e:2x2', '--', 'python', 'main.py', '-x']
    ended = subprocess.run(start, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and ended.stdout.startswith("mine ['-x']\n"), ended.stderr
    assert 'the script came to its end; it compiled nothing for the machine' in ended.stdout
