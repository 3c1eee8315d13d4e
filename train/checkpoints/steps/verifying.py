"""All files of saved steps compared with their checksums."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from train.checkpoints.steps.finding import FoundStep, Status
from train.checkpoints.steps.manifest import (
    NUM_THREADS,
    DamagedCheckpoint,
    check_content,
    find_files,
    list_differences,
    read_manifest,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verified:
    """The result for one checkpoint.

    Attributes:
      found: where it is, and what its names and sizes say.
      status: 'good' if all files have the content that was written; see `FoundStep`.
      reasons: why it is not good, one line for each damaged file.
      num_files: the number of files that were read.
      nbytes: their size, in bytes.
    """

    found: FoundStep
    status: Status
    reasons: Sequence[str] = ()
    num_files: int = 0
    nbytes: int = 0


def size_to_read(found: FoundStep) -> int:
    """The size of the files that `verify` reads, in bytes."""
    try:
        manifest = read_manifest(found.path)
    except DamagedCheckpoint:
        return 0
    return sum(record.size for record in manifest.files.values()) if manifest else 0


def verify(found: FoundStep, report: Callable[[int], None]) -> Verified:
    """Reads all files of a checkpoint, and compares them with its manifest.

    Args:
      found: the checkpoint, of which names and sizes have been looked at.
      report: receives the size of every file that has been read, in bytes.
    """
    manifest = None
    with contextlib.suppress(DamagedCheckpoint):  # `found` says why.
        manifest = read_manifest(found.path)
    if manifest is None:
        return Verified(found=found, status=found.status, reasons=_advise(found))
    sizes = find_files(found.path)
    reasons = [] if found.step == manifest.step else [found.reason]
    reasons += list_differences(found.path, manifest)
    present = {n: r for n, r in manifest.files.items() if sizes.get(n) == r.size}

    def check(name: str) -> str | None:
        try:
            check_content(found.path, name, present[name])
        except DamagedCheckpoint as error:
            return str(error)
        finally:
            report(present[name].size)
        return None

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        reasons += [reason for reason in pool.map(check, sorted(present)) if reason]
    return Verified(
        found=found,
        status='damaged' if reasons else 'good',
        reasons=reasons,
        num_files=len(present),
        nbytes=sum(record.size for record in present.values()),
    )


def all_good(results: Sequence[Verified]) -> bool:
    """Whether there is a good checkpoint, and none is damaged or cannot be verified.

    What a kill has left unfinished, and folders that are not checkpoints, are not used by a run.
    """
    statuses = {result.status for result in results}
    return 'good' in statuses and not statuses & {'damaged', 'without a manifest'}


def _advise(found: FoundStep) -> list[str]:
    """Why a checkpoint without a manifest is not verified, and what to do."""
    if found.status == 'damaged':
        return [found.reason]
    if found.status != 'without a manifest':
        return []
    return [
        'it cannot be verified, because it has no checksums: `meshwright checkpoint convert '
        f'{found.path} RUN --to=meshwright` writes a copy that has them'
    ]
