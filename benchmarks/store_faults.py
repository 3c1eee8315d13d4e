"""Stores that fail, are slow, show old listings, or lie, under real runs.

  python benchmarks/store_faults.py [--cases down,lost] [--folder DIR]

Each case is a run of `python -m train` whose MODEL_DIR is in a store: a server of this process that
speaks the protocol of S3, and that misbehaves from the first complete checkpoint on. The run is
then resumed in the store as it should be. The table has the exit codes of both, and whether the
resumed run ends with the state of a run without a fault, bit by bit.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.campaigns import parse_names
from benchmarks.disk_faults import TROUBLE, Run, prepare

BUCKET, STEPS = 'faults', 60
SETTINGS = (f'TRAIN_STEPS = {STEPS}', 'TrainConfig.writers = [@JsonWriter]')
Environ = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the store says instead: a status, and a body."""

    status: str
    body: bytes = b''


def unavailable(share: float, seconds: float) -> Fault:
    """Some requests fail for some seconds, as in an outage."""

    def answer(store: Store, request: Environ) -> Answer | None:
        fails = store.seconds() < seconds and store.random.random() < share
        return Answer('503 Service Unavailable') if fails else None

    return answer


def forbidden(store: Store, request: Environ) -> Answer | None:
    """The credentials have expired."""
    return Answer('403 Forbidden')


def slow(store: Store, request: Environ) -> Answer | None:
    """Each request takes half a second."""
    time.sleep(0.5)
    return None


def lost(share: float) -> Fault:
    """The store says that it has written an object, and has not."""

    def answer(store: Store, request: Environ) -> Answer | None:
        if not is_write(request) or store.random.random() >= share:
            return None
        size = int(request.get('CONTENT_LENGTH') or 0)
        request['wsgi.input'].read(size)
        return Answer('200 OK')

    return answer


def old_listings(store: Store, request: Environ) -> Answer | None:
    """Listings are as they were up to 20 s ago."""
    query = request.get('QUERY_STRING', '')
    if request['REQUEST_METHOD'] != 'GET' or 'prefix=' not in query:
        return None
    key = f'{request["PATH_INFO"]}?{query}'
    then, body = store.listings.get(key, (-100.0, b''))
    if store.seconds() - then > 20.0:
        then, body = store.seconds(), store.ask(request)
        store.listings[key] = then, body
    return Answer('200 OK', body)


def changed(change: Callable[[bytes], bytes]) -> Fault:
    """Objects of checkpoints come back changed."""

    def answer(store: Store, request: Environ) -> Answer | None:
        path, query = request['PATH_INFO'], request.get('QUERY_STRING', '')
        if request['REQUEST_METHOD'] != 'GET' or '/checkpoints/' not in path or query:
            return None
        if 'HTTP_RANGE' in request or store.random.random() < 0.5:
            return None
        return Answer('200 OK', change(store.ask(request)))

    return answer


def flip(content: bytes) -> bytes:
    """Another byte in the middle."""
    middle = len(content) // 2
    changed_byte = bytes(byte ^ 1 for byte in content[middle : middle + 1])
    return content[:middle] + changed_byte + content[middle + 1 :]


