"""What the processes of a run do together: they fail, compare and decide.

With one process, none of these functions does anything but return its argument. With several, all
of them must call the same functions in the same order, in their main threads.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from etils import epath

from partitioning.untrusted_text import printable
from train.errors import USER_ERRORS, ConfigError, first_line, os_errors_as
from train.processes import signals
from train.processes.activity import Activity
from train.processes.channel import connected_member, current_member
from train.processes.disagreements import (
    differences,
    digest,
    disagreement,
    note_raised_everywhere,
    raised_everywhere,
)
from train.processes.member import SECONDS_FOR_THE_HUB
from train.processes.output import print_error
from train.processes.secret import find_secret

_LONGEST_MESSAGE = 1000


@contextlib.contextmanager
def taking_part(activity: Activity, folder: str | os.PathLike[str]) -> Iterator[None]:
    """Tells the other processes what a run does, and tells them if it fails in this process alone.

    `folder` is for the stacks of a process that is stuck.
    """
    if jax.process_count() == 1:
        yield
        return
    one = connected_member()
    signals.share(one.forward, one.leave)
    try:
        one.begin(activity, folder)
        yield
    except Exception as error:
        report_failure(error)
        raise


def report_failure(error: Exception) -> None:
    """Ends the other processes because this one has raised an error, unless all raise it."""
    one = current_member()
    if one is None or raised_everywhere(error):
        return
    _await_cause(error)
    line = first_line(error)[:_LONGEST_MESSAGE]
    text = line if isinstance(error, ConfigError) else f'{type(error).__name__}: {line}'
    one.fail(text, getattr(error, 'exit_code', 2 if isinstance(error, USER_ERRORS) else 1))


def end_all_processes(error: ConfigError) -> None:
    """Ends all processes of a run because of an error in a thread of one, such as a failed save.

    The others may wait for this one in a library, so no error that this one raises later could
    reach them. It has no effect if there is only one process.
    """
    if jax.process_count() == 1:
        return
    _await_cause(error)
    connected_member().fail(str(error), 2)
    print_error(f'error: {printable(str(error))}')
    os._exit(2)


def _await_cause(error: BaseException) -> None:
    """Lets the hub end this process with the cause of an error, if the cause is in another process.

    When a process dies or fails, the connections of jax and of collectives break in all others.
    jax raises some of these errors while it handles one, without naming it as the cause.
    """
    one: BaseException | None = error
    while one is not None:
        if isinstance(one, jax.errors.JaxRuntimeError) or 'Gloo' in str(one):
            time.sleep(SECONDS_FOR_THE_HUB)
            return
        one = one.__cause__ or one.__context__


@contextlib.contextmanager
def raise_on_all_processes(title: str = 'a part of the run') -> Iterator[None]:
    """Raises an error on every process if the body fails on any of them.

    Without it, the other processes would wait for the one that failed. All processes must enter the
    context together. The body must not contain anything that waits for other processes. `title` is
    what the body does, for the message about a process that is late.

    Raises:
      Exception: the body's own error, on the processes where it failed.
      ConfigError: on the other processes, with the first process that failed and its message. It is
        of the same type if that error is a ConfigError.
    """
    if jax.process_count() == 1:
        yield
        return
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # Any error must reach the other processes.
        failure = error
    own = None if failure is None else [type(failure).__name__, first_line(failure)]
    own = own and [text[:_LONGEST_MESSAGE] for text in own]
    failures = connected_member().gather(title, own)
    if failure is None and any(failures):
        process = next(i for i, one in enumerate(failures) if one)
        name, line = failures[process]
        failure = _config_error(name)(f'process {process} failed: {line}')
    if failure is not None:
        note_raised_everywhere(failure)
        raise failure


def _config_error(name: str) -> type[ConfigError]:
    """The type of ConfigError that has a name, or ConfigError itself."""
    types = [ConfigError]
    for kind in types:  # It grows by the types that are found.
        types += kind.__subclasses__()
    return next((kind for kind in types if kind.__name__ == name), ConfigError)


def check_same(title: str, values: Mapping[str, Any], advice: str) -> None:
    """Checks that all processes have the same values.

    Raises a Disagreement if they differ, on all processes, with a table and the advice. The values
    are JSON, by the names of the items. They are sent only if they differ, and then by the first
    process that has them, because all processes get what each sends.
    """
    if jax.process_count() == 1:
        return
    one = connected_member()
    digests = one.gather(title, digest(values))
    if len(set(digests)) == 1:
        return
    sends = digests.index(digests[one.index]) == one.index
    told = one.gather(title, dict(values) if sends else None)
    found = differences([told[digests.index(each)] for each in digests])
    error = disagreement(found, jax.process_count(), advice)
    note_raised_everywhere(error)
    raise error


def check_same_step(step: int) -> None:
    """Checks that all processes start from the same step."""
    check_same(
        'looking for checkpoints',
        {'newest checkpoint': f'step {step}' if step else 'none'},
        'MODEL_DIR must be on storage that all hosts share',
    )


def check_shared_folder(setting: str, folder: epath.Path) -> None:
    """Checks that all processes see the same folder, by a file that process 0 writes for a moment.

    The folder is created if it does not exist. Raises a Disagreement if a process does not see what
    process 0 writes, and a ConfigError if process 0 cannot write to it.
    """
    if jax.process_count() == 1:
        return
    name = f'.seen-by-all-{connected_member().gather("naming a file", secrets.token_hex(4))[0]}'
    title = f'checking that all processes share {setting}'
    path = folder / name
    with raise_on_all_processes(title):
        if jax.process_index() == 0:
            with os_errors_as(f'{setting} {folder} cannot be written:'):
                folder.mkdir(parents=True, exist_ok=True)
                path.write_text('')
    try:
        seen = 'contains what process 0 writes' if path.exists() else 'another folder'
        check_same(
            title,
            {f'{setting} {folder}': seen},
            'it must be on storage that all hosts share, under the same path',
        )
    finally:
        if jax.process_index() == 0:
            path.unlink(missing_ok=True)
    # A store has no empty folders: with the file, the folder may go. No process may look before.
    connected_member().gather(title, None)


def secret_of_programs(say: Callable[[str], None]) -> bytes | None:
    """The 32 bytes by which compiled programs of this user are known, which process 0 decides.

    It is None if process 0 can keep no secret, which it says.
    """
    own = None
    if jax.process_index() == 0:
        try:
            own = hmac.digest(find_secret(os.environ, lasting=True), b'programs', 'sha256')
        except ConfigError as error:
            say(f'compiled programs are not kept: {error}')
    return own if jax.process_count() == 1 else connected_member().share(own)


def gather(title: str, value: Any) -> list[Any]:
    """Returns the values of all processes, JSON values. `title` is for messages."""
    return [value] if jax.process_count() == 1 else connected_member().gather(title, value)


def agree_on(value: Any) -> Any:
    """Returns the value of process 0, a JSON value."""
    return gather('a decision of process 0', value)[0]


def any_process(condition: bool) -> bool:
    """Whether a condition holds on any process."""
    return any(gather('a decision of all processes', bool(condition)))
