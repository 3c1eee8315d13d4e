"""Arrays on described devices: a shape, a type and a sharding, whose values read as zeros."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import Sharding

from meshwright.dry.machine import Machine
from partitioning.hardware import JaxDevice


class StandIn(jax.Array):
    """An array on described devices, without values.

    Operations on it give further stand-ins. Reading a value gives zeros of the right type, or what
    the host put there, if it did.

    Attributes:
      aval: the shape and the type.
      sharding: how it is laid out.
      committed: whether it was placed on its devices on purpose, as for every array of jax.
      known: the values, if the host has put them there.
      machine: the machine of the devices.
    """

    # Called with a stand-in whenever a value that is not known is read.
    on_read: ClassVar[Callable[[StandIn], None]] = lambda array: None

    def __init__(
        self,
        aval: Any,
        sharding: Sharding,
        machine: Machine,
        *,
        committed: bool = True,
        known: np.ndarray | None = None,
    ):
        self._aval = aval
        self._sharding = sharding
        self._committed = committed
        self.machine = machine
        self.known = known
        self._deleted = False

    # What an array is.

    @property
    def aval(self) -> Any:
        return self._aval

    @property
    def shape(self) -> tuple[int, ...]:
        return self.aval.shape

    @property
    def dtype(self) -> Any:
        return self.aval.dtype

    @property
    def ndim(self) -> int:
        return len(self.aval.shape)

    @property
    def size(self) -> int:
        return math.prod(self.aval.shape)

    @property
    def weak_type(self) -> bool:
        return self.aval.weak_type

    @property
    def sharding(self) -> Sharding:
        return self._sharding

    @property
    def committed(self) -> bool:
        return self._committed

    @property
    def format(self) -> Format:
        return Format(None, self._sharding)

    @property
    def device(self) -> Any:
        devices = self._sharding.device_set
        return next(iter(devices)) if len(devices) == 1 else self._sharding

    def devices(self) -> set[JaxDevice]:
        return self._sharding.device_set

    @property
    def is_fully_replicated(self) -> bool:
        return self._sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        return all(map(self.machine.is_local, self._sharding.device_set))

    def on_device_size_in_bytes(self) -> int:
        shard = math.prod(self._sharding.shard_shape(self.shape)) * self.dtype.itemsize
        return shard * self._sharding.num_devices

    # Its life.

    def delete(self) -> None:
        self._deleted = True

    def is_deleted(self) -> bool:
        return self._deleted

    def check_not_deleted(self) -> None:
        if self._deleted:
            raise RuntimeError(f'Array has been deleted with shape={self.aval.str_short()}.')

    _check_if_deleted = check_not_deleted  # the name by which jax asks

    def block_until_ready(self) -> StandIn:
        self.check_not_deleted()
        return self

    def copy_to_host_async(self) -> None:
        self.check_not_deleted()

    # Its parts.

    def _part(self, device: JaxDevice) -> StandIn:
        aval = self.aval.update(shape=self._sharding.shard_shape(self.shape), sharding=None)
        known = None
        if self.known is not None:
            known = self.known[self._sharding.devices_indices_map(self.shape)[device]]
        sharding = jax.sharding.SingleDeviceSharding(device)
        return StandIn(aval, sharding, self.machine, known=known)

    @property
    def addressable_shards(self) -> list[Any]:
        return [shard for shard in self.global_shards if shard.data is not None]

    @property
    def global_shards(self) -> list[Any]:
        self.check_not_deleted()
        return [
            jax.Shard(
                device,
                self._sharding,
                self.shape,
                self._part(device) if self.machine.is_local(device) else None,
            )
            for device in self._sharding.devices_indices_map(self.shape)
        ]

    def addressable_data(self, index: int) -> StandIn:
        local = self.machine.local(self._sharding.devices_indices_map(self.shape))
        return self._part(local[index])

    # Its values.

    @property
    def _value(self) -> np.ndarray:
        self.check_not_deleted()
        if self.known is not None:
            return self.known
        if not (self.is_fully_addressable or self.is_fully_replicated):
            raise RuntimeError(
                'Fetching value for `jax.Array` that spans non-addressable (non process local) '
                f'devices is not possible: it has the shape {self.aval.str_short()}'
            )
        StandIn.on_read(self)
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)

    def __array__(self, dtype: Any = None, context: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._value, dtype=dtype) if copy else np.asarray(self._value, dtype=dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError('len() of unsized object')
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        if not self.shape:
            raise TypeError('iteration over a 0-d array')
        return (self[i] for i in range(self.shape[0]))

    def __bool__(self) -> bool:
        return bool(self._value)

    def __float__(self) -> float:
        return float(self._value)

    def __int__(self) -> int:
        return int(self._value)

    def __complex__(self) -> complex:
        return complex(self._value)

    def __index__(self) -> int:
        return operator.index(self._value[()])

    def tolist(self) -> Any:
        return self._value.tolist()

    def item(self, *args: int) -> Any:
        return self._value.item(*args)

    def tobytes(self, order: Any = 'C') -> bytes:
        return self._value.tobytes(order)

    def __format__(self, spec: str) -> str:
        if self.is_fully_addressable or self.is_fully_replicated:
            return format(self._value if self.ndim else self._value[()], spec)
        return repr(self)

    def __reduce__(self) -> Any:
        return (np.asarray, (self._value,))

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'jax.Array'")

    def __repr__(self) -> str:
        return f'Array(shape={self.shape}, dtype={self.dtype.name})'

    def __str__(self) -> str:
        if self.size <= 16 and (self.is_fully_addressable or self.is_fully_replicated):
            return str(self._value)
        return repr(self)
