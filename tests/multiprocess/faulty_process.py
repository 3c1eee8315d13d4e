"""One of several processes of a small run, in which one of them has a fault.

The fault happens at a moment: when the process begins something whose title, as its watchdog knows
it, begins with a text. The program ends like `meshwright train`, with its exit codes.
"""

import argparse
import atexit
import contextlib
import ctypes
import dataclasses
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import hosts
import jax
import optax
from small import partitioner, small_config

from train import train
from train.checkpoints import CheckpointConfig, folder as saving
from train.cli.command import run_command
from train.cli.interruption import run_until_signal
from train.data import CausalLM, Prefetch, Records
from train.data.feed import LocalBatches
from train.machine import devices as machine
from train.processes import channel, output, signals
from train.processes.activity import Activity, current_activity
from train.processes.environment import ProcessAddress
from train.processes.joining import join_processes
from train.processes.wire import Limits

COMMAND = 'meshwright train mine'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """What a process is told.

    Attributes:
      port, count, index: its place among the processes.
      devices: the number of its devices.
      host: the host that it is on, if not this machine.
      coordinator: the address of process 0.
      folder: MODEL_DIR if it is on this machine, and the beginning of the names of other files.
      store: MODEL_DIR if it is in a store.
      environment: more variables of the environment.
      fault: what happens in this process, or ''.
      moment: when it happens: the beginning of what the process does then.
      delay: how many seconds later it happens.
      steps: the number of steps.
      rows: the size of a batch.
      mesh: the size of the model axis.
      heartbeat, init, watchdog: the limits in seconds.
      local: the folder of local checkpoints, which are then saved at every step, and no others
        before the end.
      step_seconds: how long a step takes at least, so that something can happen in it.
      only_meets: whether the process only meets the others in each step, and computes nothing.
    """

    port: int
    count: int
    index: int
    folder: str
    store: str = ''
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 2
    host: hosts.Host | None = None
    coordinator: str = '127.0.0.1'
    fault: str = ''
    moment: str = ''
    delay: float = 0.0
    steps: int = 8
    rows: int = 8
    mesh: int = 2
    heartbeat: float = 10.0
    init: float = 60.0
    watchdog: float = 60.0  # nothing here waits for it, so it can be long
    local: str = ''
    step_seconds: float = 0.05
    only_meets: bool = False


class Fault(Exception):
    """Raised in the main thread by a fault."""


def raise_in_main_thread():
    main = ctypes.c_ulong(threading.main_thread().ident)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(main, ctypes.py_object(Fault))


def move_clock(seconds):
    true_time = time.time
    time.time = lambda: true_time() + seconds


def hang():
    while True:
        time.sleep(0.05)


# What happens at a moment. The other faults are in `command`.
FAULTS = {
    'SIGKILL': lambda: os.kill(os.getpid(), signal.SIGKILL),
    'SIGSTOP': lambda: os.kill(os.getpid(), signal.SIGSTOP),
    'SIGTERM': lambda: os.kill(os.getpid(), signal.SIGTERM),
    'SIGINT': lambda: os.kill(os.getpid(), signal.SIGINT),
    'SIGHUP': lambda: os.kill(os.getpid(), signal.SIGHUP),
    'exception': raise_in_main_thread,
    'clock ahead': lambda: move_clock(3600.0),
    'clock behind': lambda: move_clock(-3600.0),
    'from outside': lambda: None,  # What happens then, happens to its host.
}


SIGNALS = ('SIGTERM', 'SIGINT', 'SIGHUP')


def note(folder, index, text):
    """Appends a line with the time, for the program that has started this process."""
    with open(f'{folder}.events-{index}', 'a') as file:
        file.write(f'{time.time()} {text}\n')


def await_ready(folder, indices):
    """Waits until processes have joined the others and begin to train."""
    paths = [Path(f'{folder}.events-{index}') for index in indices]
    while not all(path.exists() and ' ready' in path.read_text() for path in paths):
        time.sleep(0.02)


def fail_at_moment(settings):
    """Lets the fault happen when the process begins something that is called like its moment."""
    moment = settings.moment

    def in_a_thread():
        time.sleep(settings.delay)
        begin_fault(settings)

    def begins(title):
        if not title.startswith(moment) or began.is_set():
            return
        began.set()
        if settings.delay or title == first:
            threading.Thread(target=in_a_thread, daemon=True).start()
            return
        begin_fault(settings)
        while settings.fault == 'from outside' and not happened.exists():
            time.sleep(0.002)  # The run must not be over before it happens.
        while settings.fault in SIGNALS and not channel.connected_member()._paused:
            time.sleep(0.002)  # The run must not be over before the others hear of the signal.

    began, first = threading.Event(), current_activity().title
    happened = Path(f'{settings.folder}.events-{settings.index}-happened')
    doing, begin_step = Activity.doing, Activity.begin_step

    def doing_with_fault(self, title):
        begins(title)
        return doing(self, title)

    def begin_step_with_fault(self, step):
        begin_step(self, step)
        begins(self.title)

    Activity.doing, Activity.begin_step = doing_with_fault, begin_step_with_fault
    begins(first)


