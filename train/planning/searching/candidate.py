"""One way to run a model on a machine, as gin settings on top of those of a run."""

from __future__ import annotations

import dataclasses
from typing import Literal

from partitioning.hardware import OptionValue

# What the backward pass keeps: a word of TransformerConfig.remat, or 'offload': only the inputs of
# the layers, in the memory of the host.
RematChoice = Literal['none', 'dots', 'full', 'offload']


@dataclasses.dataclass(frozen=True)
class Layout:
    """A file of configs/partitioning with the sizes of its mesh.

    Attributes:
      preset: the name of the file, or '' for the layout that the run has.
      sizes: the macros of the file that decide its mesh, with their values.
    """

    preset: str
    sizes: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        if not self.preset:
            return "the run's"
        return ' '.join([self.preset, *(str(size) for _, size in self.sizes)])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidate:
    """What a search can change in a run. None leaves a setting as the run has it.

    Attributes:
      layout: the mesh and the rules.
      num_microbatches: the number of microbatches.
      remat: what the backward pass recomputes.
      output_chunks: the number of chunks of the vocabulary in the output layer.
      compiler_options: options of the compiler in addition to those of the run; None removes one.
    """

    layout: Layout
    num_microbatches: int | None = None
    remat: RematChoice | None = None
    output_chunks: int | None = None
    compiler_options: tuple[tuple[str, OptionValue | None], ...] = ()

    def __str__(self) -> str:
        parts = [str(self.layout)]
        if self.remat:
            parts.append(f'remat {self.remat}')
        if self.num_microbatches and self.num_microbatches > 1:
            parts.append(f'{self.num_microbatches} microbatches')
        if self.output_chunks:
            parts.append(f'{self.output_chunks} output chunk{"s" * (self.output_chunks > 1)}')
        parts += [f'{name}={value}' for name, value in self.compiler_options]
        return ', '.join(parts)

    @property
    def features(self) -> tuple[str, ...]:
        """Its settings as words, which candidates with a setting in common share."""
        return (
            f'layout {self.layout}',
            f'preset {self.layout.preset}',
            f'remat {self.remat}',
            f'microbatches {self.num_microbatches}',
            f'chunks {self.output_chunks}',
            f'options {self.compiler_options}',
        )

    @property
    def program(self) -> Candidate:
        """The same without compiler options, which do not change the function that is traced."""
        return dataclasses.replace(self, compiler_options=())
