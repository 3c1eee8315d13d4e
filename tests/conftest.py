"""Every test sees 8 virtual CPU devices, on any machine.

Tests check layouts and numbers, not speed. XLA therefore compiles without most optimizations, and
up to jax 0.10 without its newer code generator for fused loops. Each halves the time of compiling.
A program is compiled in one piece: pieces are for large programs and many cores.

Python keeps the bytecode of what it imports, also where the environment forbids it, as in many
containers. Otherwise every process that a test starts compiles jax's, flax's and our modules again,
which takes longer than to import them. What is imported and collected lives until the end, so that
the garbage collector need not look at it again and again.
"""

import gc
import os
import resource
import signal
import sys
from pathlib import Path

import gin
import hypothesis
import jax
import pytest

gc.disable()
sys.dont_write_bytecode = False

# The environment is for programs that tests start.
os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('JAX_DISABLE_MOST_OPTIMIZATIONS', '1')
_XLA_FLAGS = [os.environ.get('XLA_FLAGS', ''), '--xla_cpu_parallel_codegen_split_count=1']
if jax.__version_info__ < (0, 11):  # a later XLA does not know the flag and would stop
    _XLA_FLAGS.append('--xla_cpu_use_fusion_emitters=false')
os.environ['XLA_FLAGS'] = ' '.join(_XLA_FLAGS).strip()
jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_disable_most_optimizations', True)
jax.config.update('jax_num_cpu_devices', 8)

# How long an example takes says something about the machine, not about the code.
hypothesis.settings.register_profile(
    'any machine', deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile('any machine')

# nohup and background jobs of shells ignore these, and so would programs that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = tuple(f'{_ROOT / name}{os.sep}' for name in ('partitioning', 'meshwright', 'train'))


def _refuse_to_unpickle(event, args):
    """Blocks pickles in all that our packages read, because unpickling can run any program.

    What our own processes send each other is not read from files: the frames of `multiprocessing`,
    through which data loaders pass examples, come first there.
    """
    if event != 'pickle.find_class':
        return
    frame = sys._getframe(1)
    while frame is not None and f'{os.sep}multiprocessing{os.sep}' not in frame.f_code.co_filename:
        if frame.f_code.co_filename.startswith(_PACKAGES):
            where = f'{frame.f_code.co_filename}:{frame.f_lineno}'
            raise PermissionError(f'{where} unpickles {".".join(map(str, args))}')
        frame = frame.f_back


sys.addaudithook(_refuse_to_unpickle)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope='session')
def _own_folders(tmp_path_factory):
    """Token indices and the secret of runs are not kept among the user's."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ('XDG_CACHE_HOME', 'XDG_CONFIG_HOME'):
            patch.setenv(name, str(tmp_path_factory.mktemp(name.split('_')[1].lower())))
        yield


@pytest.fixture(autouse=True)
def _own_gin_configuration():
    """No test sees the gin bindings of another."""
    yield
    gin.clear_config()


@pytest.fixture
def limit_files(capsys):
    """Returns a function that limits the size of files, in bytes, and removes the limit.

    A write then stores what fits, and fails, as on a full disk. The output of the test is captured
    in memory, where the limit does not apply. Python does not notice that the bytecode of a module
    was cut off, and would read it later, so it writes none meanwhile.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size=before[0]):
        sys.dont_write_bytecode = size != before[0]
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))

    yield limit
    limit()


@pytest.fixture
def traces(monkeypatch):
    """Replaces JAX's profiler, and returns the folders of the traces that were completed.

    The profiler of jaxlib crashes in a process in which another test has loaded libtpu.
    """
    started, completed = [], []

    def stop():
        folder = Path(started.pop())
        folder.mkdir(parents=True)
        (folder / 'host.xplane.pb').write_bytes(bytes(20_000))
        completed.append(folder)

    monkeypatch.setattr(jax.profiler, 'start_trace', started.append)
    monkeypatch.setattr(jax.profiler, 'stop_trace', stop)
    return completed
