"""`meshwright eval`, `predict` and `generate`: what a trained model scores and writes."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from train.cli.command import CommandParser, configure, number, run_command
from train.errors import ConfigError

if TYPE_CHECKING:
    from etils import epath

    from train.checkpoints import RestoreConfig
    from train.config import TrainConfig
    from train.decoding import Search

_EVALUATE = """\
Scores the newest checkpoint of a run with the evaluators of the run, from its folder alone.

  {prog} runs/quickstart
  {prog} runs/quickstart --step=225 --gin.NUM_PARTITIONS=1
"""
_PREDICT = """\
Predicts the targets of every held-out example, one line of JSON per example. A command that was
stopped resumes.

  {prog} runs/translate --beams=4 --output=predictions
  {prog} runs/translate --mode=score
"""
_GENERATE = """\
Continues prompts with the language model of a run, all of them in one batch.

  {prog} runs/quickstart --prompt 'def ' --prompt 'class ' --length=200
"""


def evaluate(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright eval`, and returns its exit status."""
    parser = _make_parser(prog, 'RUN [--step N] [--gin.NAME=value ...]', _EVALUATE)
    options = parser.read(arguments)

    def command() -> None:
        path = _find_run(options)
        from train.running.evaluation import evaluate

        config, restore = _read_run(options, path)
        evaluate(config, restore=restore, output_dir=f'{config.model_dir}/eval')

    return run_command(command, options)


def predict(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright predict`, and returns its exit status."""
    parser = _make_parser(prog, 'RUN [--mode MODE] [--output FOLDER] [...]', _PREDICT)
    parser.add_argument('--mode', default='predict', help='predict, predict_with_aux or score')
    parser.add_argument('--output', help='the folder of the files (RUN/predictions/STEP)')
    parser.add_argument(
        '--beams', type=number(int, 0), default=0, help='the beams of a beam search (none)'
    )
    _add_sampling(parser, temperature=0.0)
    options = parser.read(arguments)

    def command() -> None:
        path = _find_run(options)
        import functools

        from train.decoding import beam_search, predict, sample
        from train.evaluators.predictions import PredictionFiles

        search: Search = functools.partial(sample, **_sampling(options))
        if options.beams:
            search = beam_search
        decode = functools.partial(predict, decode_fn=search, num_decodes=options.beams or 1)
        files = PredictionFiles(mode=options.mode, predict=decode, output_dir=options.output)
        _evaluate_with(options, path, predict=files)

    return run_command(command, options)


def generate(arguments: Sequence[str], prog: str) -> int:
    """Runs `meshwright generate`, and returns its exit status."""
    parser = _make_parser(prog, 'RUN --prompt TEXT [--prompt TEXT ...] [...]', _GENERATE)
    parser.add_argument('--prompt', action='append', required=True, help='a text to continue')
    parser.add_argument(
        '--length', type=number(int, 1), default=256, help='tokens with the prompt (256)'
    )
    _add_sampling(parser, temperature=0.8)
    options = parser.read(arguments)

    def command() -> None:
        path = _find_run(options)
        from train.evaluators.samples import Samples

        samples = Samples(prompts=options.prompt, length=options.length, **_sampling(options))
        _evaluate_with(options, path, samples=samples)

    return run_command(command, options)


def _evaluate_with(options: argparse.Namespace, path: epath.Path, **evaluators: Any) -> None:
    """Runs evaluators on the checkpoint of a run, in place of the evaluators of the run."""
    from train.running.evaluation import evaluate

    config, restore = _read_run(options, path)
    changes = {'evaluators': evaluators, 'seed': options.seed}
    evaluate(dataclasses.replace(config, **changes), restore=restore)


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(options, name) for name in ('temperature', 'top_k', 'top_p')}


def _add_sampling(parser: CommandParser, temperature: float) -> None:
    shown = f'0 is greedy ({temperature:g})'
    parser.add_argument('--temperature', type=number(float, 0), default=temperature, help=shown)
    parser.add_argument(
        '--top_k', type=number(int, 0), default=0, help='sample only the K most likely (all)'
    )
    parser.add_argument(
        '--top_p', type=number(float, 0, 1), default=0.0, help='sample only this share (all)'
    )
    parser.add_argument(
        '--seed', type=int, default=0, help='a different seed gives a different sample (0)'
    )


def _make_parser(prog: str, usage: str, description: str) -> CommandParser:
    parser = CommandParser(prog, usage, description)
    parser.add_argument('run', metavar='RUN', help='the folder of a run')
    parser.add_argument('--step', type=int, help='the checkpoint (the newest)')
    return parser


def _find_run(options: argparse.Namespace) -> epath.Path:
    """Returns the folder of a run. Raises a ConfigError if it is none, or lacks the step.

    It imports little, so commands call it before anything else.
    """
    from train.paths import as_path, file_of_run

    path = as_path('RUN', options.run)
    if not file_of_run(path, 'config.gin').exists():
        raise ConfigError(f'{path} is not the folder of a run: it has no config.gin')
    if options.step is not None:
        folders = [place for place in (path, path / 'checkpoints') if place.is_dir()]
        names = [one.name for folder in folders for one in folder.iterdir()]
        found = (re.fullmatch(r'(?:checkpoint_)?(\d+)', name) for name in names)
        steps = sorted(int(one[1]) for one in found if one)
        if options.step not in steps:
            few = ', '.join(map(str, steps[-10:])) or 'none'
            dots = '..., ' * (len(steps) > 10)
            raise ConfigError(
                f'--step={options.step} is not a step of {path}, which has {dots}{few}'
            )
    return path


def _read_run(
    options: argparse.Namespace, path: epath.Path
) -> tuple[TrainConfig, RestoreConfig | None]:
    """Returns the settings of a run, as if it were trained in its folder, and its checkpoint."""
    from train.gin.load import find_config
    from train.paths import file_of_run

    configure(options, [str(file_of_run(path, 'config.gin'))])
    config = dataclasses.replace(find_config(), model_dir=str(path))
    if options.step is None:
        return config, None
    return config, config.checkpoints.restore_of(path, options.step)
