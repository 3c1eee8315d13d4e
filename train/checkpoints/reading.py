"""Reads checkpoints: with Orbax if they are those of a run, array by array otherwise."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from etils import epath

from partitioning.state import path_str
from train.checkpoints.matching import Initialize, Matched, Wanted, match_arrays, read_all
from train.checkpoints.orbax_files import read_orbax
from train.checkpoints.restore import RestoreConfig
from train.checkpoints.stored import StoredArray
from train.errors import ConfigError, first_line
from train.runtime.machine import raise_on_all_processes


class CheckpointReader(abc.ABC):
    """Reads the checkpoints of a folder.

    Attributes:
      directory: the folder.
    """

    directory: epath.Path
    _restore: RestoreConfig | None  # the settings that name the folder, if it is of another run
    _manager: Any  # Orbax's manager of the folder

    # Where the arrays are that an evaluation needs.
    variables: ClassVar[tuple[str, ...]] = ('step', 'params', 'flax_mutables')
    # Whether floating-point arrays are converted to the dtypes of the run.
    casts: bool = False

    @abc.abstractmethod
    def path(self, step: int) -> epath.Path:
        """The folder of the checkpoint of a step."""

    def names(self, abstract_state: Any) -> list[str]:
        """The names that a checkpoint gives to the arrays of a state, in the order of its leaves.

        Two arrays that are always equal may share a name.
        """
        return [path_str(path) for path, _ in jax.tree_util.tree_leaves_with_path(abstract_state)]

    def arrays(self, step: int, wanted: Wanted) -> dict[str, StoredArray]:
        """Opens the arrays of a checkpoint, by name.

        Args:
          step: the step of the checkpoint.
          wanted: the arrays of the run, by name.
        """
        return read_orbax(self.path(step) / 'state')

    def adapt(self, array: StoredArray, wanted: jax.ShapeDtypeStruct, name: str) -> StoredArray:
        """Changes the stored array for the wanted array of a name."""
        return array

    def first_step(self, step: int) -> int:
        """The last finished step of a run that starts from the checkpoint of a step."""
        return 0 if self._restore is not None and self._restore.drops('step') else step

    def check(self, step: int, abstract_state: Any) -> list[str]:
        """Compares a checkpoint with the state of a run. No array is read.

        Args:
          step: the step of a saved checkpoint.
          abstract_state: the arrays of the run, as in `restore`.

        Returns:
          The names of the arrays of the checkpoint that the settings do not restore.

        Raises:
          ConfigError: as in `restore`.
        """
        if self._restore is not None and self._restore.dtype is not None:
            _check_dtype(self._restore, abstract_state.params)
        if self._reads_with_orbax:
            self._check(step, abstract_state)
            return []
        with raise_on_all_processes():
            return self._match(step, abstract_state, ('',), can_initialize=True).unused

    def restore(self, step: int, abstract_state: Any, initialize: Initialize | None = None) -> Any:
        """Restores the state of a step.

        Args:
          step: the step of a saved checkpoint.
          abstract_state: ShapeDtypeStructs with the shardings of the restored arrays.
          initialize: makes the arrays at some paths of the state that the checkpoint does not have,
            if the settings allow that.

        Raises:
          ConfigError: if the checkpoint has different arrays, shapes or dtypes than the state, or
            cannot be read.
        """
        if self._restore is not None and self._restore.dtype is not None:
            _check_dtype(self._restore, abstract_state.params)
        if not self._reads_with_orbax:
            return self._read(step, abstract_state, ('',), initialize)
        import orbax.checkpoint as ocp

        args = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        self._check(step, abstract_state)
        try:
            return self._manager.restore(step, args=args)['state']
        except Exception as error:  # Orbax and tensorstore raise many types for a missing file.
            raise self._damaged(step, error) from error

    def restore_variables(
        self, step: int, abstract_state: Any, initialize: Initialize | None = None
    ) -> Any:
        """Restores the step, the parameters and the other variables, without the optimizer state.

        Args:
          step: the step of a saved checkpoint.
          abstract_state: the TrainState of ShapeDtypeStructs, as in `restore`.
          initialize: as in `restore`.

        Returns:
          The state, whose `opt_state` is None.

        Raises:
          ConfigError: as in `restore`.
        """
        state = abstract_state.replace(opt_state=None)
        if self._restore is not None and self._restore.dtype is not None:
            state = state.replace(params=with_dtype(state.params, self._restore.dtype))
        if not self._reads_with_orbax:
            return self._read(step, state, self.variables, initialize)
        import orbax.checkpoint as ocp

        wanted = {n: value for n in self.variables if (value := getattr(state, n)) is not None}
        args = ocp.args.PyTreeRestore(
            item=wanted,
            restore_args=ocp.checkpoint_utils.construct_restore_args(wanted),
            partial_restore=True,
        )
        self._check(step, wanted, prefixes=tuple(wanted))
        path = self.path(step) / 'state'
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                return state.replace(**checkpointer.restore(path, args=args))
        except Exception as error:
            raise self._damaged(step, error) from error

    @property
    def _reads_with_orbax(self) -> bool:
        """Whether the checkpoints have exactly the arrays of the run, so that Orbax reads them."""
        return self._restore is None or self._restore.is_exact

    def _read(
        self, step: int, abstract_state: Any, parts: tuple[str, ...], initialize: Initialize | None
    ) -> Any:
        """Reads an array of the checkpoint for each array of a state.

        Args:
          step: the step of the checkpoint.
          abstract_state: the arrays to read.
          parts: the beginnings of the names that are compared.
          initialize: as in `restore`.
        """
        flat, treedef = jax.tree_util.tree_flatten_with_path(abstract_state)
        wanted = {path_str(path): struct for path, struct in flat}
        with raise_on_all_processes():
            matched = self._match(step, abstract_state, parts, initialize is not None).arrays
            names = zip(wanted, self.names(abstract_state), strict=True)
            found = {path: matched[name] for path, name in names if name in matched}
            try:
                arrays = read_all(found, wanted)
            except Exception as error:  # Many types, for files that are missing or damaged.
                raise self._damaged(step, error) from error
        if initialize is not None and (missing := wanted.keys() - arrays.keys()):
            arrays |= initialize(missing)
        return jax.tree.unflatten(treedef, [arrays[path] for path in wanted])

    def _match(
        self, step: int, abstract_state: Any, parts: tuple[str, ...], can_initialize: bool
    ) -> Matched[StoredArray]:
        """Finds the stored array for each array of a state, by its name in the checkpoint.

        Args:
          step: the step of the checkpoint.
          abstract_state: the arrays to find.
          parts: the beginnings of the names that are compared.
          can_initialize: whether arrays that are not in the checkpoint can be initialized.
        """
        structs = jax.tree.leaves(abstract_state)
        by_name = dict(zip(self.names(abstract_state), structs, strict=True))
        restore = self._restore or _OwnCheckpoint(path=str(self.directory))
        if not can_initialize:
            restore = dataclasses.replace(restore, initialize_missing=False)
        try:
            return match_arrays(
                self.arrays(step, by_name),
                by_name,
                restore,
                where=str(self.path(step)),
                parts=parts,
                casts=self.casts or restore.dtype is not None,
                adapt=self.adapt,
            )
        except ConfigError:
            raise
        except Exception as error:  # Many types, for files that are missing or damaged.
            raise self._damaged(step, error) from error

    def _check(self, step: int, abstract_state: Any, prefixes: tuple[str, ...] = ('',)) -> None:
        """Compares the checkpoint with the state, before `restore` makes processes wait."""
        manager = self._manager  # Creating it may wait for the other processes.
        with raise_on_all_processes():
            try:
                self._compare(manager.item_metadata(step)['state'], step, abstract_state, prefixes)
            except ConfigError:
                raise
            except Exception as error:
                raise self._damaged(step, error) from error

    def _damaged(self, step: int, error: Exception) -> ConfigError:
        hint = 'delete it to resume from the previous checkpoint'
        if self._restore is not None:
            hint = f'set {self._restore.setting} to another checkpoint'
        return ConfigError(f'checkpoint {self.path(step)} is damaged ({first_line(error)}): {hint}')

    def _compare(
        self, metadata: Any, step: int, abstract_state: Any, prefixes: tuple[str, ...]
    ) -> None:
        """Compares paths, shapes and dtypes before any array is read (Orbax casts silently).

        Args:
          metadata: what Orbax knows about the arrays of the checkpoint.
          step: the step of the checkpoint.
          abstract_state: the arrays that are wanted.
          prefixes: only arrays whose paths start with one of them are compared.
        """
        trees = metadata.tree if hasattr(metadata, 'tree') else metadata, abstract_state
        saved, wanted = (
            {path_str(p): x for p, x in jax.tree_util.tree_leaves_with_path(tree)} for tree in trees
        )
        restore = self._restore or _OwnCheckpoint(path=str(self.directory))
        match_arrays(saved, wanted, restore, where=str(self.path(step)), parts=prefixes)


class _OwnCheckpoint(RestoreConfig):
    """The settings that resume a run from its own checkpoints."""

    setting = 'MODEL_DIR'


def with_dtype(tree: Any, dtype: Any) -> Any:
    """The ShapeDtypeStructs of a tree, with another dtype for floating-point arrays."""

    def convert(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree.map(convert, tree)


def _check_dtype(restore: RestoreConfig, params: Any) -> None:
    """Checks that the parameters to train have the dtype that is asked for."""
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype != jnp.dtype(restore.dtype):
            key = f'{restore.setting.rpartition(".")[0]}.dtype'
            raise ConfigError(
                f'{key} is {restore.dtype!r}, but this run trains {path_str(path)} in {x.dtype}: '
                f'write {key} = {str(x.dtype)!r}, or leave it out'
            )
