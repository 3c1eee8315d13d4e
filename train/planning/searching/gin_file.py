"""The settings of a candidate as gin: on top of a run, and as a file that trains it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from train.planning.searching.candidate import Candidate
from train.planning.searching.run_sizes import RunSizes


def files_of(candidate: Candidate) -> list[str]:
    """The gin files that follow those of the run."""
    preset = candidate.layout.preset
    return [f'configs/partitioning/{preset}.gin'] if preset else []


def bindings_of(candidate: Candidate, run: RunSizes) -> list[str]:
    """The gin bindings that follow those of the run.

    Args:
      candidate: the candidate.
      run: the run, whose objective and compiler options they name.
    """
    lines = [f'{name} = {size}' for name, size in candidate.layout.sizes]
    if candidate.num_microbatches is not None:
        lines.append(f'TrainConfig.num_microbatches = {candidate.num_microbatches}')
        if candidate.num_microbatches == 1:  # nothing is summed
            lines.append("TrainConfig.accumulation_dtype = 'float32'")
    if candidate.remat == 'offload':
        lines += [
            'TransformerConfig.remat = @Remat()',
            'Remat.save = []',
            "Remat.offload = ['residual']",
        ]
    elif candidate.remat is not None:
        lines.append(f'TransformerConfig.remat = {candidate.remat!r}')
    if candidate.output_chunks is not None and run.output:
        lines += [
            f'{run.output}.output = @OutputSettings()',
            f'OutputSettings.num_chunks = {candidate.output_chunks}',
        ]
    if candidate.compiler_options:
        own = {} if isinstance(run.compiler_options, str) else dict(run.compiler_options)
        options = own | dict(candidate.compiler_options)
        lines.append(f'TrainConfig.compiler_options = {options!r}')
    return lines


def write_gin(
    candidate: Candidate,
    run: RunSizes,
    files: Sequence[str],
    bindings: Sequence[str],
    comment: Sequence[str] = (),
) -> str:
    """Returns the text of a gin file that trains a run with the settings of a candidate.

    Args:
      candidate: the candidate.
      run: the sizes of the run.
      files: the gin files of the run.
      bindings: the gin bindings of the run, 'NAME=value'.
      comment: lines for the head of the file.
    """
    head = [f'# {line}' for line in comment]
    includes = [f'include {_place(file)!r}' for file in files]
    own = [f'include {file!r}' for file in files_of(candidate)]
    imports = ['import train.models.remat'] if candidate.remat == 'offload' else []
    of_run = ['', '# The run.', *includes, *bindings]
    found = ['', '# What the search has changed.', *imports, *own, *bindings_of(candidate, run)]
    return '\n'.join([*head, *of_run, *found]) + '\n'


def _place(file: str) -> str:
    """The name by which a gin file is found from other folders, too."""
    path = Path(file)
    return str(path.resolve()) if path.exists() and not file.startswith('configs/') else file