Fault = Callable[['Store', Environ], Answer | None]
CASES: dict[str, tuple[str, Fault]] = {
    'flaky': ('5% of all requests fail', unavailable(0.05, 1e9)),
    'outage': ('all requests fail for 15 s', unavailable(1.0, 15.0)),
    'down': ('all requests fail', unavailable(1.0, 1e9)),
    'forbidden': ('all requests are forbidden', forbidden),
    'slow': ('each request takes half a second', slow),
    'lost': ('10% of the writes are lost without an error', lost(0.1)),
    'all lost': ('all writes are lost without an error', lost(1.0)),
    'old listings': ('listings are up to 20 s old', old_listings),
    'flipped': ('half of what is read of checkpoints has another byte', changed(flip)),
    'cut': ('half of what is read of checkpoints ends early', changed(lambda c: c[: len(c) // 2])),
}


class Store:
    """A server of S3, with a fault that begins when the first checkpoint is complete."""

    def __init__(self) -> None:
        from moto.server import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import make_server

        self._application = DomainDispatcherApplication(create_backend_app)
        self._server = make_server('127.0.0.1', 0, self._answer, threaded=True)
        self.random, self.listings = random.Random(0), dict[str, tuple[float, bytes]]()
        self._fault: Fault | None = None
        self._since: float | None = None
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.environment = {
            'AWS_ENDPOINT_URL': f'http://127.0.0.1:{self._server.port}',
            'AWS_ACCESS_KEY_ID': 'name',
            'AWS_SECRET_ACCESS_KEY': 'secret',
            'AWS_DEFAULT_REGION': 'us-east-1',
        }

    def prepare(self, fault: Fault | None) -> None:
        """Misbehaves from the next complete checkpoint on; None ends it."""
        self._fault, self._since = fault, None
        self.listings.clear()

    def seconds(self) -> float:
        """The seconds since the fault began."""
        return time.monotonic() - self._since if self._since else 0.0

    def ask(self, request: Environ) -> bytes:
        """What the store would answer."""
        return b''.join(self._application(dict(request), lambda *status: None))

    def _answer(self, request: Environ, start_response: Any) -> Iterable[bytes]:
        answer = self._fault(self, request) if self._fault and self._since else None
        if answer is None:
            found: Iterable[bytes] = self._application(request, start_response)
            if request['PATH_INFO'].endswith('/manifest.json') and is_write(request):
                self._since = self._since or time.monotonic()
            return found
        length = str(len(answer.body))
        start_response(answer.status, [('Content-Length', length), ('ETag', '"0"')])
        return [answer.body]


def is_write(request: Environ) -> bool:
    """Whether a request writes an object."""
    return request['REQUEST_METHOD'] == 'PUT'


def run_case(name: str, store: Store, folder: Path) -> dict[str, Any]:
    """Runs a case, and returns its row."""
    where = name.replace(' ', '-')

    def run() -> tuple[int | None, float, list[str]]:
        one = Run(folder, folder, (f"MODEL_DIR = 's3://{BUCKET}/{where}'", *SETTINGS))
        code = one.wait()
        return code, store.seconds(), [text for _, text in one.lines if TROUBLE.search(text)]

    store.prepare(CASES[name][1] if name in CASES else None)
    code, seconds, says = run()
    if name in ('flipped', 'cut'):  # Their fault is about reading.
        says += run()[2]
    store.prepare(None)
    again, _, then = run()
    state = read_state(where)
    return {'codes': [code, again], 'seconds': seconds, 'says': says[:3] + then[:3], 'state': state}


def read_state(name: str) -> dict[str, Any]:
    """The checksums of the arrays of the last step."""
    import boto3

    bucket = boto3.client('s3')
    key = f'{name}/checkpoints/{STEPS}/manifest.json'
    try:
        manifest = json.loads(bucket.get_object(Bucket=BUCKET, Key=key)['Body'].read())
    except bucket.exceptions.NoSuchKey:
        return {}
    files = {n: f for n, f in manifest['files'].items() if n.startswith('state/')}
    files.pop('state/commit_success.txt', None)  # It contains the time.
    return files


def main() -> None:
    """Runs the cases, and prints a row of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--cases', help='separated by commas (all)')
    parser.add_argument('--folder', type=Path, help='where the runs are')
    options = parser.parse_args()
    logging.getLogger('werkzeug').setLevel(logging.ERROR)
    names, store = parse_names(options.cases, CASES, 'case'), Store()
    os.environ.update(store.environment)
    import boto3

    boto3.client('s3').create_bucket(Bucket=BUCKET)
    print(f'{"case":<16}{"what the store does":<58}{"codes":<12}{"seconds":>8}  right', flush=True)
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        folder = Path(temporary)
        prepare(folder)
        expected = run_case('undisturbed', store, folder)
        assert expected['state'], expected
        for name in names:
            found = run_case(name, store, folder)
            right = {True: 'yes', False: 'NO'}[found['state'] == expected['state']]
            codes = ', '.join('hangs' if code is None else str(code) for code in found['codes'])
            print(f'{name:<16}{CASES[name][0]:<58}{codes:<12}{found["seconds"]:>8.1f}  {right}')
            for text in found['says']:
                print(f'    {text[:300]}', flush=True)


if __name__ == '__main__':
    main()
