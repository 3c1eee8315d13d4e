"""What scripts do beside calling a step: each kind is imitated, refused or held back."""

from pathlib import Path

import jax
import pytest
from described_machines import needs_libtpu

from meshwright.dry import command

pytestmark = needs_libtpu

START = """
import jax, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((jax.device_count(),), ('x',), axis_types=(AxisType.Auto,))
rows = NamedSharding(mesh, P('x'))

def put(): return jax.device_put(np.ones((64, 64), np.float32), rows)

def loss(w, x): return ((x @ w) ** 2).sum()

@jax.jit
def step(w, x):
    value, g = jax.value_and_grad(loss)(w, x)
    return w - g, value

w, x = put(), put()
"""


@pytest.fixture
def run_dry(tmp_path, monkeypatch, capfd):
    """Runs a script in an empty folder; returns the status and the texts, and what was written."""
    monkeypatch.chdir(tmp_path)

    def run(script, *flags, topology='v5e:2x2', arguments=()):
        Path('script.py').write_text(START + script)
        status = command.main([topology, *flags, '--', 'script.py', *arguments])
        assert {path.name for path in tmp_path.iterdir()} <= {'script.py'}, 'nothing is written'
        return status, *capfd.readouterr()

    return run


CHECKPOINTS = """
import orbax.checkpoint as ocp, os
path = os.path.abspath('saved')
with ocp.StandardCheckpointer() as saver:
    saver.save(path, {'w': w, 'here': jax.numpy.ones(3)})
    saver.wait_until_finished()
    print(sorted(os.listdir(path))[0])
    wanted = {'w': jax.ShapeDtypeStruct((64, 64), 'float32', sharding=rows)}
    again = saver.restore(path, {**wanted, 'here': jax.ShapeDtypeStruct((3,), 'float32')})
print(float(again['here'].sum()))
print(again['w'].sharding == rows, again['w'].shape)
step(again['w'], x)
"""


def test_checkpoints_are_restored_and_not_written(run_dry):
    pytest.importorskip('orbax.checkpoint')
    status, out, _ = run_dry(CHECKPOINTS)
    assert status == 0 and out.startswith('_CHECKPOINT_METADATA\n3.0\nTrue (64, 64)\n')
    assert '\n  saved\n' in out.partition('not written:')[2]


FLAGS = """
from absl import app
def main(argv):
    print(argv[1:], jax.config.jax_debug_nans, jax.config.jax_default_device)
    step(w, x)
jax.config.config_with_absl()
app.run(main)
"""


@pytest.fixture
def keep_settings(monkeypatch):
    """Puts back what flags change in jax's settings, for the tests that follow."""
    monkeypatch.setattr(jax.config, 'use_absl', False)
    before = jax.config.jax_debug_nans
    yield
    monkeypatch.undo()
    jax.config.update('jax_debug_nans', before)


def test_the_settings_of_jax_may_be_flags(run_dry, keep_settings):
    pytest.importorskip('absl')
    status, out, err = run_dry(FLAGS, arguments=['--jax_debug_nans=true', 'config.py'])
    assert status == 0 and out.startswith("['config.py'] True cpu"), out + err


AHEAD = """
compiled = step.lower(jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=rows), x).compile()
print(compiled.memory_analysis().argument_size_in_bytes)
for i in range(9): w, value = step(w, x)
"""


def test_a_step_that_is_compiled_ahead_is_compiled_once(run_dry):
    """The call lowers it again, from another line; two shards of 16 x 64 are padded to 128."""
    status, out, err = run_dry(AHEAD)
    assert status == 0 and out.startswith(f'{2 * 4 * 16 * 128}\n'), out + err
    assert 'the run ended after 2 calls of step' in out
    table = out.partition('peak of a device\n')[2].partition('\n\n')[0]
    assert [line.split()[:2] for line in table.splitlines()] == [['step', '2']]


KERNELS = """
from jax.experimental.pallas import tpu as pltpu
from jax.extend import backend

@jax.jit
def tell(w):
    kinds.extend([backend.get_default_device().device_kind, pltpu.get_tpu_info().num_cores])
    return w

kinds = []
tell(w)
print(*kinds, jax.random.key(0).devices().pop().platform)
step(w, x)
step(w, x)
"""


