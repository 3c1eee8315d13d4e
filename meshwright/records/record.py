"""The record of a program, which a reviewer approves, without names, lines and order.

It is a JSON file with one line for each array, constraint and exchange. Lines of the code are in it
to explain a difference, and are never compared:

    {
     "format": "meshwright record 1",
     "function": "train_step",
     "topology": "v5e:2x4",
     "versions": {"jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.52", "meshwright": "0.2.0"},
     "peak": 8053063680,
     "exchanges": [
      {"kind": "all-gather", "axes": ["fsdp"], "network": "ici", "dtype": "bf16",
       "array": "params/up", "bytes": 48000000, "count": 2, "at": {"line": "model.py:41", ...}}
     ],
     ...
    }

Entries that are null were not known to whoever made the record, and are not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from meshwright.report.plain_values import from_plain, read_object, to_lines, to_plain

FORMAT = 'meshwright record 1'
# What an exchange sends that a compiler has made of several.
SEVERAL = 'several arrays'


@dataclasses.dataclass(frozen=True, kw_only=True)
class At:
    """Where something is in the code, for people.

    Attributes:
      line: the 'file:line'; '' if the program does not say.
      text: what the line says.
      why: why it is there, in one sentence, or ''.
      rule: the rule that decides it, or ''.
    """

    line: str = ''
    text: str = ''
    why: str = ''
    rule: str = ''

    def __str__(self) -> str:
        place = f'{self.line}: {self.text}' if self.text else self.line
        return '; '.join(filter(None, (place, self.rule and f'rule {self.rule}', self.why)))


NOWHERE = At()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedArray:
    """An array of the arguments or results.

    Attributes:
      path: its path.
      shape, dtype: its type.
      spec: its layout as code.
      bytes_per_device: what a device holds of it.
      donated: whether the results may replace it.
      reason: why it is laid out so, for people, such as the rule of each dimension.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: str
    bytes_per_device: int
    donated: bool = False
    reason: str = ''


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedConstraint:
    """A layout that the code states for values of one shape.

    Attributes:
      shape: the shape.
      spec: the layout as code.
      count: how often it is applied in a call, loops included.
      at: its lines, and after them the lines that call these.
    """

    shape: tuple[int, ...]
    spec: str
    count: int
    at: tuple[At, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCollective:
    """An exchange that the code asks for by itself, as inside of a shard_map.

    Attributes:
      name: what it asks for: 'psum', 'ppermute'.
      axes: the mesh axes.
      count: how often it is executed.
      at: its lines, and after them the lines that call these.
      partners: which devices exchange with which, if not all along the axes: '0-6 by +1, 7 by -7'
        of a ring, or 'groups 0 1, 2 3'; None in records that do not say it.
    """

    name: str
    axes: tuple[str, ...]
    count: int
    at: tuple[At, ...] = ()
    partners: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedCheckpoint:
    """A part of the code that `jax.checkpoint` computes again.

    Attributes:
      policy: the name of what it keeps: 'dots_saveable'; 'nothing_saveable' by default. Values that
        the code names for it have an entry "name 'mixed'" each.
      count: how often it is executed.
      at: the lines that call it, and the lines of the functions in it.
    """

    policy: str
    count: int
    at: tuple[At, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedPrecision:
    """How much of one kind of arithmetic has one type.

    Attributes:
      family: 'products', 'exponentials', 'sums', 'maxima' or 'elementwise operations'; also
        'conversions', which are not compared.
      dtype: the types, such as 'bfloat16 -> float32' for a product of bfloat16 in float32.
      amount: the FLOPs of products, and the elements of all others.
      at: the lines with the most of it.
    """

    family: str
    dtype: str
    amount: float
    at: tuple[At, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedExchange:
    """What a device sends per call for one array, or for one kind of value.

    Attributes:
      kind, axes, network: as in a `Collective`.
      dtype: the type of what is sent: 'bf16'.
      array: what is sent: 'params/up', 'the gradient of params/up', 'an activation', or 'several
        arrays' that a compiler has joined.
      bytes: the bytes.
      count: how often such an exchange is executed.
      at: the line with the most bytes.
    """

    kind: str
    axes: tuple[str, ...]
    network: str
    dtype: str
    array: str
    bytes: int
    count: int
    at: At = NOWHERE


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedBuffer:
    """One of the largest arrays that are in memory when it is fullest, besides the arguments.

    Attributes:
      array: its type: 'bf16[64,128]'.
      bytes: its bytes, of all such arrays of the line together.
      at: its line.
    """

    array: str
    bytes: int
    at: At = NOWHERE


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordedNote:
    """A rematerialization that the compiler warns about, or an argument that compiles again.

    Attributes:
      what: the array, without names of the compiler.
      why: the sentence of whoever found it.
    """

    what: str
    why: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """What a program is by meaning, and with which versions it was compiled.

    Attributes:
      function: the name of the function, which is not compared.
      topology, num_slices, mesh: the machine.
      versions: the versions of the packages that made the program.
      files: a digest of each file of the user's whose lines the program has.
      fits: whether it fits the machine; None if the limit is not known.
      peak: the peak of the memory of a device, in bytes.
      aliased: the bytes of results that take the place of donated arguments.
      seconds: the forecast time of a call; None without a model of the chip.
      model_flops: the FLOPs of a device without recomputation.
      program_flops: the FLOPs with recomputation.
      exchanges: what a device sends.
      arguments, results: their arrays.
      constraints: the layouts that the code states inside.
      collectives: the exchanges that the code asks for by itself.
      checkpoints: the parts that `jax.checkpoint` computes again.
      precisions: the types of the arithmetic.
      loops: the lengths of the loops in the code, in ascending order.
      rematerialized: what the compiler makes whole on every device against its will.
      recompiled: the arguments that come back so that the next call compiles again.
      buffers: the largest arrays at the peak, to explain it; they are not compared.
    """

    function: str
    topology: str
    num_slices: int
    mesh: Mapping[str, int]
    versions: Mapping[str, str]
    fits: bool | None
    peak: int
    exchanges: tuple[RecordedExchange, ...]
    arguments: tuple[RecordedArray, ...]
    files: Mapping[str, str] | None = None
    aliased: int | None = None
    seconds: float | None = None
    model_flops: float | None = None
    program_flops: float | None = None
    results: tuple[RecordedArray, ...] | None = None
    constraints: tuple[RecordedConstraint, ...] | None = None
    collectives: tuple[RecordedCollective, ...] | None = None
    checkpoints: tuple[RecordedCheckpoint, ...] | None = None
    precisions: tuple[RecordedPrecision, ...] | None = None
    loops: tuple[int, ...] | None = None
    rematerialized: tuple[RecordedNote, ...] | None = None
    recompiled: tuple[RecordedNote, ...] | None = None
    buffers: tuple[RecordedBuffer, ...] = ()

    @property
    def sent(self) -> int:
        """The bytes that a device sends in all exchanges."""
        return sum(exchange.bytes for exchange in self.exchanges)

    def as_dict(self) -> dict[str, Any]:
        """The record as values that JSON can hold."""
        return {'format': FORMAT, **to_plain(self)}

    def to_json(self) -> str:
        """The text of its file."""
        return to_lines(self.as_dict())

    @classmethod
    def from_json(cls, text: str) -> Record:
        """Reads what `to_json` wrote.

        Raises:
          ValueError: if the text is not a record.
        """
        made: Record = from_plain(cls, read_object(text, FORMAT), 'the file')
        return made
