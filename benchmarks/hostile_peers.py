"""Strangers on the network while a run of two processes starts, trains and ends.

  python benchmarks/hostile_peers.py [--peers mirror,tls] [--results build/hostile_peers.json]

Each stranger is a process that connects to the port at which process 0 meets process 1, and at
which jax's service listens afterwards, from the moment at which the port opens to the end of the
run. Both processes must end with exit code 0, and with the arrays of a run without strangers.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks import strangers
from benchmarks.campaigns import TINY_RUN, run_named, start_run, write_texts

ROOT = Path(__file__).resolve().parent.parent
STEPS, MOST_SECONDS = 4, 300.0
SECONDS_ALONE = 8.0  # longer than process 0 waits for a stranger to say who it is
SECRET = 'the same secret in every run, so that what one run has sent can be replayed'


def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return int(free.getsockname()[1])


def start(folder: Path, cache: Path, run: str, index: int, address: str) -> Any:
    """Starts one of the two processes of a run."""
    command = [sys.executable, '-P', '-m', 'train.cli', 'train', 'run.gin', '--process_count=2']
    command += [f'--gin.MODEL_DIR={run}', f'--coordinator_address={address}', '--cpu_devices=1']
    with (folder / f'output-{index}').open('w') as output:
        pipes = {'stdout': output, 'stderr': subprocess.STDOUT}
        return start_run([*command, f'--process_index={index}'], folder, cache, **pipes)


def record(folder: Path, cache: Path) -> None:
    """Runs two processes through a proxy, which keeps what process 1 sends on each connection."""
    kept, port = folder / 'recorded', free_port()
    kept.mkdir()
    proxy = socket.create_server(('127.0.0.2', port))
    threading.Thread(target=serve, args=(proxy, port, kept), daemon=True).start()
    runs = [start(folder, cache, 'recorded/run', i, f'127.0.0.{1 + i}:{port}') for i in range(2)]
    assert [one.wait() for one in runs] == [0, 0], (folder / 'output-0').read_text()


def serve(proxy: socket.socket, port: int, kept: Path) -> None:
    """Connects each connection to a port."""
    for number in range(1 << 30):
        one, _ = proxy.accept()
        other = strangers.connect(port)
        if other is None:
            one.close()
            continue
        other.settimeout(None)
        sent = kept / f'sent-{number}'
        sent.touch()
        for ends in ((one, other, sent), (other, one, None)):
            threading.Thread(target=pump, args=ends, daemon=True).start()


def pump(source: socket.socket, target: socket.socket, path: Path | None) -> None:
    """Passes on what arrives, and keeps its beginning in a file."""
    try:
        while data := source.recv(1 << 16):
            if path is not None and path.stat().st_size < 1 << 16:
                with path.open('ab') as file:
                    file.write(data)
            target.sendall(data)
    except OSError:
        pass
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


def train_among(folder: Path, cache: Path, *peers: str) -> dict[str, Any]:
    """Runs two processes among strangers, who meet process 0 before process 1 does."""
    run, port = folder / 'run', free_port()
    shutil.rmtree(run, ignore_errors=True)
    began, address = time.monotonic(), f'127.0.0.1:{port}'
    first = start(folder, cache, 'run', 0, address)
    started = {name: start_stranger(name, port, first.pid, folder) for name in peers}
    while not strangers.is_open(port) and first.poll() is None:
        time.sleep(0.01)
    time.sleep(SECONDS_ALONE)
    codes: list[int | None] = []
    for one in (first, start(folder, cache, 'run', 1, address)):
        try:
            codes.append(one.wait(timeout=max(1.0, began + MOST_SECONDS - time.monotonic())))
        except subprocess.TimeoutExpired:
            one.kill()
            codes.append(None)
    seconds = time.monotonic() - began
    lines = (folder / 'output-0').read_text().splitlines()
    manifest = run / f'checkpoints/{STEPS}/manifest.json'
    files = json.loads(manifest.read_text())['files'] if manifest.exists() else {}
    return {
        'codes': codes,
        'seconds': round(seconds, 1),
        'arrays': {n: f for n, f in files.items() if n.startswith('state/') and 'commit' not in n},
        'calls': {name: calls_of(stranger) for name, stranger in started.items()},
        'turned away': [line for line in lines if 'turned away' in line],
        'end': lines[-3:],
    }


def start_stranger(name: str, port: int, pid: int, folder: Path) -> Any:
    """Starts a stranger, which disturbs a port until a process ends."""
    return subprocess.Popen(
        [sys.executable, strangers.__file__, name, str(port), str(pid)],
        cwd=folder,
        env=os.environ | {'RECORDED': str(folder / 'recorded'), 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def calls_of(stranger: Any) -> int | None:
    """How often a stranger has tried, or None if it still does."""
    try:
        return int(stranger.communicate(timeout=30)[0])
    except (subprocess.TimeoutExpired, ValueError):
        os.killpg(stranger.pid, signal.SIGKILL)
        return None


def main() -> None:
    """Measures the strangers that are missing."""
    os.environ['MESHWRIGHT_SECRET'] = SECRET
    with tempfile.TemporaryDirectory() as temporary:
        folder, cache = Path(temporary), Path(temporary) / 'cache'
        write_texts(folder, 60)
        own = f'TRAIN_STEPS = {STEPS}\nEVAL_PERIOD = {STEPS}\nCHECKPOINT_PERIOD = 2\n'
        own += "TrainConfig.compilation_cache = 'programs'\n"  # for all runs
        (folder / 'run.gin').write_text(TINY_RUN + own)
        whole: dict[str, Any] = {}

        def measure(name: str) -> Any:
            if not whole:
                record(folder, cache)
                whole.update(train_among(folder, cache))
                print(whole, flush=True)
                assert whole['codes'] == [0, 0]
            found = train_among(folder, cache, *(strangers.PEERS if name == 'all' else [name]))
            found['same'] = found.pop('arrays') == whole['arrays'] != {}
            found['seconds without'] = whole['seconds']
            print(name, json.dumps(found), flush=True)
            return found

        known = {name: str(peer.__doc__) for name, peer in strangers.PEERS.items()}
        known['all'] = 'All of them at the same time.'
        run_named(str(__doc__), 'peer', known, 'build/hostile_peers.json', measure)


if __name__ == '__main__':
    main()