def test_kernels_are_chosen_for_the_machine(run_dry):
    """A library asks for the default device while it is traced; keys are made here."""
    status, out, err = run_dry(KERNELS)
    assert status == 0 and out.startswith('TPU v5 lite 1 cpu\n'), out + err


EAGER = """
@jax.vmap
def divergence(mean, spread): return (spread - mean * mean - jax.numpy.exp(spread)).sum()
x @ w, x[:16] @ w
for _ in range(3):
    g = jax.grad(lambda w: divergence(x @ w, x @ w).mean() + (w * w).sum())(w)
    w = w - 0.1 * g
print(w.shape, w.sharding.is_equivalent_to(rows, 2))
for i in range(9): w, value = step(w, x)
"""


def test_gradients_may_be_taken_outside_jit(run_dry):
    status, out, err = run_dry(EAGER)
    assert status == 0 and out.startswith('(64, 64) True'), out + err
    assert '\nmatmul ' in out and 'matmul was compiled again' not in out
    assert 'the run ended after 2 calls of step, its largest training step' in out


STORE = """
from etils import epath
folder = epath.Path('gs://no-such-bucket/runs')
print(folder.exists())
folder.mkdir(parents=True)
(folder / 'log.txt').write_text('hello')
print((folder / 'log.txt').read_text(), [str(path) for path in folder.iterdir()])
step(w, x)
"""


def test_stores_are_not_written(run_dry):
    pytest.importorskip('etils.epath')
    status, out, _ = run_dry(STORE)
    assert status == 0
    assert out.startswith("False\nhello ['gs://no-such-bucket/runs/log.txt']\n")
    assert 'gs://no-such-bucket/runs' in out.partition('not written:')[2]


TEMPORARY = """
import os, pathlib, tempfile
with tempfile.TemporaryDirectory() as folder:
    inside = pathlib.Path(folder, 'a', 'b')
    inside.mkdir(parents=True)
    (inside / 'c.txt').write_text('hello')
    here = os.open(inside, os.O_RDONLY)
    print(os.stat('c.txt', dir_fd=here).st_size)
    os.remove('c.txt', dir_fd=here)
    os.close(here)
print(os.path.exists(folder))
step(w, x)
"""


def test_temporary_folders_are_removed(run_dry):
    status, out, _ = run_dry(TEMPORARY)
    assert status == 0 and out.startswith('5\nFalse\n') and 'not written' not in out


PROCESSES = """
from jax.experimental import multihost_utils
by_process = sorted(jax.devices(), key=lambda device: device.process_index)
mesh = jax.sharding.Mesh(by_process, ('x',))
with jax.profiler.trace('profile'):
    local = np.ones((4, 64), np.float32)
    whole = multihost_utils.host_local_array_to_global_array(local, mesh, P('x'))
    own = multihost_utils.global_array_to_host_local_array(whole, mesh, P('x'))
print(whole.shape, own.shape, multihost_utils.reached_preemption_sync_point(1))
step(w, x)
"""


def test_processes_have_their_rows(run_dry):
    status, out, _ = run_dry(PROCESSES, '--process=2', topology='v5e:4x4')
    assert status == 0 and out.startswith('(16, 64) (4, 64) False\n')
    assert '  jax.profiler.start_trace\n  jax.profiler.stop_trace\n' in out


EVALUATES_FIRST = """
big = jax.jit(lambda w, x: sum(x @ (w + i) for i in range(9)).mean())
for i in range(4): big(w, x)
for i in range(9): w, value = step(w, x)
"""


def test_a_large_evaluation_neither_ends_nor_delays_the_run(run_dry):
    status, out, _ = run_dry(EVALUATES_FIRST)
    assert status == 0 and 'the run ended after 2 calls of step, its largest training step' in out


MAKES_A_STATE = """
@jax.jit
def init(w):  # more FLOPs than a step, and returns what it takes
    return w @ w.T @ w @ w.T @ w, jax.numpy.zeros_like(w)

w = init(w)[0]
for i in range(9): w, value = step(w, x)
"""


def test_a_function_that_makes_the_state_is_no_step(run_dry):
    status, out, _ = run_dry(MAKES_A_STATE, '--steps=1')
    assert status == 0 and 'the run ended after 1 call of step, its largest training step' in out


