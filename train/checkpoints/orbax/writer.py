"""Writes the steps of a run through Orbax, which could be replaced here.

Orbax writes the arrays and commits a step: it renames a temporary folder, or adds a last object. It
neither looks for other steps nor deletes any. Both belong to this package, which knows its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from logging import ERROR, LogRecord, getLogger
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from partitioning.state import path_str
from train.checkpoints.arrays.stored import in_s3
from train.checkpoints.steps.record import TEMPORARY
from train.errors import ConfigError
from train.paths import is_remote
from train.processes.activity import wait_for_devices, waiting

MIN_SLICE_BYTES = 2**24
# Processes share the work of checksums by files, and a slice is read with all files it touches.
MAX_FILE_BYTES = 2**26


class TextsHandler(ocp.handlers.AsyncCheckpointHandler):
    """Writes an item that is a folder of small text files. Process 0 writes them."""

    async def async_save(self, directory: epath.Path, args: Texts) -> list[Any]:
        """Starts to write the files, as soon as the folder exists."""
        return [
            ocp.future.CommitFutureAwaitingContractedSignals(
                self._write(directory, args.files), name='texts'
            )
        ]

    async def _write(self, directory: epath.Path, files: Mapping[str, str]) -> None:
        if jax.process_index() == 0:
            for name, text in files.items():
                (directory / name).write_text(text)

    def save(self, directory: epath.Path, args: Texts) -> None:
        """Writes the files, and waits for them."""
        for name, text in args.files.items() if jax.process_index() == 0 else ():
            (directory / name).write_text(text)

    def restore(self, directory: epath.Path, args: Any = None) -> None:
        """Reads nothing: the files are read without Orbax."""


@ocp.args.register_with_handler(TextsHandler, for_save=True, for_restore=True)
@dataclasses.dataclass
class Texts(ocp.args.CheckpointArgs):
    """A folder of text files, by their names. It may be empty."""

    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


class _NoSteps:
    """The names of steps for Orbax, which finds none that exist, whoever wrote them."""

    def __init__(self, prefix: str):
        self._prefix = prefix

    def build_name(self, step: int) -> str:
        return f'{self._prefix}{step}'

    def find_all(self, base_path: Any) -> Iterator[Any]:
        return iter(())

    def find_step(self, base_path: Any, step: int) -> Any:
        raise ValueError(f'no step {step} is looked for in {base_path}')


@functools.cache
def _print_failures_once() -> None:
    """Keeps a save that fails from printing hundreds of lines, because its error is raised anyway.

    Orbax logs each failure several times. TensorStore prints one more for each array that is still
    being written, because the event loop that waited for it is closed.
    """

    def is_of_others(record: LogRecord) -> bool:
        of_orbax = f'{os.sep}orbax{os.sep}' in record.pathname or TEMPORARY in record.getMessage()
        return record.levelno < ERROR or not of_orbax

    logging.get_absl_logger().addFilter(is_of_others)
    getLogger('asyncio').addFilter(is_of_others)
    print_unraisable = sys.unraisablehook

    def unraisablehook(error: Any) -> None:
        if str(error.exc_value) != 'Event loop is closed':
            print_unraisable(error)

    sys.unraisablehook = unraisablehook


@functools.cache
def support_s3() -> None:
    """Lets Orbax keep the arrays of checkpoints in S3, in this process, once.

    Orbax describes the place of arrays to TensorStore in one function, which knows local folders
    and `gs://` only, and has no setting for others (https://github.com/google/orbax/issues/359 and
    872). TensorStore has a driver for S3. Here, a path in S3 is described as if it were in `gs://`,
    and the driver of the description is replaced. Raises a ConfigError without this function.
    """
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        describe = tensorstore_utils.build_kvstore_tspec
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            'the installed orbax-checkpoint cannot save arrays to s3://: use version 0.12, or keep '
            'checkpoints in a local or mounted folder or in gs://'
        ) from error

    @functools.wraps(describe)
    def describe_all(directory: str, *args: Any, **kwargs: Any) -> Any:
        scheme, _, place = directory.partition(':')
        if scheme != 's3':
            return describe(directory, *args, **kwargs)
        return in_s3(describe('gs://' + place.lstrip('/'), *args, **kwargs))

    tensorstore_utils.build_kvstore_tspec = describe_all


def _folder_per_array() -> ocp.PyTreeCheckpointHandler:
    """Writes each array into a folder of files, which needs less memory than one database."""
    one_by_one = ocp.type_handlers.ArrayHandler(
        # Slicing small arrays, so that devices with the same copy share the work, costs more time.
        min_slice_bytes_for_replica_parallel=MIN_SLICE_BYTES
    )
    registry = ocp.type_handlers.create_type_handler_registry(
        (jax.Array, one_by_one), (np.ndarray, ocp.type_handlers.NumpyHandler())
    )
    # Random numbers in float32 shrink by 7%, which is not worth the time of the processor.
    handler: Any = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, use_compression=False, type_handler_registry=registry
    )
    # Orbax would look for databases of processes to merge, and warn that there are none.
    handler.finalize = lambda directory: None
    return handler


def _wait_at_barrier(*, key: str, timeout_ms: int) -> None:
    """Waits for the other processes in the thread in which Orbax commits a step."""
    with waiting():
        ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _waiting_for_process_0() -> contextlib.AbstractContextManager[None]:
    """Says that the body waits, except in process 0, which alone uses the storage there."""
    return waiting() if jax.process_index() else contextlib.nullcontext()


class StepWriter:
    """Writes the steps of one folder, each of them in the background.

    `texts` names the items that are folders of text files. With `use_ocdbt`, all arrays share one
    database, as in T5X; otherwise they have a folder each.
    """

    def __init__(self, directory: epath.Path, prefix: str, texts: Collection[str], use_ocdbt: bool):
        if str(directory).startswith('s3://'):
            support_s3()
        _print_failures_once()
        names: Any = _NoSteps(prefix)
        self._chunk_bytes = None if use_ocdbt else MAX_FILE_BYTES
        arrays = ocp.PyTreeCheckpointHandler() if use_ocdbt else _folder_per_array()
        options = ocp.CheckpointManagerOptions(
            create=False,
            save_root_metadata=False,
            step_name_format=names,
            preservation_policy=ocp.checkpoint_managers.LatestN(None),
            # A store of objects cannot rename a folder, so a last file completes a checkpoint.
            temporary_path_class=(
                ocp.path.atomicity.CommitFileTemporaryPath if is_remote(directory) else None
            ),
            async_options=ocp.options.AsyncOptions(barrier_sync_fn=_wait_at_barrier),
        )
        handlers = {'state': arrays, **{name: TextsHandler() for name in texts}}
        with _waiting_for_process_0():
            self._manager = ocp.CheckpointManager(
                directory, item_handlers=handlers, options=options
            )

    def start(
        self,
        step: int,
        tree: Any,
        texts: Mapping[str, Mapping[str, str]],
        dtype: Callable[[str, Any], Any],
    ) -> None:
        """Starts to write a step, when the arrays have been copied to the host.

        `texts` are the files of each item that is a folder of text files. `dtype` returns the dtype
        in which an array is written, or None for its own, given its path in the tree and the array.
        """

        def save_args(path: Any, array: Any) -> ocp.SaveArgs:
            converted = dtype(path_str(path), array)
            converted = None if converted is None else jnp.dtype(converted)
            return ocp.SaveArgs(dtype=converted, chunk_byte_size=self._chunk_bytes)

        items: dict[str, Any] = {name: Texts(files) for name, files in texts.items()}
        items['state'] = ocp.args.PyTreeSave(
            tree, save_args=jax.tree_util.tree_map_with_path(save_args, tree)
        )
        wait_for_devices(tree)
        with _waiting_for_process_0():
            self._manager.save(step, args=ocp.args.Composite(**items), force=True)

    def wait(self) -> None:
        """Waits until the step is committed.

        Raises exceptions of many types, if it cannot be written.
        """
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Ends the threads of Orbax."""
        with _waiting_for_process_0():
            self._manager.close()
