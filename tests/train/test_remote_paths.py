"""Files and runs in S3, on a local server that speaks its protocol. gs:// has no such server here.

The expected contents are written and read by boto3, which the code under test does not use.
"""

import gzip
import io
import json
import re
import sys

import flax.linen as nn
import gin
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pyarrow
import pyarrow.parquet
import pytest
import tensorstore
import tokenizers
from etils import epath
from gin_fixtures import load_config
from jax.sharding import NamedSharding, PartitionSpec
from s3_server import Bucket, needs_s3, s3_server
from written_files import documents_of_both_parts, index_of

from partitioning import PjitPartitioner, Plan, TrainState
from train import TrainConfig, train
from train.checkpoints import (
    CheckpointConfig,
    Checkpoints,
    RestoreConfig,
    complete_steps,
    find_checkpoint,
    folder,
    open_restored,
)
from train.cli.command import explain
from train.cli.training import find_gin_file
from train.data import (
    ArrayRecords,
    ByteTokenizer,
    CausalLM,
    HuggingFaceTokenizer,
    JsonLines,
    ParquetFiles,
    Records,
    TextFiles,
    open_index,
    record,
)
from train.errors import ConfigError, first_line
from train.objectives import Loss, Objective
from train.paths import absolute, as_path, is_remote
from train.reporting import metric_files as appended_file, writers


@pytest.fixture(scope='module')
def client():
    with s3_server():
        import boto3

        yield boto3.client('s3')


