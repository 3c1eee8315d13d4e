"""Checks files of a saved step against its manifest, each once, when it is first read."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from etils import epath

from train.checkpoints.steps.manifest import Manifest, check_content, is_array_file, read_manifest

NUM_THREADS = 4


class CheckedFiles:
    """The files of a saved step. Several threads may check them at the same time.

    Args:
      folder: the folder of the step.
      manifest: what has been written into it.
    """

    def __init__(self, folder: epath.Path, manifest: Manifest):
        self._folder, self._manifest = folder, manifest
        self._checks = dict[str, Future[None]]()

    def check(self, names: Iterable[str]) -> None:
        """Checks files of the step, except those that another thread has begun to check.

        It returns when all of them are checked. Afterwards, a local file is in the page cache, so
        reading it right away does not wait for the disk.

        Args:
          names: the paths of the files below the folder. Chunks that were never written, because
            they have only the fill value, are not in the manifest and need no check.

        Raises:
          DamagedCheckpoint: if a file does not have the content that was written.
        """
        checks = []
        for name in names:
            if (record := self._manifest.files.get(name)) is None:
                continue
            ours = Future[None]()
            check = self._checks.setdefault(name, ours)
            if check is ours:
                try:
                    check_content(self._folder, name, record)
                    ours.set_result(None)
                except BaseException as error:
                    ours.set_exception(error)
                    raise
            checks.append(check)
        for check in checks:
            check.result()

    def check_together(self, names: Iterable[str]) -> None:
        """Checks many small files in several threads."""
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for _ in pool.map(self.check, ([name] for name in names)):
                pass

    def check_description(self) -> None:
        """Checks every file that does not belong to an array."""
        self.check_together(n for n in self._manifest.files if not is_array_file(n))

    def array_files(self) -> list[str]:
        """The files of all arrays."""
        return [name for name in self._manifest.files if is_array_file(name)]


def open_checked(folder: epath.Path) -> CheckedFiles | None:
    """The files of a saved step, or None if it has no manifest, so that nothing can be checked.

    Raises:
      DamagedCheckpoint: if the manifest itself is damaged.
    """
    manifest = read_manifest(folder)
    return None if manifest is None else CheckedFiles(folder, manifest)
