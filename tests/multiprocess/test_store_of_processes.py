"""Two processes whose run is in a store."""

import json

import faulty_runs
import pytest
from s3_server import Bucket, needs_s3, s3_server

pytestmark = needs_s3


@pytest.fixture(scope='module')
def bucket():
    with s3_server() as environment:
        import boto3

        bucket = Bucket(boto3.client('s3'), 'processes')
        bucket.environment = environment
        yield bucket


@pytest.mark.long
def test_a_run_of_several_processes_in_a_store_resumes(tmp_path, bucket):
    """They begin in a folder that does not exist. In a store, it only exists with an object."""
    settings = {'store': f'{bucket.url}/run', 'environment': bucket.environment, 'steps': 4}
    stopped = faulty_runs.run(tmp_path / 'run', 2, 1, fault='SIGTERM', moment='step 2', **settings)
    assert stopped.codes == [75, 75], stopped.texts
    resumed = faulty_runs.run(tmp_path / 'run', 2, **settings)
    assert resumed.codes == [0, 0], resumed.texts
    assert 'run/checkpoints/4/commit_success.txt' in bucket.list('run/checkpoints/4/')
    lines = [json.loads(line) for line in bucket.read('run/metrics.jsonl').splitlines()]
    assert [line['step'] for line in lines if 'train/loss' in line] == [1, 2, 3, 4]
    assert bucket.list('run/.seen') == []
