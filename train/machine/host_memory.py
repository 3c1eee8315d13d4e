"""The memory of this host: what it can hold, and how what was freed is given back to it."""

from __future__ import annotations

import ctypes
import os

from partitioning.amounts import bytes_str
from train.errors import ConfigError

_TOKEN_BYTES = 4  # of an int32


def check_batch_fits(batch_size: int, sequence_length: int, processes: int = 1) -> None:
    """Checks that the tokens of a process's rows of a batch are smaller than its host's memory.

    Raises a ConfigError if they are larger.
    """
    needed = -(-batch_size // processes) * sequence_length * _TOKEN_BYTES
    memory = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    if needed > memory:
        raise ConfigError(
            f'batch_size {batch_size:,} and sequence_length {sequence_length:,} make '
            f'{bytes_str(needed)} of tokens per process and batch, and this host has '
            f'{bytes_str(memory)} of memory: lower one of them'
        )


def release_freed_memory() -> None:
    """Gives the memory that this process has freed back to the system.

    A compiler frees hundreds of megabytes in small pieces, which glibc would keep. This does
    nothing with other C libraries, which lack `malloc_trim`.
    """
    trim = getattr(ctypes.CDLL(None), 'malloc_trim', None)
    if trim is not None:
        trim(0)