@pytest.fixture
def bucket(client, request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield Bucket(client, request.node.name.replace('_', '-')[:60])
    assert list(tmp_path.glob('s3:*')) == [], 'a library took the address for a local folder'


# Paths.


def test_a_store_without_credentials_is_one_line():
    exceptions = pytest.importorskip('botocore.exceptions')
    assert explain(exceptions.NoCredentialsError()) == (
        'the store cannot be used: Unable to locate credentials'
    )


def test_the_line_of_an_error_of_tensorstore_has_not_all_its_settings(tmp_path):
    with pytest.raises(ValueError) as caught:
        tensorstore.open({'driver': 'zarr', 'kvstore': f'file://{tmp_path}/none/'}).result()
    assert 'tensorstore_spec' in str(caught.value)
    assert first_line(caught.value) == (
        f'NOT_FOUND: Error opening "zarr" driver: Metadata at local file "{tmp_path}/none/.zarray" '
        'does not exist'
    )


@pytest.mark.parametrize('value', ['https://host/a', 'S3://bucket/a', 'hdfs://a', 'az://a'])
def test_an_unknown_store_is_refused(value):
    with pytest.raises(ConfigError, match=rf'MODEL_DIR .{value}. .*gs:// or s3://'):
        as_path('MODEL_DIR', value)


@pytest.mark.parametrize('value', [None, 7, '', ' ', b'a'])
def test_a_value_that_is_not_a_path_is_refused(value):
    with pytest.raises(ConfigError, match='MODEL_DIR is'):
        as_path('MODEL_DIR', value)


@pytest.mark.parametrize(
    ('path', 'package', 'extra'),
    [('gs://bucket/a', 'gcsfs', 'gcs'), ('s3://bucket/a', 's3fs', 's3')],
)
def test_a_store_without_its_package_names_the_extra(monkeypatch, path, package, extra):
    monkeypatch.setitem(sys.modules, package, None)
    source = TextFiles(pattern=f'{path}/*.txt')
    for use in (
        lambda: as_path('MODEL_DIR', path),
        source.listing,
        lambda: HuggingFaceTokenizer(path=path).num_tokens,
        lambda: find_checkpoint(RestoreConfig(path=path)),
    ):
        with pytest.raises(ConfigError, match=rf"{package}: pip install 'meshwright\[{extra}\]'"):
            use()


def test_a_local_path_is_completed_and_a_remote_one_stays(tmp_path, monkeypatch):
    monkeypatch.setenv('HOME', str(tmp_path))
    assert str(as_path('MODEL_DIR', '~/run')) == str(tmp_path / 'run')
    (tmp_path / 'link').symlink_to(tmp_path / 'run')
    assert str(absolute(epath.Path(tmp_path / 'link'))) == str((tmp_path / 'run').resolve())
    assert str(absolute(epath.Path('s3://bucket/run'))) == 's3://bucket/run'
    assert [is_remote(p) for p in ('gs://a/b', epath.Path('s3://a'), '/a', 'a:/b')] == [
        *(True, True, False, False)
    ]


@needs_s3
def test_the_gin_file_of_a_run_in_a_store(bucket):
    bucket.write({'run/config.gin': b"include '%s/run/own.gin'" % bucket.url.encode()})
    bucket.write({'run/own.gin': b'TRAIN_STEPS = 7\nTrainConfig.total_steps = %TRAIN_STEPS'})
    load_config([find_gin_file(f'{bucket.url}/run')])
    assert gin.query_parameter('TrainConfig.total_steps').scoped_selector == 'TRAIN_STEPS/gin.macro'
    include = f"include '{bucket.url}/run2/own.gin'".encode()
    bucket.write({'run/config.gin': include, 'run2/own.gin': b'TRAIN_STEPS = 7'})
    with pytest.raises(ConfigError, match='is not below the folder of a file of the command'):
        load_config([find_gin_file(f'{bucket.url}/run')])


def test_the_cache_of_token_indices_must_be_local():
    with pytest.raises(ConfigError, match="cache_dir 's3://bucket/cache' must be a local folder"):
        open_index(Records(records=['a']), ByteTokenizer(), 's3://bucket/cache', lambda *a: None)


# Texts and tokenizers.


def compress_zstd(content):
    import zstandard

    return zstandard.ZstdCompressor().compress(content)


@needs_s3
def test_texts_are_found_and_read(bucket, tmp_path):
    table, parquet = pyarrow.table({'text': ['row 0', 'row 1']}), io.BytesIO()
    pyarrow.parquet.write_table(table, parquet)
    lines = b''.join(b'{"text": "line %d"}\n' % i for i in range(2))
    texts = {'a.txt': b'plain', 'b.txt': gzip.compress(b'gzip'), 'c/d.txt': compress_zstd(b'zstd')}
    endings = {'a.txt': '', 'b.txt': '.gz', 'c/d.txt': '.zst'}
    bucket.write({f'texts/{name}{endings[name]}': text for name, text in texts.items()})
    bucket.write({'texts/skip/e.txt': b'excluded', 'texts/empty.txt/': b'', 'other.txt': b'other'})
    bucket.write({'lines.jsonl.gz': gzip.compress(lines), 'rows.parquet': parquet.getvalue()})
    at_root = TextFiles(
        pattern=['*.txt*', '**/*.zst'], exclude='/skip/', root=f'{bucket.url}/texts'
    )
    assert [d.name for d in at_root.listing().documents] == ['a.txt', 'b.txt.gz', 'c/d.txt.zst']
    sources = {
        (b'gzip', b'plain', b'zstd'): at_root,
        (b'plain', b'zstd'): TextFiles(
            pattern=[f'{bucket.url}/texts/a.*', f'{bucket.url}/**/d.*'], root=str(tmp_path)
        ),
        (b'line 0', b'line 1'): JsonLines(pattern=f'{bucket.url}/*.jsonl.gz'),
        (b'row 0', b'row 1'): ParquetFiles(pattern=f'{bucket.url}/*.parquet'),
    }
    for expected, source in sources.items():
        training, held_out = documents_of_both_parts(source, tmp_path / 'cache')
        assert sorted(training + held_out) == list(expected)
    assert next(iter(sources[b'plain', b'zstd'].listing().documents)).name == (
        f'{bucket.url}/texts/a.txt'
    )


@needs_s3
def test_an_index_is_built_again_if_an_object_changes(bucket, tmp_path):
    source = TextFiles(pattern='*.txt', root=bucket.url, holdout_percent=0)
    contents = []
    for text in (b'one', b'one', b'two', b'three'):
        bucket.write({'a.txt': text})
        index = index_of(source, tmp_path / 'cache')
        contents.append((str(index.directory), bytes(index.training.tokens[1:-1].astype(np.uint8))))
    assert [text for _, text in contents] == [b'one', b'one', b'two', b'three']
    assert len(set(contents)) == 3, 'the same content has the same index'


@needs_s3
def test_bad_objects_are_refused_in_one_line(bucket):
    bucket.write({'cut.gz': gzip.compress(b'text' * 999)[:-9], 'a.array_record': b'x'})
    refused = {
        'no file matches': TextFiles(pattern=f'{bucket.url}/*.txt'),
        'is not a directory': TextFiles(pattern='*.txt', root=f'{bucket.url}-absent'),
        'cut.gz is not a complete gzip': TextFiles(pattern='*.gz', root=bucket.url),
        'copy it to a local': ArrayRecords(pattern='*.array_record', root=bucket.url),
        'rows.parquet cannot be read as Parquet': ParquetFiles(pattern=f'{bucket.url}/r*'),
    }
    bucket.write({'rows.parquet': b'not Parquet'})
    for expected, source in refused.items():
        with pytest.raises(ConfigError) as caught:
            list(source.listing().documents)
        assert expected in str(caught.value) and bucket.url in str(caught.value)
        assert '\n' not in str(caught.value)


@needs_s3
def test_a_tokenizer_is_read(bucket):
    vocabulary = {'a': 0, 'b': 1, '</s>': 2}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token='a'))
    model.add_special_tokens(['</s>'])
    bucket.write({'tokenizer.json': model.to_str().encode()})
    tokenizer = HuggingFaceTokenizer(path=f'{bucket.url}/tokenizer.json')
    assert (tokenizer.num_tokens, tokenizer.separator) == (3, 2)
    assert [t.tolist() for t in tokenizer.encode(['document'], [b'b'])] == [[1]]
    with pytest.raises(ConfigError, match=r'absent\.json cannot be read'):
        HuggingFaceTokenizer(path=f'{bucket.url}/absent.json').num_tokens  # noqa: B018


