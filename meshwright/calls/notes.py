"""Notes that say which figures of a forecast are exact."""

from __future__ import annotations

from collections.abc import Iterator

from meshwright.calls.compiling import Program
from meshwright.calls.target import Target
from meshwright.program.costs import MemoryUse

# Which figures of a program for virtual CPU devices also hold for the machine of the forecast.
_STAND_IN = (
    'compiled for virtual CPU devices: the bytes of arguments and the FLOPs are exact',
    'compiled for virtual CPU devices: temporaries and the peak were seen 12 to 43% higher than on '
    'TPUs; kernels that the model chooses by device are kernels for CPUs',
    'compiled for virtual CPU devices: exchanges of bfloat16 have twice their bytes, '
    'reduce-scatters appear as all-reduces, and there is no estimate of time',
)


def find_notes(
    program: Program, target: Target, memory: MemoryUse | None, argument_bytes: int
) -> Iterator[str]:
    """Yields what a reader of a forecast must know about its figures.

    Args:
      program: the function, traced and compiled.
      target: the machine.
      memory: the memory that the compiler reports, or None.
      argument_bytes: the size of the arguments, computed from their layouts.
    """
    if target.chip is None:
        yield (
            f'no data about {target.topology} devices: their memory limit and their speed are not '
            'known'
        )
    if target.is_stand_in and program.compiled is not None:
        yield from _STAND_IN
    if program.out_of_memory is not None:
        yield (
            'the compiler made no program, because the memory does not suffice: the buffers are '
            'by formula, and exchanges and time are not known'
        )
    if memory is not None and (difference := memory.arguments - argument_bytes):
        more = difference > 0
        why = (
            'it pads arrays to whole tiles of the chip'
            if more
            else 'it leaves out arguments that the function does not use'
        )
        yield (
            f'the program holds {abs(difference):,} bytes of arguments '
            f'{"more" if more else "less"} than their layouts say: {why}'
        )
