"""Lets Orbax keep the arrays of checkpoints in S3.

Orbax describes the place of arrays to TensorStore in one function, which knows local folders and
`gs://` only, and has no setting for others (https://github.com/google/orbax/issues/359 and 872).
TensorStore has a driver for S3. Here, a path in S3 is described as if it were in `gs://`, and the
driver of the description is replaced.
"""

from __future__ import annotations

import functools
import os
from typing import Any

from train.errors import ConfigError


@functools.cache
def support_s3() -> None:
    """Extends Orbax in this process, once.

    Raises a ConfigError if Orbax no longer has this function.
    """
    try:
        from orbax.checkpoint._src.serialization import tensorstore_utils

        describe = tensorstore_utils.build_kvstore_tspec
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            'the installed orbax-checkpoint cannot save arrays to s3://: use version 0.12, or keep '
            'checkpoints in a local or mounted folder or in gs://'
        ) from error

    @functools.wraps(describe)
    def describe_all(directory: str, *args: Any, **kwargs: Any) -> Any:
        scheme, _, place = directory.partition(':')
        if scheme != 's3':
            return describe(directory, *args, **kwargs)
        return in_s3(describe('gs://' + place.lstrip('/'), *args, **kwargs))

    tensorstore_utils.build_kvstore_tspec = describe_all


def in_s3(description: Any) -> Any:
    """A description for TensorStore in which each part in `gs://` is in S3 instead."""
    if isinstance(description, str) and description.startswith('gs://'):
        bucket, _, path = description.removeprefix('gs://').partition('/')
        description = {'driver': 'gcs', 'bucket': bucket, 'path': path}
    if not isinstance(description, dict):
        return description
    description = {key: in_s3(value) for key, value in description.items()}
    if not str(description.get('driver')).startswith('gcs'):
        return description
    # Settings of the environment that boto3 and s3fs obey and TensorStore does not.
    given = os.environ
    if endpoint := given.get('AWS_ENDPOINT_URL_S3') or given.get('AWS_ENDPOINT_URL'):
        region = given.get('AWS_REGION') or given.get('AWS_DEFAULT_REGION') or 'us-east-1'
        description |= {'endpoint': endpoint, 'aws_region': region}
    if 'AWS_ACCESS_KEY_ID' in given:  # Otherwise it also looks for files, and logs if they miss.
        description['aws_credentials'] = {'type': 'environment'}
    return {**description, 'driver': 's3'}