PLACED_NOWHERE = """
import jax.numpy as jnp
large = jnp.ones((512, 64)) @ jnp.ones((64, 1024))  # more FLOPs than this machine computes
print(large.devices() == {jax.devices()[0]}, (jnp.ones(1024) + large).devices() == large.devices())
tiny = jax.jit(jax.value_and_grad(lambda w, x: (x @ w).sum()))
tiny(np.ones((4, 4)), np.ones((4, 4)))
"""


def test_what_is_placed_nowhere_follows_its_arrays(run_dry):
    """A large product, what is added to it, and a small training step are all on the machine."""
    status, out, _ = run_dry(PLACED_NOWHERE)
    assert status == 0 and out.startswith('True True\n') and '<lambda>      1' in out


IN_A_THREAD = """
import threading

def train():
    global w
    while True: w, value = step(w, x)

thread = threading.Thread(target=train, daemon=True)
thread.start()
thread.join()
"""


@pytest.mark.filterwarnings('ignore::pytest.PytestUnhandledThreadExceptionWarning')
def test_training_in_a_thread_ends_the_run(run_dry):
    status, out, err = run_dry(IN_A_THREAD)
    assert (status, err) == (0, '') and 'the run ended after 2 calls of step' in out


FORKS = """
import os, subprocess, sys
child = os.fork()
if child == 0:
    for i in range(9): step(w, x)
else:
    print('child', os.waitpid(child, 0)[1])
    subprocess.run([sys.executable, '-c', 'pass'])
    step(w, x)
"""


@pytest.mark.filterwarnings('ignore:os.fork')
@pytest.mark.filterwarnings('ignore:This process')
def test_a_copy_of_the_script_reports_nothing(run_dry):
    status, out, _ = run_dry('step(w, x)\n' + FORKS)
    assert status == 0 and out.count('Dry run of') == 1 and out.startswith('child 0\n')
    assert 'as it is:\n  script.py:' in out and ': python' in out


@pytest.mark.parametrize(
    ('script', 'status', 'message'),
    [
        ('import os; os.execv("/bin/true", ["true"])', 2, 'script.py:17: os.exec cannot be'),
        ('w.unsafe_buffer_pointer()', 2, '`unsafe_buffer_pointer` cannot be imitated'),
    ],
)
def test_one_line_names_the_call_that_cannot_be_imitated(run_dry, script, status, message):
    found, out, err = run_dry(script)
    assert found == status and 'the run ended at a call that cannot be imitated' in out
    assert err.startswith('error: script.py:17: ') and err.count('\n') == 1 and message in err


@pytest.mark.parametrize('before', ['', 'step(w, x)\n'])
def test_an_endless_loader_ends_the_run(run_dry, before):
    status, out, err = run_dry(f'{before}while True: np.ones(3)', '--wait=1')
    line = 17 + bool(before)
    assert f'the run ended at script.py:{line}: nothing new was compiled for long' in out
    assert status == (0 if before else 2) and not err


DONATED = """
one = jax.device_put(w, jax.devices()[0])
vain = jax.jit(lambda w: (w @ w).sum(), donate_argnums=0)
vain(one)
print(float(one[0, 0]))
used = jax.jit(lambda w: w @ w, donate_argnums=0)
used(w)
print(w + 1)
"""


@pytest.mark.filterwarnings('ignore:Some donated buffers')
def test_donated_arrays_are_gone_if_a_result_takes_their_place(run_dry):
    status, out, err = run_dry(DONATED)
    assert status == 2 and out.startswith('0.0\n')
    assert '\nRuntimeError: Array has been deleted with shape=float32[64,64].\n' in err


@pytest.mark.parametrize('wait', ['0', '-1', 'inf', 'nan'])
def test_the_wait_is_a_time(run_dry, wait):
    status, out, err = run_dry('', f'--wait={wait}')
    assert (status, out) == (2, '') and err == f'error: --wait={wait} must be more than 0 seconds\n'


ODD_ARGUMENTS = """
class Odd:
    dtype = 'float32'
    def shape(self): return ()

def run(fn, *args): return fn(w, x)
run(step, Odd())
"""


def test_what_looks_like_an_array_is_no_array(run_dry):
    status, out, _ = run_dry(ODD_ARGUMENTS, '--steps=1')
    assert status == 0 and 'the run ended after 1 call of step' in out
