"""Starts runs of several processes of which one has a fault, and says how they end."""

import dataclasses
import json
import threading
import time
from pathlib import Path

import faulty_process
from processes import context, reserved_port, start_server
from small import records

# What happens to a process, and when: the beginnings of what it does then.
ACTIONS = ('SIGKILL', 'SIGSTOP', 'SIGTERM', 'SIGINT', 'SIGHUP', 'exception')
MOMENTS = ('the start of the process', 'waiting for the compiler', 'step', 'the save', 'the eval')


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

    def survivors(self, *victims):
        """What the processes without a fault have printed."""
        return [text for index, text in enumerate(self.texts) if index not in victims]


def draw_fault(rng):
    """Draws a fault and its moment, as settings of a process."""
    return {
        'fault': rng.choice(ACTIONS),
        'moment': rng.choice(MOMENTS),
        'delay': rng.uniform(0, 0.3),
    }


def results(folder, step):
    """The state that a run has saved at a step, as checksums, and the records of its metrics."""
    manifest = json.loads((folder / f'checkpoints/{step}/manifest.json').read_text())
    arrays = {n: f for n, f in manifest['files'].items() if n.startswith('state/')}
    del arrays['state/commit_success.txt']  # It contains the time.
    kept = [r for r in records(folder) if 'train/loss' in r or 'eval/loss' in r]
    return arrays, kept


def run(
    folder,
    count,
    victim=None,
    *,
    network=None,
    from_outside=None,
    stopped=(),
    limit=300.0,
    missing=(),
    **settings,
):
    """Runs several processes until they end.

    Args:
      folder: MODEL_DIR.
      count: their number.
      victim: the process with the fault.
      network: hosts, one for each process; without them, all are on this machine.
      from_outside: called with the processes when the victim begins its fault.
      stopped: the processes that `from_outside` stops: they are killed at the end.
      limit: the seconds after which all are killed.
      missing: the processes that are never started.
      **settings: the settings of all of them; 'fault', 'moment' and 'delay' are of the victim.
    """
    of_victim = {k: settings.pop(k) for k in ('fault', 'moment', 'delay') if k in settings}
    for old in Path(folder).parent.glob(f'{Path(folder).name}.*'):
        if old.is_file():
            old.unlink()
    outputs = [Path(f'{folder}.out-{index}') for index in range(count)]
    processes = {}
    start_server()
    with reserved_port() as port:
        for index in set(range(count)) - set(missing):
            own = faulty_process.Settings(
                port=port,
                count=count,
                index=index,
                folder=str(folder),
                **({} if network is None else _place(network, index)),
                **settings,
                **(of_victim if index == victim else {}),
            )
            arguments = (own, str(outputs[index]))
            processes[index] = context.Process(target=faulty_process.main, args=arguments)
            processes[index].start()
        if from_outside is not None:
            events = Path(f'{folder}.events-{victim}')
            arguments = (events, processes, from_outside)
            threading.Thread(target=_act_at_fault, args=arguments, daemon=True).start()
        stopped = {*stopped, *([victim] if of_victim.get('fault') == 'SIGSTOP' else [])}
        ended = _wait(processes, stopped, limit)
    codes = [processes[i].exitcode if i in ended else None for i in range(count)]
    texts = [path.read_text() if path.exists() else '' for path in outputs]
    moment = _moment_of_fault(folder, count, victim)
    seconds = None if moment is None else max(ended.values(), default=time.time()) - moment
    return Ending(seconds, codes, texts)


def _place(network, index):
    """The settings of a process on a host of its own."""
    return {'host': network.hosts[index], 'coordinator': network.hosts[0].address}


def _act_at_fault(events, processes, action):
    """Calls an action with the processes when one of them has noted its fault."""
    while any(process.is_alive() for process in processes.values()):
        if events.exists() and ' of process ' in events.read_text():
            action(processes)
            events.with_name(f'{events.name}-happened').touch()
            return
        time.sleep(0.01)


def _wait(processes, stopped, limit):
    """The time at which each process has ended. Stopped ones are killed at the end."""
    deadline, ended = time.time() + limit, {}
    while time.time() < deadline and len(ended) < len(processes.keys() - stopped):
        for index, process in processes.items():
            if index not in ended and index not in stopped and not process.is_alive():
                ended[index] = time.time()
        time.sleep(0.02)
    for process in processes.values():
        process.kill()
        process.join()
    return ended


def _moment_of_fault(folder, count, victim):
    """The time at which a fault happens, or None if there is none.

    A process with a fault notes the time just before. Where processes only differ, or one is
    missing, the time is when the last process wants to join the others or to train.
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
