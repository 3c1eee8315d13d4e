"""Answers what a script asks jax about devices, processes and the placement of arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from meshwright import jax_private
from meshwright.dry.machine import Machine
from meshwright.dry.processes import Processes
from meshwright.dry.stand_in import StandIn

# What measures a run or writes about it.
_PROFILES = (
    'start_trace',
    'stop_trace',
    'start_server',
    'stop_server',
    'device_memory_profile',
    'save_device_memory_profile',
)
# The version of cuDNN that a GPU machine has, which is none of those that are too old for a kernel.
_CUDNN, _CAPABILITY = 91300, '9.0'
_KNOWN_BYTES = 2**20  # larger arrays of the host are not kept
# Settings of jax that choose devices, or files to write.
_OWN_SETTINGS = (
    'jax_platforms',
    'jax_platform_name',
    'jax_num_cpu_devices',
    'jax_compilation_cache_dir',
)


def _flags_of_script(original: Any) -> Any:
    def define(config: Any) -> None:
        # The dry run sets a default device, which cannot be the default of a flag: flags are texts.
        with jax.default_device(None):
            original(config)

    return define


class Imitation:
    """The answers about a machine."""

    def __init__(self, machine: Machine, note: Callable[[str], None]):
        self._machine = machine
        self._note = note

    def replacements(self) -> list[jax_private.Replacement]:
        """What to put in place of jax's own functions."""
        machine = self._machine
        replaced = []
        for original, answer in self._functions():
            replaced += jax_private.replace_everywhere(original, answer)
        replaced.append(jax_private.on_place(self._place))
        replaced.append(jax_private.on_place_parts(self._place_parts))
        if machine.process_count > 1:
            replaced.append(jax_private.client_of_processes(Processes()))
        here, first = jax.devices('cpu')[0], machine.local(machine.devices)[0]
        # Small computations run here by default; kernels are for the machine.
        replaced += jax_private.questions_about_default_device(
            lambda device: first if device is here else device
        )
        if machine.platform == 'gpu':
            capability = str(getattr(machine.devices[0], 'compute_capability', _CAPABILITY))
            replaced += jax_private.questions_about_cudnn(_CUDNN, capability)
        replaced += jax_private.local_properties(
            lambda x: (
                machine.has(x.devices.flat[0])
                if isinstance(x, Mesh) and x.size
                else machine.holds(x)
            ),
            machine.local,
        )
        replaced.append(
            (type(machine.devices[0]), 'memory_stats', lambda device: self._memory_stats())
        )
        config = type(jax.config)
        replaced.append((config, 'update', self._update_config(config.update)))
        replaced.append((config, 'config_with_absl', _flags_of_script(config.config_with_absl)))
        return replaced

    def _update_config(self, original: Any) -> Any:
        def update(config: Any, name: str, value: Any) -> None:
            if name in _OWN_SETTINGS:
                self._note(f'jax.config.update({name!r}, {value!r})')
            else:
                original(config, name, value)

        return update

    def _functions(self) -> list[tuple[Any, Any]]:
        machine, asked = self._machine, jax_private.device_questions()

        def other(backend: Any) -> bool:
            return backend is not None and getattr(backend, 'platform', backend) not in (
                machine.platform,
                {'gpu': 'cuda'}.get(machine.platform),
            )

        def devices(backend: Any = None) -> list[Any]:
            return asked['devices'](backend) if other(backend) else list(machine.devices)

        def local_devices(
            process_index: Any = None, backend: Any = None, host_id: Any = None
        ) -> list[Any]:
            if other(backend):
                return asked['local_devices'](None, backend)
            index = host_id if process_index is None else process_index
            if index is None or machine.process is None:
                return machine.local(machine.devices)
            return [d for d in machine.devices if d.process_index == index]

        answers: dict[str, Any] = {
            'devices': devices,
            'local_devices': local_devices,
            'device_count': lambda backend=None: len(devices(backend)),
            'local_device_count': lambda backend=None: len(local_devices(backend=backend)),
            'default_backend': lambda: machine.platform,
            'process_index': lambda backend=None: 0 if other(backend) else machine.process_index,
            'process_count': lambda backend=None: 1 if other(backend) else machine.process_count,
            'process_indices': lambda backend=None: list(range(machine.process_count)),
        }
        functions = [(asked[name], answer) for name, answer in answers.items()]
        distributed = jax.distributed
        functions += [
            (
                distributed.initialize,
                lambda *args, **kwargs: self._note('jax.distributed.initialize'),
            ),
            (distributed.shutdown, lambda *args, **kwargs: None),
            (distributed.is_initialized, lambda: machine.process_count > 1),
            (jax.make_array_from_callback, self._from_callback(jax.make_array_from_callback)),
            (
                jax.make_array_from_single_device_arrays,
                self._from_parts(jax.make_array_from_single_device_arrays),
            ),
            (multihost_utils.sync_global_devices, lambda name: None),
            (multihost_utils.assert_equal, lambda tree, fail_message='': None),
            (
                multihost_utils.broadcast_one_to_all,
                lambda tree, is_source=None: jax.tree.map(np.asarray, tree),
            ),
            (multihost_utils.process_allgather, self._allgather),
            (multihost_utils.reached_preemption_sync_point, lambda step: False),
            (multihost_utils.global_array_to_host_local_array, self._local_part),
        ]
        return functions + [(getattr(jax.profiler, name), self._noted(name)) for name in _PROFILES]

    def _noted(self, name: str) -> Any:
        def profile(*args: Any, **kwargs: Any) -> bytes:
            self._note(f'jax.profiler.{name}')
            return b''

        return profile

    # Placement.

    def _make(self, aval: Any, sharding: Any, value: Any = None) -> Any:
        known = None
        kinds = jax.Array | np.ndarray | np.generic | int | float | complex
        if isinstance(value, kinds) and getattr(value, 'nbytes', 0) <= _KNOWN_BYTES:
            is_key = jax.numpy.issubdtype(aval.dtype, jax.dtypes.prng_key)
            known = np.array(value, dtype=None if is_key else aval.dtype)
            known.flags.writeable = False

        def make(aval: Any, sharding: Any) -> StandIn:
            return StandIn(aval, sharding, self._machine, known=known)

        return jax_private.make_array(make, aval, sharding)

    def _place(self, x: Any, aval: Any, device: Any) -> Any:
        numbers = jax_private.numbers_of(x)
        if device is None:
            return x if isinstance(numbers, StandIn) else None
        if not self._machine.holds(device) and not self._machine.has(device):
            if isinstance(numbers, StandIn):
                return jax.device_put(np.asarray(numbers), device)
            return None
        sharding = SingleDeviceSharding(device) if self._machine.has(device) else device
        if isinstance(numbers, StandIn):
            value = numbers.known
        else:
            value = numbers
        return self._make(aval, sharding, value)

    def _place_parts(self, aval: Any, sharding: Any) -> Any:
        if not self._machine.holds(sharding):
            return None
        return self._make(jax_private.shaped(aval.shape, aval.dtype, sharding), sharding)

    def _local_part(self, arrays: Any, mesh: Any, specs: Any) -> Any:
        """The part of each array that the process has, as an array of its own devices."""

        def part(spec: Any, x: Any) -> Any:
            if x.is_fully_addressable:
                return x
            local = NamedSharding(mesh.local_mesh, spec)
            shard = NamedSharding(mesh, spec).shard_shape(x.shape)
            divided = zip(shard, x.shape, local.shard_shape(x.shape), strict=True)
            shape = [n * (whole // of_process) for n, whole, of_process in divided]
            return self._make(jax_private.shaped(shape, x.dtype, local), local)

        return jax.tree.map(
            lambda spec, below: jax.tree.map(functools.partial(part, spec), below), specs, arrays
        )

    def _from_callback(self, original: Any) -> Any:
        def make(shape: Any, sharding: Any, data_callback: Any, dtype: Any = None) -> Any:
            sharding = getattr(sharding, 'sharding', sharding)
            if not self._machine.holds(sharding):
                return original(shape, sharding, data_callback, dtype)
            indices = sharding.devices_indices_map(tuple(shape))
            local = self._machine.local(list(indices))
            if local:
                part = data_callback(indices[local[0]])
                expected = sharding.shard_shape(tuple(shape))
                if tuple(np.shape(part)) != tuple(expected):
                    raise ValueError(
                        f'the callback of jax.make_array_from_callback returned {np.shape(part)} '
                        f'for a shard of {expected}'
                    )
                dtype = dtype or getattr(part, 'dtype', None) or np.asarray(part).dtype
            dtype = jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True)
            return self._make(jax_private.shaped(shape, dtype, sharding), sharding)

        return make

    def _from_parts(self, original: Any) -> Any:
        def make(shape: Any, sharding: Any, arrays: Sequence[Any], *, dtype: Any = None) -> Any:
            if not self._machine.holds(sharding):
                return original(shape, sharding, arrays, dtype=dtype)
            dtype = dtype or arrays[0].dtype
            return self._make(jax_private.shaped(shape, dtype, sharding), sharding)

        return make

    def _allgather(self, tree: Any, tiled: bool = False) -> Any:
        count = self._machine.process_count

        def gather(x: Any) -> np.ndarray:
            if isinstance(x, StandIn) and not x.is_fully_addressable:
                return np.broadcast_to(np.zeros((), x.dtype), x.shape)
            x = np.asarray(x)
            if x.ndim == 0 or not tiled:
                x = x[None]
            return np.concatenate([x] * count)

        return jax.tree.map(gather, tree)

    def _memory_stats(self) -> dict[str, int]:
        limit = self._machine.topology.chip.hbm_bytes_per_device
        return {
            'bytes_in_use': 0,
            'peak_bytes_in_use': 0,
            'bytes_limit': limit,
            'num_allocs': 0,
            'largest_alloc_size': 0,
        }
