"""Starts runs of several processes of which one has a fault, and says how they end."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from faulty_process import Settings
from processes import reserved_port

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclasses.dataclass(frozen=True)
class Ending:
    """How the processes of a run have ended.

    Attributes:
      seconds: from the fault to the end of the last process, or None if there was no fault.
      codes: the exit code of each process; None if it had to be killed, as a stopped one has.
      texts: what each process has printed.
    """

    seconds: float | None
    codes: list[int | None]
    texts: list[str]

    def survivors(self, victim):
        """What the processes without the fault have printed."""
        return [text for index, text in enumerate(self.texts) if index != victim]


def run(folder, count, victim=None, *, limit=300.0, missing=(), **settings):
    """Runs several processes until they end.

    Args:
      folder: MODEL_DIR.
      count: their number.
      victim: the process with the fault.
      limit: the seconds after which all are killed.
      missing: the processes that are never started.
      **settings: the settings of all of them; 'fault', 'moment' and 'delay' are of the victim.
    """
    of_victim = {k: settings.pop(k) for k in ('fault', 'moment', 'delay') if k in settings}
    for old in Path(folder).parent.glob(f'{Path(folder).name}.*'):
        old.unlink() if old.is_file() else None
    modules = (ROOT, HERE, HERE.parent / 'train')
    environment = os.environ | {'PYTHONPATH': os.pathsep.join(map(str, modules))}
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port())
        processes, files = {}, {}
        for index in range(count):
            if index in missing:
                continue
            own = Settings(
                port=port,
                count=count,
                index=index,
                folder=str(folder),
                **settings,
                **(of_victim if index == victim else {}),
            )
            files[index] = stack.enter_context(open(f'{folder}.out-{index}', 'w+'))
            processes[index] = subprocess.Popen(
                [sys.executable, HERE / 'faulty_process.py', json.dumps(dataclasses.asdict(own))],
                env=environment,
                stdout=files[index],
                stderr=subprocess.STDOUT,
            )
        ended = _wait(processes, victim if of_victim.get('fault') == 'SIGSTOP' else None, limit)
        codes = [processes[i].returncode if i in ended else None for i in range(count)]
        texts = []
        for index in range(count):
            texts.append(Path(f'{folder}.out-{index}').read_text() if index in files else '')
    moment = _moment_of_fault(folder, count, victim)
    seconds = None if moment is None else max(ended.values(), default=time.time()) - moment
    return Ending(seconds, codes, texts)


def _wait(processes, stopped, limit):
    """The time at which each process has ended. A stopped one is killed at the end."""
    deadline, ended = time.time() + limit, {}
    while time.time() < deadline and len(ended) < len(processes) - (stopped is not None):
        for index, process in processes.items():
            if index not in ended and index != stopped and process.poll() is not None:
                ended[index] = time.time()
        time.sleep(0.02)
    for index, process in processes.items():
        if index not in ended:
            process.send_signal(signal.SIGKILL)
        process.wait()
    return ended


def _moment_of_fault(folder, count, victim):
    """The time that the victim has noted just before its fault, or None if there is no fault.

    A difference between processes, or the lack of one, begins when the last one wants to join, or
    to train.
    """
    if victim is None:
        return None
    paths = [Path(f'{folder}.events-{index}') for index in range(count)]
    events = [
        [line.split(' ', 1) for line in path.read_text().splitlines()] if path.exists() else []
        for path in paths
    ]
    known = ('joining', 'ready', 'done')
    own = [float(when) for when, what in events[victim] if what not in known]
    begun = [float(when) for of in events for when, what in of if what in ('joining', 'ready')]
    return own[0] if own else max(begun, default=None)
