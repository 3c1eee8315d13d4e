"""Everything in `partitioning` that depends on names of jax which are not public.

`tests/partitioning/test_compiler_options.py` fails first when jax changes one of them.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, SimpleNamespace
from typing import Any

import jax
from jax._src import compilation_cache, compiler, distributed, xla_bridge
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware.chips import chip_of
from partitioning.library_files import is_library_file

# The cuDNN that described GPUs are taken to have, as jax counts its versions: 9.13.0.
_DESCRIBED_VERSION = 91300
_PROCESS_INDEX = xla_bridge.process_index
_find_programs = compilation_cache._get_cache
_read_program = compilation_cache.get_executable_and_time
_SEAL_BYTES = 32
_Note = Callable[[str], None]


@contextlib.contextmanager
def described_cudnn(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Inside, functions that are traced for described GPUs may use the attention of cuDNN.

    `jax.nn.dot_product_attention` asks for the version of the cuDNN on this machine, although the
    program is for others, and has no public setting for it. Compiling needs no cuDNN. Outside of
    described GPUs, nothing changes.
    """
    device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else mesh.abstract_device
    chip = None if device is None else chip_of(device.device_kind)
    if chip is None or chip.platform != 'gpu' or jax.default_backend() == 'gpu':
        yield
        return
    from jax._src.cudnn import fused_attention_stablehlo as kernels

    ask = kernels.check_cudnn_version
    kernels.check_cudnn_version = lambda: _DESCRIBED_VERSION
    try:
        yield
    finally:
        kernels.check_cudnn_version = ask


def this_process() -> int:
    """Returns the index of this process.

    Tests of T5X's users replace the function inside JAX that `Mesh.local_mesh` calls, to see the
    chunk of another process. The replacement counts here too.
    """
    inside = xla_bridge.process_index
    return jax.process_index() if inside is _PROCESS_INDEX else inside()


class _AsProcess0:
    """What jax knows about the processes, in which this one is process 0."""

    process_id = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed.global_state, name)


def keep_programs_of_this_process() -> None:
    """Makes jax keep the programs of this process, and not only of process 0.

    On other platforms than CPUs, all processes find the programs of process 0. On CPUs, jax's key
    of a program contains the devices of one process, so the others would never find theirs.
    """
    inside: Any = compiler
    inside.distributed = SimpleNamespace(global_state=_AsProcess0())


class _SealedPrograms:
    """jax's folder of programs, in which only those with the seal of this user are found.

    The seal, 32 bytes behind a program, is an HMAC-SHA256 of its name and its bytes. The names of
    files depend on the secret, too, so that users who share a folder do not replace each other's.
    """

    def __init__(self, kept: Any, secret: bytes, on_read: _Note, on_damage: _Note):
        self._kept, self._secret = kept, secret
        self._on_read, self._on_damage = on_read, on_damage

    def name(self, key: str) -> str:
        return f'{key}-{self._seal(key)[:4].hex()}'

    def get(self, key: str) -> bytes | None:
        found = self._kept.get(name := self.name(key))
        if found is None:
            return None
        program, seal = found[:-_SEAL_BYTES], found[-_SEAL_BYTES:]
        if not hmac.compare_digest(seal, self._seal(name, program)):
            self._on_damage(name)
            return None
        self._on_read(name)
        return program

    def put(self, key: str, program: bytes) -> None:
        name = self.name(key)
        self._kept.put(name, program + self._seal(name, program))

    def _seal(self, name: str, program: bytes = b'') -> bytes:
        code = hmac.new(self._secret, name.encode() + b'\0', 'sha256')
        code.update(program)
        return code.digest()


def seal_kept_programs(secret: bytes, on_read: _Note, on_damage: _Note) -> None:
    """Makes jax keep programs with a seal, and compile again those that it cannot read.

    A program is code that runs, so one that others have made is not read. Nor is a damaged one,
    which may compute something else or crash the process. jax keeps no program in the place of
    another one, so `on_damage` has to remove it.

    Args:
      secret: what only processes of this user know.
      on_read: called with the name of a program that jax reads, without the ending of its file.
      on_damage: called with the name of a program that was changed or cannot be read.
    """

    def sealed(backend: Any) -> Any:
        kept = _find_programs(backend)
        return kept and _SealedPrograms(kept, secret, on_read, on_damage)

    def read(key: str, options: Any, backend: Any, *devices: Any) -> tuple[Any, int | None]:
        try:
            return _read_program(key, options, backend, *devices)
        except OSError:
            raise
        except Exception:  # It has the right seal, but this jaxlib cannot read it.
            on_damage(sealed(backend).name(key))
            return None, None

    inside: Any = compilation_cache
    inside._get_cache, inside.get_executable_and_time = sealed, read


def num_cached(jitted: Any) -> int:
    """Returns the number of programs that a jitted function keeps in its cache of fast calls."""
    return jitted._cache_size()


def manual_axes(params: Mapping[str, Any]) -> frozenset[str]:
    """The mesh axes over which a `shard_map` takes its arguments apart, from its parameters."""
    # jax 0.9 has another name for them.
    return frozenset(params.get('newly_manual_axes', params.get('manual_axes', ())))


def is_pmapped(fn: Any) -> bool:
    """Whether a function is the result of `jax.pmap`, which has no type of its own.

    It is a Python function of jax with a method, while the result of `jax.jit` has its own type.
    """
    code = getattr(fn, '__code__', None)
    is_of_jax = code is not None and is_library_file(code.co_filename, ('jax',))
    return is_of_jax and hasattr(fn, 'lower') and hasattr(fn, '__wrapped__')


def is_of_pmap(frame: FrameType) -> bool:
    """Whether a frame runs code of `jax.pmap` itself."""
    name = f'{frame.f_globals.get("__name__")}.{frame.f_code.co_qualname}'
    return name.startswith('jax._src.') and 'pmap' in name
