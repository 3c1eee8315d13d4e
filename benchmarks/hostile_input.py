"""The peak memory while hostile files are refused: bombs, absurd lengths and deep JSON.

Run: python benchmarks/hostile_input.py [NAME ...]

Each file is written to a temporary folder and read in a process of its own, with the settings that
users have by default. `becomes` is the size that the file has when it is decompressed, or claims
to have. `peak` is the memory in addition to the process with all modules imported. The last
line says whether each file is refused, with less than 512 MiB.
"""

from __future__ import annotations

import argparse
import bz2
import functools
import gzip
import importlib
import lzma
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet
from array_record.python import array_record_module
from tensorboardX.record_writer import masked_crc32c

from benchmarks.campaigns import measure_in_new_process, peak_memory
from partitioning import Plan
from partitioning.amounts import bytes_str
from train import data
from train.checkpoints.formats.safetensors_files import open_safetensors

LIMIT = 512 << 20
NOTHING = {'peak': 0, 'message': None}
GIB, MIB = 1 << 30, 1 << 20
ZEROS = bytes(MIB)


class Case(NamedTuple):
    """A hostile file.

    Attributes:
      reader: what reads it: the name of a source, or 'safetensors' or 'plan'.
      ending: the end of its name.
      becomes: the bytes that it has when it is decompressed, or claims to have.
      write: writes it.
    """

    reader: str
    ending: str
    becomes: int
    write: Callable[[Path], Any]


def write_repeated(
    path: Path, open_: Callable[..., Any], piece: bytes = ZEROS, size: int = 2 * GIB
) -> None:
    """Writes a compressed file that repeats a piece up to a size."""
    with open_(path, 'wb') as file:
        for _ in range(size // len(piece)):
            file.write(piece)


def write_zstd(path: Path, piece: bytes, window_log: int) -> None:
    """Writes a file of zstandard, for which the reader needs a window of `2**window_log` bytes."""
    zstd = importlib.import_module(
        'compression.zstd' if sys.version_info >= (3, 14) else 'backports.zstd'
    )
    options = {zstd.CompressionParameter.window_log: window_log}
    write_repeated(path, functools.partial(zstd.open, options=options), piece)


def write_xz(path: Path) -> None:
    """Writes an .xz file whose header says that the reader needs a window of 1.5 GiB."""
    encoder = lzma.LZMACompressor(filters=[{'id': lzma.FILTER_LZMA2, 'dict_size': MIB}])
    content = bytearray(
        b''.join([*(encoder.compress(ZEROS) for _ in range(2048)), encoder.flush()])
    )
    # The stream begins with 12 bytes. The header of its first block has its own size in units of 4
    # bytes, flags, the id of the filter, the size of its settings, the window, and a checksum.
    end = 12 + 4 * (content[12] + 1)
    content[16] = 37
    content[end - 4 : end] = struct.pack('<I', zlib.crc32(content[12 : end - 4]))
    path.write_bytes(content)


def write_parquet(path: Path, value: bytes, rows: int, dictionary: bool = True) -> None:
    """Writes a Parquet file whose rows are equal."""
    texts = pyarrow.array([value])
    column: Any = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * rows, 'int32'), texts)
    pyarrow.parquet.write_table(
        pyarrow.table({'text': column if dictionary else column.dictionary_decode()}),
        path,
        compression='zstd',
        use_dictionary=dictionary,
        dictionary_pagesize_limit=GIB,
    )


def write_array_record(path: Path) -> None:
    """Writes a group of 1,024 records of 1 MiB, which can only be decompressed as a whole."""
    writer = array_record_module.ArrayRecordWriter(str(path), 'group_size:1024')
    for _ in range(1024):
        writer.write(ZEROS)
    writer.close()


