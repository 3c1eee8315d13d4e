"""A local server that speaks the protocol of S3, and its buckets."""

import contextlib
import functools
import importlib.util
import logging

import pytest

PACKAGES = ('moto', 'flask_cors', 's3fs', 'boto3')
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
needs_s3 = pytest.mark.skipif(bool(MISSING), reason=f'not installed: {", ".join(MISSING)}')


class Bucket:
    """A new bucket, read and written by boto3."""

    def __init__(self, client, name):
        client.create_bucket(Bucket=name)
        self.client, self.name, self.url = client, name, f's3://{name}'

    def write(self, objects):
        for key, content in objects.items():
            self.client.put_object(Bucket=self.name, Key=key, Body=content)

    def read(self, key):
        return self.client.get_object(Bucket=self.name, Key=key)['Body'].read()

    def list(self, prefix=''):
        listed = self.client.list_objects_v2(Bucket=self.name, Prefix=prefix)
        return [found['Key'] for found in listed.get('Contents', [])]

    def delete(self, key):
        self.client.delete_object(Bucket=self.name, Key=key)


@functools.cache
def _start():
    """Starts the server of this process. File systems of s3fs remember its address."""
    from moto.server import ThreadedMotoServer

    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address='127.0.0.1', port=0, verbose=False)
    server.start()
    return server


@contextlib.contextmanager
def s3_server():
    """Starts a server, and yields the variables of the environment that lead to it."""
    host, port = _start().get_host_and_port()
    variables = {
        'AWS_ENDPOINT_URL': f'http://{host}:{port}',
        'AWS_ACCESS_KEY_ID': 'name',
        'AWS_SECRET_ACCESS_KEY': 'secret',
        'AWS_DEFAULT_REGION': 'us-east-1',
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield variables
