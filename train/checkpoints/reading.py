"""Reads checkpoints array by array, whatever wrote them."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, NoReturn

import jax
import jax.numpy as jnp
from etils import epath

from partitioning.state import path_str
from train.checkpoints.arrays.placing import UnreadableArrayError, read_all
from train.checkpoints.arrays.stored import StoredArray, is_floating
from train.checkpoints.config import AVERAGES, RestoreConfig
from train.checkpoints.formats.opening import find_place, open_checkpoint
from train.checkpoints.matching import (
    Difference,
    Initialize,
    Preflight,
    Wanted,
    count_bytes,
    find_problem,
    match_arrays,
)
from train.checkpoints.orbax.files import read_orbax
from train.checkpoints.steps import manifest
from train.checkpoints.steps.manifest import DamagedCheckpoint
from train.checkpoints.steps.verifying import open_checked
from train.errors import ConfigError, first_line
from train.processes.together import raise_on_all_processes


class CheckpointReader(abc.ABC):
    """Reads the checkpoints of a folder."""

    directory: epath.Path
    _restore: RestoreConfig | None  # the settings that name the folder, if it is of another run

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
        """Opens the arrays of a checkpoint, by name, for the arrays of the run."""
        folder = self.path(step)
        if (folder / 'state').is_dir():
            return read_orbax(folder / 'state')
        place = find_place(folder)
        if place is None:
            raise FileNotFoundError(f'{folder} has no arrays')
        return dict(open_checkpoint(place).arrays)

    def adapt(self, array: StoredArray, wanted: jax.ShapeDtypeStruct, name: str) -> StoredArray:
        """Changes the stored array for the wanted array of a name."""
        return array

    @property
    def is_of_run(self) -> bool:
        """Whether the run itself has saved them, and no other run or program."""
        return self._restore is None

    def restarts_data(self, step: int) -> bool:
        """Whether a run that starts from this step begins with the first row of its data."""
        return self._settings.restart_data

    def first_step(self, step: int) -> int:
        """The last finished step of a run that starts from the checkpoint of a step."""
        return 0 if self._restore is not None and self._restore.drops('step') else step

    def origin(self, step: int) -> str:
        """What a run restores, for messages."""
        return f'step {step} of {self.directory}'

    def has_checksums(self, step: int) -> bool:
        """Whether what is read is compared with the checksums of what was written."""
        return (self.path(step) / manifest.FILE).exists()

    @abc.abstractmethod
    def newest_step(self, say: Callable[[str], None], below: int | None = None) -> int | None:
        """Chooses the newest step below another that can be restored, and says what is skipped."""

    @abc.abstractmethod
    def close(self) -> None:
        """Waits for what is unfinished, and releases what is open."""

    def preflight(
        self, step: int, abstract_state: Any, *, variables_only: bool = False
    ) -> Preflight:
        """Compares a checkpoint with the state of a run. No array is read. See `restore`.

        Raises a DamagedCheckpoint if a file that describes the checkpoint is damaged, and a
        ConfigError if a setting cannot be honoured. Differences between the arrays raise nothing;
        they are in the result.
        """
        state, parts = self._select(abstract_state, variables_only)
        by_name = self._by_name(state)
        with raise_on_all_processes():
            self._check_description(step)
            found, differences = self._match(step, by_name, parts, can_initialize=True)
            return Preflight(
                path=str(self.path(step)),
                num_arrays=len(found),
                num_bytes=sum(array.nbytes for array in found.values()),
                process_bytes=count_bytes(found, by_name),
                differences=tuple(differences),
                problem=find_problem(differences, self._settings, where=str(self.path(step))),
                is_verified=self.has_checksums(step),
            )

    def restore(
        self,
        step: int,
        abstract_state: Any,
        initialize: Initialize | None = None,
        *,
        variables_only: bool = False,
    ) -> Any:
        """Restores the state of a step.

        Args:
          abstract_state: ShapeDtypeStructs with the shardings of the restored arrays.
          initialize: makes the arrays at some paths of the state that the checkpoint does not have,
            if the settings allow that.
          variables_only: whether only the step, the parameters and the other variables are
            restored. The result is then a TrainState whose `opt_state` is None.

        Raises:
          DamagedCheckpoint: on all processes, if its files cannot be read, or have changed.
          ConfigError: if the checkpoint has different arrays, shapes or dtypes than the state.
        """
        state, parts = self._select(abstract_state, variables_only)
        flat, treedef = jax.tree_util.tree_flatten_with_path(state)
        wanted = {path_str(path): struct for path, struct in flat}
        with raise_on_all_processes():
            self._check_description(step)
            by_name = self._by_name(state)
            can_initialize = initialize is not None
            stored, differences = self._match(step, by_name, parts, can_initialize=can_initialize)
            where = str(self.path(step))
            if problem := find_problem(differences, self._settings, where=where):
                raise ConfigError(problem)
        names = zip(wanted, self.names(state), strict=True)
        found = {path: stored[name] for path, name in names if name in stored}
        with raise_on_all_processes():
            try:
                arrays = read_all(found, wanted)
            except UnreadableArrayError as error:
                cause = error.__cause__
                self._raise_damaged(step, cause if isinstance(cause, ConfigError) else error)
        missing = wanted.keys() - arrays.keys()
        averages = {path for path in missing if path.startswith(AVERAGES)}
        if initialize is not None and missing - averages:
            arrays |= initialize(missing - averages)
        arrays |= _start_averages(averages, wanted, arrays)
        return jax.tree.unflatten(treedef, [arrays[path] for path in wanted])

    @property
    def _settings(self) -> RestoreConfig:
        return self._restore or _OwnCheckpoint(path=str(self.directory))

    def _select(self, abstract_state: Any, variables_only: bool) -> tuple[Any, tuple[str, ...]]:
        """The part of a state that is restored, and the beginnings of the names of its arrays.

        Parameters to train must have the dtype that is asked for. Others are converted to it.
        """
        dtype, setting = self._settings.dtype, self._settings.dtype_setting
        if variables_only:
            state = abstract_state.replace(opt_state=None)
            if dtype is not None:
                state = state.replace(params=with_dtype(state.params, dtype))
            keeps = getattr(state, 'ema', None) is not None
            return state, (*self.variables, AVERAGES) if keeps else self.variables
        params = () if dtype is None else abstract_state.params
        for path, x in jax.tree_util.tree_leaves_with_path(params):
            if is_floating(x) and x.dtype != jnp.dtype(dtype):
                raise ConfigError(
                    f'{setting} is {dtype!r}, but this run trains {path_str(path)} in {x.dtype}: '
                    f'write {setting} = {str(x.dtype)!r}, or leave it out'
                )
        return abstract_state, self.variables if self._settings.parameters_only else ('',)

    def _by_name(self, abstract_state: Any) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a state, by their names in the checkpoint."""
        return dict(zip(self.names(abstract_state), jax.tree.leaves(abstract_state), strict=True))

    def _check_description(self, step: int) -> None:
        """Process 0 checks the files that do not belong to an array."""
        if jax.process_index() == 0 and (checked := open_checked(self.path(step))) is not None:
            checked.check_description()

    def _match(
        self, step: int, by_name: Wanted, parts: tuple[str, ...], *, can_initialize: bool
    ) -> tuple[dict[str, StoredArray], list[Difference]]:
        """Finds the stored array for each array of a state, by its name in the checkpoint."""
        restore = self._settings
        if not can_initialize:
            restore = dataclasses.replace(restore, initialize_missing=False)
        try:
            found, differences = match_arrays(
                self.arrays(step, by_name),
                by_name,
                restore,
                where=str(self.path(step)),
                parts=parts,
                casts=self.casts or restore.dtype is not None,
                adapt=self.adapt,
            )
            if not any(name.startswith(AVERAGES) for name in found):
                differences = [_starting(one) for one in differences]
            return found, differences
        except Exception as error:  # Many types, for files that are missing or damaged.
            self._raise_damaged(step, error)

    def _raise_damaged(self, step: int, error: Exception) -> NoReturn:
        if isinstance(error, ConfigError):
            raise error
        hint = ''
        if self._restore is not None:
            hint = f': set {self._restore.setting} to another checkpoint'
        raise DamagedCheckpoint(
            f'checkpoint {self.path(step)} is damaged ({first_line(error)}){hint}'
        ) from error