def write_tf_record(path: Path, length: int) -> None:
    """Writes the beginning of a record of this length, in a compressed file."""
    header = struct.pack('<Q', length)
    with gzip.open(path, 'wb', compresslevel=1) as file:
        file.write(header + struct.pack('<I', masked_crc32c(header)))
        for _ in range(min(length, 2 * GIB) // MIB):
            file.write(ZEROS)


def write_safetensors(path: Path, header: bytes, length: int | None = None) -> None:
    """Writes a safetensors file whose header claims a length, by default its own."""
    path.write_bytes(struct.pack('<Q', length or len(header)) + header)


LINE = b'{"text": "' + b'a' * (4 * MIB - 13) + b'"}\n'
OBJECTS = b'{"text": [' + b'{"":0},' * (8 * MIB // 7 - 3) + b'0]}\n'
LONG_LINE = b'{"text": "' + b'a' * (256 * MIB) + b'"}\n'
DEEP = b'[' * 100_000
# A header of safetensors with a million arrays without values, in 7 MiB.
MANY = b'{' + b','.join(b'"%d":{}' % i for i in range(600_000)) + b'}'
call = functools.partial
write_gzip = call(write_repeated, open_=gzip.open)
write_deep = call(Path.write_bytes, data=DEEP)
write_lines = call(write_zstd, piece=LINE)

CASES = {
    'gzip': Case('TextFiles', 'gz', 2 * GIB, write_gzip),
    'bzip2': Case('TextFiles', 'bz2', 2 * GIB, call(write_repeated, open_=bz2.open)),
    'zstandard': Case('TextFiles', 'zst', 2 * GIB, call(write_zstd, piece=ZEROS, window_log=21)),
    'zstandard, a window of 2 GiB': Case(
        'JsonLines', 'zst', 2 * GIB, call(write_lines, window_log=31)
    ),
    'zstandard, many lines': Case('JsonLines', 'zst', 2 * GIB, call(write_lines, window_log=28)),
    'xz, a window of 1.5 GiB': Case('JsonLines', 'xz', 2 * GIB, write_xz),
    'JSON, a line of 256 MiB': Case(
        'JsonLines', 'jsonl', 256 * MIB, call(Path.write_bytes, data=LONG_LINE)
    ),
    'JSON, a million objects': Case(
        'JsonLines', 'jsonl', 8 * MIB, call(Path.write_bytes, data=OBJECTS)
    ),
    'JSON, 100,000 deep': Case('JsonLines', 'jsonl', 100_000, write_deep),
    'TSV, a line in gzip': Case('TsvFiles', 'gz', 2 * GIB, write_gzip),
    'Parquet, a text of 256 MiB': Case(
        'ParquetFiles', 'parquet', 256 * MIB * 64, call(write_parquet, value=ZEROS * 256, rows=64)
    ),
    'Parquet, 1,000 rows of 1 MiB': Case(
        'ParquetFiles',
        'parquet',
        1000 * MIB,
        call(write_parquet, value=ZEROS, rows=1000, dictionary=False),
    ),
    'Parquet, a million rows of 1 MiB': Case(
        'ParquetFiles', 'parquet', 10**6 * MIB, call(write_parquet, value=ZEROS, rows=10**6)
    ),
    'ArrayRecord, a group of 1 GiB': Case('ArrayRecords', 'array_record', GIB, write_array_record),
    'TFRecord, a record of 2 GiB': Case(
        'TfRecords', 'gz', 2 * GIB, call(write_tf_record, length=2 * GIB)
    ),
    'TFRecord, a record of 2**62 bytes': Case(
        'TfRecords', 'gz', 2**62, call(write_tf_record, length=2**62)
    ),
    'safetensors, a header of 2**62 bytes': Case(
        'safetensors', 'safetensors', 2**62, call(write_safetensors, header=b'{}', length=2**62)
    ),
    'safetensors, 100,000 deep': Case(
        'safetensors', 'safetensors', 100_000, call(write_safetensors, header=DEEP)
    ),
    'safetensors, 600,000 arrays': Case(
        'safetensors', 'safetensors', len(MANY), call(write_safetensors, header=MANY)
    ),
    'plan.json, 100,000 deep': Case('plan', 'json', 100_000, write_deep),
}


def read(reader: str, path: Path) -> None:
    """Reads a file as a run would."""
    if reader == 'plan':
        Plan.load(path)
    elif reader == 'safetensors':
        open_safetensors(path)
    else:
        source = getattr(data, reader)(pattern=str(path), holdout_percent=0)
        data.open_index(source, data.ByteTokenizer(), str(path.parent / 'cache'), lambda *x: None)


def measure(reader: str, path: str) -> dict[str, Any]:
    """Reads a file in this process; returns the error, and the peak of the memory above before."""
    before, message = peak_memory(), None
    try:
        read(reader, Path(path))
    except ValueError as error:
        message = str(error)
    return {'peak': peak_memory() - before, 'message': message}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('names', nargs='*', metavar='NAME', help='some of the files')
    options = parser.parse_args()
    failed = []
    print(f'{"file":<38} {"size":>10} {"becomes":>16} {"peak":>10}  message')
    for name in options.names or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / f'hostile.{case.ending}'
            case.write(path)
            size = bytes_str(path.stat().st_size)
            found = measure_in_new_process(measure, case.reader, str(path)) or NOTHING
            shown = (found['message'] or 'NOT REFUSED').replace(folder, '')
        if found['message'] is None or found['peak'] > LIMIT:
            failed.append(name)
        becomes, peak = bytes_str(case.becomes), bytes_str(found['peak'])
        print(f'{name:<38} {size:>10} {becomes:>16} {peak:>10}  {shown}', flush=True)
    print(f'not refused below 512 MiB: {failed}' if failed else 'all are refused below 512 MiB')
    return bool(failed)


if __name__ == '__main__':
    sys.exit(main())