# Runs.


@needs_s3
def test_a_plan_is_written_and_read(bucket):
    partitioner = PjitPartitioner(
        num_partitions=2, logical_axis_rules=[('embed', 'data'), ('mlp', 'model')]
    )

    def init(key):
        return {'kernel': nn.Partitioned(jax.random.normal(key, (8, 16)), ('embed', 'mlp'))}

    plan = partitioner.plan(init, jax.random.key(0))
    plan.save(f'{bucket.url}/run/plan.json')
    assert json.loads(bucket.read('run/plan.json'))['rows'][0]['path'] == 'kernel'
    assert Plan.load(f'{bucket.url}/run/plan.json') == plan
    assert Plan.load(epath.Path(bucket.url) / 'run' / 'plan.json') == plan


@needs_s3
def test_metrics_are_written_and_continued(bucket, monkeypatch):
    directory = as_path('MODEL_DIR', f'{bucket.url}/run')
    kinds = (writers.JsonWriter, writers.TensorBoardWriter)
    opened = writers.open_writers(kinds, directory, 0)
    for step in (1, 2, 3):
        opened.write(step, {'loss': float(step)})
    assert bucket.list('run/metrics') == [], 'an object is written seldom, because it is rewritten'
    opened.close()
    monkeypatch.setattr(appended_file, 'SECONDS_BETWEEN_UPLOADS', 0.0)
    resumed = writers.open_writers(kinds, directory, 2)
    assert resumed.num_dropped == 1
    resumed.write(3, {'loss': 30.0})
    lines = [json.loads(line) for line in bucket.read('run/metrics.jsonl').splitlines()]
    assert lines == [{'step': s, 'loss': v} for s, v in ((1, 1.0), (2, 2.0), (3, 30.0))]
    resumed.close()
    assert all(b'loss' in bucket.read(key) for key in bucket.list('run/tensorboard/'))
    assert str(resumed.paths['TensorBoardWriter']) == f'{bucket.url}/run/tensorboard'


@needs_s3
def test_the_record_of_the_data_is_written_and_compared(bucket):
    directory = as_path('MODEL_DIR', f'{bucket.url}/run')
    about = {'tokenizer': 'bytes', 'parts': [], 'settings': {'batch_size': 8}}
    assert record.check_same_as_before(directory, about, 1) == []
    record.write_record(directory, about)
    assert bucket.list() == [f'run/{record.FILE}']
    changed = about | {'settings': {'batch_size': 16}}
    assert 'from 8 to 16' in record.check_same_as_before(directory, changed, 1)[0]
    with pytest.raises(ConfigError, match='data has changed'):
        record.check_same_as_before(directory, about | {'tokenizer': 'other'}, 1)


def sharded_state(axis_sizes, spec):
    """A state of 64 by 32 numbers, of which each device holds a different part."""
    mesh = jax.make_mesh(axis_sizes, ('data', 'model'))
    kernel = np.arange(64 * 32, dtype=np.float32).reshape(64, 32)
    tx = optax.adam(1e-3)
    state = TrainState.create({'kernel': kernel}, tx)

    def put(x):
        whole = PartitionSpec(*spec) if np.ndim(x) == 2 else PartitionSpec()
        return jax.device_put(x, NamedSharding(mesh, whole))

    return jax.tree.map(put, state)


@needs_s3
def test_a_checkpoint_is_restored_on_another_mesh(bucket):
    directory = as_path('MODEL_DIR', f'{bucket.url}/run') / 'checkpoints'
    state = sharded_state((4, 2), ('data', 'model'))
    saved = Checkpoints(directory, CheckpointConfig(keep=1))
    assert saved.latest_step() is None
    for step in (1, 2):
        saved.save(step, state)
    saved.close()
    assert 'run/checkpoints/2/state/params.kernel/3.1' in bucket.list(), 'arrays are in the bucket'
    assert complete_steps(directory) == [2]

    other = sharded_state((2, 4), ('model', None))
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), other
    )
    for path, mode in ((f'{bucket.url}/run', 'latest'), (f'{directory}/2', 'specific')):
        config = RestoreConfig(path=path, mode=mode)
        folder, step = find_checkpoint(config)
        assert (str(folder), step) == (str(directory), 2)
    opened = open_restored(config, folder)
    restored = opened.restore(2, abstract)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    assert restored.params['kernel'].sharding == other.params['kernel'].sharding
    variables = opened.restore(2, abstract, variables_only=True)
    np.testing.assert_array_equal(variables.params['kernel'], state.params['kernel'])
    opened.close()