def begin_fault(settings):
    note(settings.folder, settings.index, f'{settings.fault} of process {settings.index}')
    FAULTS[settings.fault]()


def config(settings):
    """The run, with the differences that the fault makes in this process."""
    fault, steps = settings.fault, settings.steps
    texts = [f'text {i} counts: {" ".join(map(str, range(i, 60)))}' for i in range(30)]
    texts += ['only here'] if fault == 'other data' else []

    def at_step(state, step, metrics):
        time.sleep(settings.step_seconds)
        if step == 3 and fault == 'stuck in Python':
            note(settings.folder, settings.index, fault)
            hang()

    model_axis = 1 if fault == 'other mesh' else settings.mesh
    folder = f'{settings.folder}-of-{settings.index}' if fault == 'other folder' else None
    return small_config(
        settings.store or folder or settings.folder,
        Path(),
        partitioner=partitioner(settings.count * settings.devices // model_axis, model_axis),
        task=CausalLM(source=Records(records=texts, holdout_percent=20.0)),
        batch_size=settings.rows,
        total_steps=steps + 1 if fault == 'other steps' else steps,
        seed=1 if fault == 'other seed' else 0,
        hooks=[at_step],
        **({'checkpoints': local_checkpoints(settings.local)} if settings.local else {}),
        prefetch=Prefetch(workers=0),  # so that a step reads its batch itself
        **({'optimizer': sgd()} if fault == 'other optimizer' else {}),
    )


def local_checkpoints(folder):
    return CheckpointConfig(period=0, local_dir=folder, local_every=1)


def sgd():
    return optax.sgd(0.1)


def meet(settings, address, limits):
    """A run without jax: all processes only meet in each step."""
    where = (address.coordinator_address, address.process_count, address.process_index)
    one, _ = channel.open_channel(*where, limits, ())
    signals.share(one.forward, one.leave)
    activity = Activity()
    one.begin(activity, settings.folder)
    note(settings.folder, settings.index, 'ready')
    titles = {2: 'waiting for the compiler', 5: 'the save of step 5', 6: 'the eval of step 6'}
    for step in range(1, settings.steps + 1):
        activity.begin_step(step)
        with activity.doing(titles[step]) if step in titles else contextlib.nullcontext():
            one.gather('meeting', step)
            time.sleep(settings.step_seconds)
        one.tick()
    note(settings.folder, settings.index, 'done')
    one.leave()


def command(settings):
    jax.config.update('jax_platforms', 'cpu')
    machine.use_virtual_devices(settings.devices)
    fault = settings.fault
    if fault in FAULTS:
        fail_at_moment(settings)
    if fault == 'other jax':
        found = channel.packages()
        channel.packages = lambda: {**found, 'jax': '0.0.1'}
    limits = Limits(
        init_seconds=settings.init,
        heartbeat_seconds=settings.heartbeat,
        watchdog_seconds=settings.watchdog,
    )
    port = settings.port if fault != 'unreachable' else 1
    address = ProcessAddress(
        f'{settings.coordinator}:{port}', settings.count, settings.index, 'the test'
    )
    if fault == 'jax cannot connect':
        connect = jax.distributed.initialize
        others = set(range(settings.count)) - {settings.index}

        def fail(*args, **how):
            connect(*args, **how)
            await_ready(settings.folder, others)
            time.sleep(0.5)  # Then the others are where jax waits for this process.
            raise RuntimeError('no route to host')

        jax.distributed.initialize = fail
    if fault == 'killed when all are done':  # after what `join_processes` registers
        atexit.register(os.kill, os.getpid(), signal.SIGKILL)
    note(settings.folder, settings.index, 'joining')
    if settings.only_meets:
        meet(settings, address, limits)
        return 0
    join_processes(address, limits)
    if fault == 'stuck in input':
        read = LocalBatches.__getitem__

        def stuck(self, step):
            if step >= 3:
                note(settings.folder, settings.index, fault)
                hang()
            return read(self, step)

        LocalBatches.__getitem__ = stuck
    if fault in ('stuck in a save', 'full disk'):

        def complete_step(path, step):
            note(settings.folder, settings.index, fault)
            if fault == 'stuck in a save':
                hang()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

        saving.complete_step = complete_step
    note(settings.folder, settings.index, 'ready')
    train(config(settings))
    note(settings.folder, settings.index, 'done')
    return 0


def main(settings, path):
    """Runs the process like a command, whose output goes to a file.

    Args:
      settings: what the process is told.
      path: the file.
    """
    os.environ.update(settings.environment)
    if settings.host is not None:
        hosts.enter(settings.host)
    with open(path, 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signals.handle_until_exit()
    output.begin(settings.index, f'{settings.folder}.logs')
    options = argparse.Namespace(traceback=False)
    try:
        sys.exit(run_until_signal(lambda: run_command(lambda: command(settings), options), COMMAND))
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not do
