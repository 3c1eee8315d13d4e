"""Writes stored arrays through Orbax, piece by piece, so that few of them are in memory.

Orbax by itself would read all of them before it writes the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from train.checkpoints.arrays.stored import StoredArray, chunk_shape, grid, split
from train.checkpoints.orbax.writer import Texts, TextsHandler, support_s3
from train.paths import is_remote

# The largest chunk of a written array, and the values that are read but not yet written.
CHUNK_BYTES, BYTES_IN_FLIGHT = 2**26, 2**29


def write_arrays(
    folder: epath.Path,
    tree: Any,
    report: Callable[[int], None],
    texts: Mapping[str, Mapping[str, str]] | None = None,
) -> None:
    """Writes a tree of stored arrays, and None, into a new folder, as a whole or not at all.

    `report` receives the number of bytes of every piece that has been written. `texts` are the
    items of the checkpoint that are folders of texts. The arrays are then the item 'state'. By
    default, the folder itself has the arrays, as with ocp.StandardCheckpointer. Raises exceptions
    of many types, if a source cannot be read or the folder cannot be written.
    """
    if str(folder).startswith('s3://'):
        support_s3()
    pending = _Handler(report)
    types = ocp.type_handlers.create_type_handler_registry((_Pending, pending))
    handler: Any = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=types
    )
    # Orbax calls it before it gives the folder its name.
    handler.finalize = lambda directory: pending.raise_first()
    arrays: Any = ocp.args.PyTreeSave(jax.tree.map(_Pending, tree))
    writer: Any = handler
    if texts is not None:
        items = {name: TextsHandler() for name in texts}
        writer = ocp.CompositeCheckpointHandler(state=handler, **items)
        files = {name: Texts(of_item) for name, of_item in texts.items()}
        arrays = ocp.args.Composite(state=arrays, **files)
    # A store of objects cannot rename a folder, so a last file completes a checkpoint.
    remote = ocp.path.atomicity.CommitFileTemporaryPath if is_remote(folder) else None
    with ocp.Checkpointer(writer, temporary_path_class=remote) as checkpointer:
        try:
            checkpointer.save(folder, args=arrays)
        except BaseException as error:
            pending.errors.append(error)  # No other piece is begun.
            raise


class _Pending:
    """A stored array that Orbax handles like a NumPy array, but does not copy."""

    def __init__(self, array: StoredArray):
        self.array, self.shape, self.dtype, self.size = array, array.shape, array.dtype, array.size

    def __deepcopy__(self, memo: Any) -> _Pending:
        return self


class _Handler(ocp.type_handlers.NumpyHandler):
    """Writes stored arrays as Orbax writes NumPy arrays, but reads each one when it is its turn.

    Orbax would log every error in several threads, so errors are collected.
    """

    def __init__(self, report: Callable[[int], None]):
        super().__init__()
        self.errors: list[BaseException] = []
        self._report, self._budget = report, _Budget(BYTES_IN_FLIGHT)

    def raise_first(self) -> None:
        """Raises the first error, if there was one."""
        if self.errors:
            raise self.errors[0]

    async def _open_and_write(self, value: Any, tspec: dict[str, Any], ts_context: Any) -> None:
        try:
            await self._copy(value.array, tspec, ts_context)
        except Exception as error:
            self.errors.append(error)

    async def _copy(self, array: StoredArray, tspec: dict[str, Any], ts_context: Any) -> None:
        import tensorstore as ts

        chunk = chunk_shape(array, CHUNK_BYTES)
        spec = ts.Spec({**tspec, 'metadata': {**tspec['metadata'], 'chunks': chunk}})
        store = await ts.open(spec, create=True, open=True, context=ts_context)
        for index in split(array):
            num_bytes = store[index].size * array.dtype.itemsize
            async with self._budget.reserve(num_bytes):
                if self.errors:
                    return
                values = await asyncio.to_thread(array.read, index)
                piece = store[index].translate_to[0] if array.ndim else store
                # One after another, so that none is left to be written when there is an error.
                for part in grid(values.shape, chunk):
                    await piece[part].write(
                        values[part], can_reference_source_data_indefinitely=True
                    )
            self._report(num_bytes)


class _Budget:
    """Lets coroutines wait until they may hold a number of bytes."""

    def __init__(self, num_bytes: int):
        self._limit = self._free = num_bytes
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[None]:
        """Reserves bytes for the duration of a block. A larger number waits for all of them."""
        share = min(num_bytes, self._limit)
        async with self._changed:
            await self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            async with self._changed:
                self._free += share
                self._changed.notify_all()