@needs_s3
def test_a_checkpoint_that_was_interrupted_is_saved_again(bucket):
    directory = as_path('MODEL_DIR', f'{bucket.url}/run') / 'checkpoints'
    state = sharded_state((4, 2), ('data', 'model'))
    for _ in range(2):
        saved = Checkpoints(directory, CheckpointConfig())
        saved.save(1, state)
        saved.close()
        assert complete_steps(directory) == [1]
        bucket.delete('run/checkpoints/1/commit_success.txt')
        assert complete_steps(directory) == []
    with pytest.raises(ConfigError, match=r'complete steps in .*: none'):
        find_checkpoint(RestoreConfig(path=f'{bucket.url}/run'))


class Table(Objective):
    """Learns one number per byte of text, laid out over the mesh."""

    def init(self, key, batch):
        return {'params': {'table': nn.Partitioned(jax.random.normal(key, (264,)), ('vocab',))}}

    def loss(self, params, batch, rng, variables):
        return Loss(jnp.sum((params['table'][batch['decoder_target_tokens']] - 1.0) ** 2))


def settings(bucket_url, **changes):
    """A small run on the texts of a bucket."""
    rules = [('vocab', 'model'), ('batch', 'data')]
    given = {
        'model_dir': f'{bucket_url}/run',
        'objective': Table(),
        'partitioner': PjitPartitioner(2, logical_axis_rules=rules),
        'optimizer': optax.adam(1e-2),
        'task': CausalLM(source=TextFiles(pattern='*.txt', root=f'{bucket_url}/texts')),
        'total_steps': 4,
        'batch_size': 8,
        'sequence_length': 16,
        'evaluators': {},
        'log_every': 1,
    }
    return TrainConfig(**(given | changes))


@pytest.mark.long
@needs_s3
def test_a_run_resumes_on_another_mesh(bucket, tmp_path):
    bucket.write({f'texts/{i}.txt': b'text %d' % i * 20 for i in range(20)})
    train(settings(bucket.url, total_steps=3))
    other = PjitPartitioner(4, logical_axis_rules=[('vocab', 'model'), ('batch', 'data')])
    resumed = train(settings(bucket.url, partitioner=other))
    at_once = train(settings(bucket.url, model_dir=str(tmp_path / 'run')))
    np.testing.assert_allclose(resumed.params['table'], at_once.params['table'], rtol=1e-6)
    lines = [json.loads(line) for line in bucket.read('run/metrics.jsonl').splitlines()]
    assert [line['step'] for line in lines] == [1, 2, 3, 4]
    files = {'plan.json', 'data.json', 'model-info.txt', 'checkpoints/4/commit_success.txt'}
    assert {f'run/{name}' for name in files} <= set(bucket.list('run/'))


@pytest.mark.long
@needs_s3
def test_a_store_that_fails_ends_the_run_with_code_75(bucket, monkeypatch):
    """It fails when the step after the first checkpoint is to be saved, and lists nothing then."""
    bucket.write({f'texts/{i}.txt': b'text %d' % i * 20 for i in range(20)})

    def failing(listing):
        def list_or_fail(*args):
            if any('checkpoints/2/manifest.json' in key for key in bucket.list('run/')):
                raise PermissionError('Forbidden')
            return listing(*args)

        return list_or_fail

    for name in ('newest_saved', 'complete_steps'):
        monkeypatch.setattr(folder, name, failing(getattr(folder, name)))
    with pytest.raises(ConfigError) as caught:
        train(settings(bucket.url, checkpoints=CheckpointConfig(period=2, when_busy='wait')))
    assert caught.value.exit_code == 75
    assert re.fullmatch(
        r'.*/checkpoints.* \(Forbidden\).*, so the run ends .* step.*; the same command resumes '
        r'from the newest checkpoint: make sure that the store works, or set .*',
        str(caught.value),
    )


@needs_s3
def test_a_trace_needs_a_local_folder():
    with pytest.raises(
        ConfigError, match=r'profile_steps is \(1, 2\).*s3://bucket/run: use a local'
    ):
        settings('s3://bucket', profile_steps=(1, 2))
