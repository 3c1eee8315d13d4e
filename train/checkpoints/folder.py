"""The checkpoints of a run: decides when to save, saves in the background, deletes old ones."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import jax
from etils import epath

from partitioning.amounts import bytes_strs
from train.checkpoints.arrays.stored import is_floating
from train.checkpoints.config import CheckpointConfig, RestoreConfig
from train.checkpoints.reading import CheckpointReader
from train.checkpoints.steps import record
from train.checkpoints.steps.finding import (
    complete_steps,
    delete_step,
    delete_unfinished,
    make_room,
    newest_saved,
    newest_step,
    remove_failed,
)
from train.checkpoints.steps.manifest import complete_step, if_intact
from train.checkpoints.steps.record import StepRecord, read_record, unfinished_file
from train.errors import ConfigError, describe_error
from train.paths import absolute, is_remote
from train.processes.activity import awaiting_threads
from train.processes.together import (
    agree_on,
    any_process,
    end_all_processes,
    raise_on_all_processes,
)

if TYPE_CHECKING:
    from train.checkpoints.local.tier import LocalTier
    from train.checkpoints.orbax.writer import StepWriter


class FailedSave(ConfigError):
    """A checkpoint that could not be saved. The checkpoints before it are intact."""


class Checkpoints(CheckpointReader):
    """The checkpoints of one run, in `<directory>/<step>`.

    Args:
      config: when to save, and which checkpoints to keep.
      restore: the settings that name `directory`, if it belongs to another run.

    Attributes:
      texts: the text files that are saved with each checkpoint, by name. They describe the run.
      local: the local checkpoints of the same run, if it has any.
    """

    def __init__(
        self, directory: epath.Path, config: CheckpointConfig, restore: RestoreConfig | None = None
    ):
        self.directory = absolute(epath.Path(directory))
        self.texts: Mapping[str, str] = {}
        self.local: LocalTier | None = None
        self._restore = restore
        self._config = config
        self.casts = self.casts or config.dtype is not None
        self._writer: StepWriter | None = None
        self._saving: threading.Thread | None = None
        self._postponed = self._has_directory = False
        self._failure: FailedSave | None = None
        self._num_bytes = 0  # of the arrays of a checkpoint
        # Steps whose files have the right names and sizes, but damaged contents.
        self._found_damaged = set[int]()

    # The format, which subclasses may change.

    prefix: ClassVar[str] = ''
    needs_manifest: ClassVar[bool] = True
    use_ocdbt: ClassVar[bool] = False
    items: ClassVar[Collection[str]] = (record.ITEM,)  # the items that are folders of text files
    parameters: ClassVar[str] = 'params/'  # the beginning of the names of the parameters

    def tree(self, state: Any) -> Any:
        """Returns the arrays to save, in the structure that the checkpoint stores."""
        return state

    def path(self, step: int) -> epath.Path:
        return self.directory / f'{self.prefix}{step}'

    def steps(self) -> list[int]:
        """The steps of good checkpoints, in ascending order."""
        return [step for step in self._complete_steps() if step not in self._found_damaged]

    def _complete_steps(self) -> list[int]:
        return complete_steps(self.directory, self.prefix)

    def newest_step(self, say: Callable[[str], None], below: int | None = None) -> int | None:
        """Chooses the step from which a run resumes; see `steps.finding.newest_step`."""
        if below is not None:
            self._found_damaged.add(below)
        return newest_step(
            self.directory,
            say,
            prefix=self.prefix,
            below=below,
            needs_manifest=self.needs_manifest and self._restore is None,
        )

    def latest_step(self) -> int | None:
        """Waits for all saves, and returns the step of the newest good checkpoint, or None."""
        self.wait()
        return max(self.steps(), default=None)

    def record(self, step: int) -> StepRecord | None:
        """Returns the record of a saved step, or None if another program saved it."""
        return read_record(self.path(step))

    # Saving.

    def is_due(self, step: int, *, ending: bool = False) -> bool:
        """Whether a checkpoint is to be saved after this step, after which the run may be `ending`.

        All processes must call it after each step. If an earlier checkpoint is still being written,
        the settings decide whether this one is saved later, not at all, or now.
        """
        if step in self._config.steps or (ending and self._config.at_end):
            return True
        due = self._config.plans(step) or self._postponed
        if not due or self._config.when_busy == 'wait' or not any_process(self.is_saving):
            return due
        self._postponed = self._config.when_busy == 'later'
        return False

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._saving is not None and self._saving.is_alive()

    def save(
        self,
        step: int,
        state: Any,
        *,
        pending: Collection[str] = (),
        scores: Mapping[str, float] | None = None,
    ) -> None:
        """Starts to save a state. Files are written in the background while training continues.

        All processes must call it together. It waits for an earlier save. If the save fails,
        nothing is raised here; `failure` returns the error. Raises a ConfigError if `best_metric`
        is not among the scores of its evaluator.

        Args:
          step: the step of the state. If there is a good checkpoint of it, nothing is saved.
          state: the state, whose arrays have been copied when this method returns.
          pending: the names of evaluations of this step that have been interrupted.
          scores: the metrics and scores of the step; one of them may rank checkpoints.
        """
        self.wait()
        self._postponed = False
        about = StepRecord(
            step=step, pending=tuple(pending), scores=dict(scores or {}), texts=self.texts
        )
        self._check_metric(about.scores)
        try:
            prepared = self._make_room(about)
            if prepared is None:
                return
            tree = self.tree(state)
            self._num_bytes = sum(array.nbytes for array in jax.tree.leaves(tree))
            self._start(prepared, tree)
        except Exception as error:  # Orbax and TensorStore raise many types.
            self._fail(step, error)
            return
        self._saving = threading.Thread(target=self._finish, args=(step,), daemon=True)
        self._saving.start()
        if not self._config.asynchronous:
            self.wait()

    def failure(self) -> FailedSave | None:
        """Returns a failure that it has not returned before, or None. It never waits."""
        failure, self._failure = self._failure, None
        return failure

    def wait(self) -> None:
        """Waits until the current save has ended."""
        if self._saving is not None:
            with awaiting_threads():
                self._saving.join()
            self._saving = None

    def close(self) -> None:
        """Waits until everything is written, and closes the writer.

        Raises a FailedSave if a save has failed and `failure` has not returned it.
        """
        self.wait()
        if self.local is not None:
            self.local.close()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if failure := self.failure():
            raise failure

    def _check_metric(self, scores: Mapping[str, float]) -> None:
        metric = self._config.best_metric
        evaluator = (metric or '').rpartition('/')[0]
        found = [name for name in scores if name.rpartition('/')[0] == evaluator]
        if metric is not None and found and metric not in scores:
            raise ConfigError(
                f'CheckpointConfig.best_metric is {metric!r}, but the scores are '
                f'{", ".join(map(repr, found))}: write one of them'
            )

    def _make_room(self, about: StepRecord) -> StepRecord | None:
        """Prepares the folder for a step.

        Returns the record of the step, with the step before it, or None if it is complete already.

        Raises:
          OSError: if the folder cannot be listed or has been removed, or something else is in the
            place of the step.
        """
        exists, path = False, self.path(about.step)
        with raise_on_all_processes():
            if jax.process_index() == 0:
                about = dataclasses.replace(
                    about, previous=newest_saved(self.directory, self.prefix)
                )
                self._check_directory()
                exists = make_room(
                    path,
                    about.step,
                    needs_manifest=self.needs_manifest,
                    is_damaged=about.step in self._found_damaged,
                )
                if not exists:
                    unfinished_file(path).write_text(about.files()[record.FILE])
        exists, previous = agree_on([exists, about.previous])
        return None if exists else dataclasses.replace(about, previous=previous)

    def check_writable(self) -> None:
        """Checks before the first save that the folder, if it exists, can be written.

        Raises a ConfigError if it is not a folder, or cannot be written.
        """
        path = self.directory
        with raise_on_all_processes():
            if is_remote(path) or not path.exists():
                return
            if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
                why = 'cannot be written' if path.is_dir() else 'is a file'
                raise ConfigError(
                    f'{path}, where checkpoints are to be saved, {why}: change its permissions, '
                    'move it away, or use another MODEL_DIR'
                )

    def _check_directory(self) -> None:
        """Creates the folder once. Raises if it is missing later, because someone removed it."""
        if is_remote(self.directory):
            return
        if not self._has_directory:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._has_directory = True
        elif not self.directory.is_dir():
            raise FileNotFoundError(f'{self.directory} has been removed')
        # If Orbax cannot create its folder, its threads wait for minutes before the process ends.
        probe = self.directory / '.probe'
        probe.mkdir(exist_ok=True)
        probe.rmdir()

    def _start(self, about: StepRecord, tree: Any) -> None:
        if self._writer is None:
            self._writer = self._open_writer()
        texts: dict[str, Mapping[str, str]] = {name: {} for name in self.items}
        texts |= {record.ITEM: about.files()}
        self._writer.start(about.step, tree, texts, self._saved_dtype)

    def _open_writer(self) -> Any:
        from train.checkpoints.orbax.writer import StepWriter  # Only saving needs Orbax.

        return StepWriter(self.directory, self.prefix, self.items, self.use_ocdbt)

    def _saved_dtype(self, name: str, array: Any) -> Any:
        """Returns the dtype in which an array is saved. None keeps its own."""
        is_parameter = name.startswith(self.parameters) and is_floating(array)
        return self._config.dtype if is_parameter else None

    def _finish(self, step: int) -> None:
        """Completes a save: waits for Orbax, writes the manifest, and deletes surplus steps."""
        assert self._writer is not None
        path = self.path(step)
        try:
            self._writer.wait()
            complete_step(path, step)
        except Exception as error:  # Orbax and TensorStore raise many types.
            self._fail(step, error)
            return
        self._found_damaged.discard(step)
        if jax.process_index() != 0:
            return
        try:
            unfinished_file(path).unlink(missing_ok=True)
            ours = complete_steps(self.directory, self.prefix)
            steps = [one for one in ours if one not in self._found_damaged]
            delete_surplus(self.directory, self.prefix, steps, self._config)
            delete_unfinished(self.directory, self.prefix, below=step)
        except (OSError, ConfigError) as error:
            self._failure = FailedSave(
                f'old checkpoints in {self.directory} cannot be deleted ({describe_error(error)}): '
                'check its permissions'
            )

    def _fail(self, step: int, error: Exception) -> None:
        """Records the error for `failure`, and frees the space that the save has taken."""
        reason = describe_error(error)
        if not isinstance(error, FileExistsError):
            self._writer = None  # Its state is unknown.
            if jax.process_index() == 0 and not is_remote(self.directory):
                remove_failed(self.path(step))
                if os.strerror(errno.ENOSPC) in reason:
                    reason += f': {self._describe_space()}'
        self._failure = FailedSave(f'checkpoint {self.path(step)} cannot be saved ({reason})')
        self._failure.__cause__ = error
        if self._config.on_failure == 'stop' and not isinstance(error, FileExistsError):
            end_all_processes(self._failure)

    def _describe_space(self) -> str:
        """What a checkpoint needs, and what its disk has left without it."""
        left = shutil.disk_usage(self.directory).free
        needed, free = bytes_strs(self._num_bytes, left)
        return f'its arrays have {needed} in memory, and the disk has {free} left without them'


# Which steps are kept.


def find_surplus(
    steps: Collection[int], config: CheckpointConfig, scores: Mapping[int, float]
) -> list[int]:
    """The good steps that are no longer to be kept. Steps without a score are never the best."""
    if config.keep is None:
        return []
    newest_first = sorted(steps, reverse=True)
    kept = set(newest_first[: config.keep])
    if config.keep_period:
        kept |= {step for step in steps if step % config.keep_period == 0}
    if config.keep_best:
        sign = 1 if config.best_mode == 'min' else -1
        scored = [step for step in newest_first if step in scores]  # the newest wins ties
        kept |= set(sorted(scored, key=lambda step: sign * scores[step])[: config.keep_best])
    return sorted(set(steps) - kept)


def delete_surplus(
    directory: epath.Path, prefix: str, steps: Collection[int], config: CheckpointConfig
) -> None:
    """Deletes the steps that the settings do not keep. This package must have written all steps.

    Raises an OSError if a step cannot be deleted.
    """
    scores = dict[int, float]()
    if (metric := config.best_metric) is not None:
        for step in steps:
            about = if_intact(read_record, directory / f'{prefix}{step}')
            if about is not None and metric in about.scores:
                scores[step] = about.scores[metric]
    for step in find_surplus(steps, config, scores):
        delete_step(directory / f'{prefix}{step}')
