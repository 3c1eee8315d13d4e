"""T5X's `infer`: writes predictions of a checkpoint, or its scores of given targets, to files.

For an example, see configs/t5x/infer.gin.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

import jax

from partitioning import BasePartitioner
from train.data import InputsToTargets, Subset, Task, TfRecords
from train.errors import ConfigError
from train.evaluators.predictions import PredictionFiles
from train.evaluators.references import Mode
from train.gin.text import write_gin_text
from train.paths import as_folder
from train.processes.together import raise_on_all_processes
from train.running.evaluation import evaluate
from train.t5x.checkpoint_configs import RestoreCheckpointConfig
from train.t5x.datasets import DatasetConfig
from train.t5x.gin_utils import writers_with
from train.t5x.refusals import check_off, check_one_of, expect, refusal
from train.t5x.run_functions import restored_run
from train.t5x.seqio import Feature

KEY = 'infer_script.infer'


def infer(
    *,
    mode: str,
    model: Any,
    dataset_cfg: DatasetConfig,
    restore_checkpoint_cfg: RestoreCheckpointConfig,
    partitioner: BasePartitioner,
    output_dir: str,
    checkpoint_period: int,
    shard_id: int = 0,
    num_shards: int = 1,
    merge_chunked_results: bool = True,
    write_fn: Callable[..., Any] | None = None,
    checkpoint_ds_iter: bool = True,
    train_state_initializer_cls: Any = None,
    fallback_init_rng: int | None = None,
    merge_fn: Callable[..., Any] | None = None,
    summarize_config_fn: Any = None,
    verify_matching_vocabs_fn: Any = None,
    output_vocab_feature_name: str = 'targets',
    file_extension: str = 'jsonl',
    keep_aux_as_numpy: bool = False,
    use_orbax: bool = False,
) -> None:
    """Writes what a checkpoint predicts for every example, one line of JSON per example.

    The files are `<output_dir>/<task>-<mode>.jsonl-<shard>-of-<shards>`. A command that was stopped
    resumes after its last finished part. Raises a ConfigError if a setting cannot be honoured, or
    if there is no checkpoint.

    Args:
      mode: 'predict' writes predictions, 'predict_with_aux' also the scores of the predictions, and
        'score' the log-probabilities of the targets.
      model: the network and vocabulary of the checkpoint, and how it decodes.
      dataset_cfg: the examples.
      restore_checkpoint_cfg: the checkpoint.
      partitioner: lays out data and parameters over the mesh.
      output_dir: the folder of the files, on storage that all hosts share.
      checkpoint_period: the number of batches after which a part is written.
      shard_id: the index of this command, if several share the examples.
      num_shards: the number of commands that share the examples.
      merge_chunked_results: whether the parts become one file at the end.
      write_fn: must be None.
      checkpoint_ds_iter: has no effect; the finished parts say where to resume.
      train_state_initializer_cls: `utils.TrainStateInitializer`, or None.
      fallback_init_rng: must be None.
      merge_fn: must be None.
      summarize_config_fn: a function that is called with (`output_dir`, None, 0), such as
        `gin_utils.summarize_gin_config`; or None.
      verify_matching_vocabs_fn: `utils.verify_matching_vocabs` or None. The check always runs.
      output_vocab_feature_name: must be 'targets'.
      file_extension: the extension in the names of the files.
      keep_aux_as_numpy: has no effect on the files.
      use_orbax: has no effect; checkpoints of both formats are read.
    """
    settings = dict(locals())
    for name in ('write_fn', 'merge_fn'):
        check_off(f'{KEY}.{name}', settings[name], 'the files always have the format of T5X')
    check_one_of(f'{KEY}.mode', mode, get_args(Mode), 'T5X has no other mode')
    why = 'predictions are text of the targets'
    check_one_of(f'{KEY}.output_vocab_feature_name', output_vocab_feature_name, ('targets',), why)
    expect(f'{KEY}.dataset_cfg', dataset_cfg, DatasetConfig, '@utils.DatasetConfig()')
    if dataset_cfg.split == 'infer':  # the only split of tasks made from TFRecord files
        settings['dataset_cfg'] = dataclasses.replace(dataset_cfg, split='validation')
    config, checkpoints = restored_run(KEY, settings, pack=False)
    if len(checkpoints) != 1:
        why = 'the files of several checkpoints would have the same names; give one'
        raise refusal('utils.RestoreCheckpointConfig.path', restore_checkpoint_cfg.path, why)
    try:
        files = PredictionFiles(
            mode=mode,  # type: ignore[arg-type]
            predict=model.predict,
            task=config.task,
            sequence_length=config.sequence_length,
            output_dir=output_dir,
            shard_index=shard_id,
            num_shards=num_shards,
            batches_per_part=checkpoint_period,
            merge_parts=merge_chunked_results,
            extension=file_extension,
        )
    except ConfigError as error:
        raise ConfigError(f'{KEY}: {error}') from error
    with raise_on_all_processes():
        _write_settings(output_dir, summarize_config_fn)
    config = dataclasses.replace(config, evaluators={'infer': files})
    evaluate(config, restore=checkpoints[0])


def _write_settings(output_dir: str, summarize_config_fn: Any) -> None:
    """Writes the settings of gin to the folder, and calls `summarize_config_fn` as T5X does."""
    writers_with(f'{KEY}.summarize_config_fn', summarize_config_fn)  # checks it
    if jax.process_index() == 0:
        folder = as_folder(f'{KEY}.output_dir', output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        write_gin_text(folder)
        if summarize_config_fn is not None:
            summarize_config_fn(str(folder), None, 0)


def create_task_from_tfexample_file(
    paths: Sequence[str],
    file_type: str,
    inputs_key: str,
    targets_key: str | None,
    features: Mapping[str, Feature],
    task_id: str | None = None,
) -> Task:
    """Returns a task whose examples are the `tf.train.Example`s in TFRecord files.

    Returns a task whose split 'infer' has all examples. Raises a ConfigError if a setting cannot be
    honoured.

    Args:
      paths: the files.
      file_type: must be 'tfrecord'.
      inputs_key: the feature with the input text.
      targets_key: the feature with the target text. If it is None, examples have no targets, only
        inputs to predict from.
      features: the vocabularies of 'inputs' and 'targets', and whether each ends in an end token.
      task_id: the name of the task, by default 'infer'.
    """
    key = 'infer_script.create_task_from_tfexample_file'
    check_one_of(f'{key}.file_type', file_type, ('tfrecord',), 'only TFRecords can be read')
    missing = {'inputs', 'targets'} - dict(features).keys()
    if missing:
        why = f'it has no {" and no ".join(sorted(missing))}; write a seqio.Feature for each'
        raise refusal(f'{key}.features', features, why)
    pattern = [paths] if isinstance(paths, str) else list(paths)
    source = TfRecords(pattern=pattern, holdout_percent=0.0)
    every = InputsToTargets(
        source=source,
        inputs=inputs_key,
        targets=targets_key,
        inputs_tokenizer=features['inputs'].vocabulary,
        tokenizer=features['targets'].vocabulary,
        add_end=tuple(name for name in ('inputs', 'targets') if features[name].add_eos),
        name=task_id or 'infer',
    )
    return Subset(task=every, held_out='train')