def _starting(difference: Difference) -> Difference:
    """What is missing of an average is not an error: it starts from the parameters."""
    if difference.kind != 'missing' or not difference.name.startswith(AVERAGES):
        return difference
    return difference._replace(stored='absent, starts from the parameters', is_allowed=True)


def _start_averages(
    paths: Collection[str], wanted: Wanted, arrays: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """The averages that a checkpoint does not have: copies of the parameters, and a count of 0."""
    made = dict[str, jax.Array]()
    for path in paths:
        struct = wanted[path]
        parameter = arrays.get(path.replace(f'{AVERAGES}average/', 'params/', 1))
        if parameter is None:
            made[path] = jnp.zeros(struct.shape, struct.dtype, device=struct.sharding)
        else:
            copied = jnp.array(parameter, struct.dtype, copy=True)
            made[path] = jax.device_put(copied, struct.sharding)
    return made


class _OwnCheckpoint(RestoreConfig):
    """The settings that resume a run from its own checkpoints."""

    setting = 'MODEL_DIR'


def with_dtype(tree: Any, dtype: Any) -> Any:
    """The ShapeDtypeStructs of a tree, with another dtype for floating-point arrays."""

    def convert(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if not is_floating(x):
            return x
        return jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)

    return jax.tree.map(convert, tree)
