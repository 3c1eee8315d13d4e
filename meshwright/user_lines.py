"""Which line of a call stack is the user's, and how lines are written for people."""

from __future__ import annotations

import ast
import functools
import linecache
import os
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from partitioning.library_files import is_library_file, is_standard_file

_ROOT = f'{Path(__file__).parents[1]}/'
_PLUMBING = (f'{_ROOT}meshwright/', f'{_ROOT}partitioning/')
_ABSOLUTE = re.compile(r'/[^\s:]+\.py:\d+')
CONSTRAINING = ('with_sharding_constraint', 'reshard')
_MODULES = ('jax', 'jnp', 'lax', 'np', 'nn', 'einops', 'nnx', 'eqx')
_OF_ELEMENTS = ('relu', 'gelu', 'silu', 'swish', 'tanh', 'sigmoid', 'exp', 'square', 'softplus')
_LONGEST = 40  # letters of an array in a text
_NESTED = 3  # functions that call each other


def user_line(stack: Sequence[str], helpers: Collection[str] = ()) -> str:
    """Returns the innermost 'file:line' of the user's code or of the model's, or ''.

    Lines of jax, flax, optax and the like are skipped, and so are the lines of `meshwright` and
    `partitioning`. If a stack has no other lines, its innermost one is returned.

    Args:
      stack: the 'file:line' of the code, and of each of its callers.
      helpers: lines that stand for the lines that call them, see `find_helpers`.
    """
    return _user_line(tuple(stack), frozenset(helpers))


@functools.lru_cache(maxsize=2**14)
def _user_line(stack: tuple[str, ...], helpers: frozenset[str]) -> str:
    own = [line for line in stack if not is_library(line)]
    told = (line for line in own if line not in helpers)
    return next(told, own[-1] if own else stack[0] if stack else '')


def find_helpers(constraints: Iterable[tuple[Sequence[str], Any]]) -> frozenset[str]:
    """Finds the lines of functions that do no more than lay out what they are given.

    `return jax.lax.with_sharding_constraint(x, spec)` in a function of its own says nothing; the
    lines that call the function do. Such a line lays out arrays in several ways for several
    callers, or has the layout from an argument of its function.

    Args:
      constraints: the call stack and the layout of each constraint.
    """
    found = set[str]()
    for _ in range(_NESTED):
        callers: dict[str, set[str]] = {}
        layouts: dict[str, set[Any]] = {}
        for stack, layout in constraints:
            own = [line for line in stack if not is_library(line) and line not in found]
            if len(own) > 1:
                callers.setdefault(own[0], set()).add(own[1])
                layouts.setdefault(own[0], set()).add(layout)
        several = {line for line, above in callers.items() if len(above) > 1}
        new = {line for line in callers if _only_constrains(line)}
        new |= {line for line in several if len(layouts[line]) > 1}
        if not new:
            break
        found |= new
    return frozenset(found)


def _only_constrains(line: str) -> bool:
    """Whether a constraint has its layout from an argument of the function that it is in."""
    path, _, number = line.rpartition(':')
    return number.isdigit() and any(
        first <= int(number) <= last for first, last in _given_layouts(path)
    )


@functools.cache
def _given_layouts(path: str) -> tuple[tuple[int, int], ...]:
    """The first and last lines of the constraints whose layouts are given to their functions."""
    try:
        tree = ast.parse(''.join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.Lambda):
            given = {arg.arg for arg in ast.walk(function.args) if isinstance(arg, ast.arg)}
            for call in _calls_in(function):
                is_moved = call.args and isinstance(call.args[0], ast.Name)
                if is_moved and _name_of(call) in CONSTRAINING:
                    layouts = (*call.args[1:], *(word.value for word in call.keywords))
                    if given & {name for one in layouts for name in _names_of_layout(one)}:
                        found.append((call.lineno, call.end_lineno or call.lineno))
    return tuple(found)


def array_at(line: str, calls: Collection[str] = ()) -> str:
    """The array of a line of code as its author has written it, or 'x' if that is not clear.

    Args:
      line: the 'file:line'.
      calls: functions or methods. The array is what the line gives to one of them, or to its only
        call with further arguments; without `calls`, it is the variable that one operation makes.
    """
    path, _, number = line.rpartition(':')
    if not number.isdigit() or is_library(line):
        return 'x'
    own = [s for s in _statements(path) if s.lineno <= int(number) <= (s.end_lineno or s.lineno)]
    statement = max(own, key=lambda s: s.lineno, default=None)
    if statement is None:
        return 'x'
    if not calls:
        if not isinstance(statement, ast.Assign) or not _is_one_operation(statement.value):
            return 'x'
        target = statement.targets[0]
        return target.id if isinstance(target, ast.Name) and len(statement.targets) == 1 else 'x'
    found = [c for c in ast.walk(statement) if isinstance(c, ast.Call) and _taken(c) is not None]
    found = [c for c in found if c.lineno <= int(number) <= (c.end_lineno or c.lineno)]
    named = [c for c in found if _name_of(c) in calls] or [c for c in found if len(c.args) > 1]
    texts = {ast.unparse(taken) for c in named if (taken := _taken(c)) is not None}
    text = texts.pop() if len(texts) == 1 else ''
    return text if 0 < len(text) <= _LONGEST else 'x'


@functools.cache
def _statements(path: str) -> tuple[ast.stmt, ...]:
    """The statements of a file that have no others inside."""
    try:
        tree = ast.parse(''.join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    found = (node for node in ast.walk(tree) if isinstance(node, ast.stmt))
    return tuple(node for node in found if not hasattr(node, 'body'))


def _taken(call: ast.Call) -> ast.expr | None:
    """The array that a call takes: what a method is of, or the first argument of a function."""
    if isinstance(call.func, ast.Attribute):
        root = call.func.value
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in _MODULES):
            return call.func.value
    first = call.args[0] if call.args else None
    return None if isinstance(first, ast.Starred | ast.Lambda | ast.Constant) else first


def _is_one_operation(value: ast.expr) -> bool:
    """Whether an expression has one operation, and functions of single elements of its result."""
    while isinstance(value, ast.Call) and _name_of(value) in _OF_ELEMENTS and value.args:
        value = value.args[0]
    if not isinstance(value, ast.Call | ast.BinOp):
        return False
    inside = ast.Call, ast.BinOp
    return not any(isinstance(node, inside) for node in ast.walk(value) if node is not value)


def line_of_specs(function: str) -> str:
    """The 'file:line' where a function of the user is given to shard_map; '' if it is not clear.

    Args:
      function: the name of the function, and where Python says that it begins:
        'attention at model.py:12'.
    """
    name, _, line = function.rpartition(' at ')
    path, _, number = line.rpartition(':')
    if not number.isdigit() or is_library(line):
        return ''
    if linecache.getline(path, int(number)).lstrip().startswith('@'):
        return line
    found = [
        first
        for given, first, last in _mapped_in(path)
        if given == name or (not given and name == '<lambda>' and first <= int(number) <= last)
    ]
    return f'{path}:{found[0]}' if len(found) == 1 else ''


@functools.cache
def _mapped_in(path: str) -> tuple[tuple[str, int, int], ...]:
    """The calls of shard_map in a file: the name of its function, if it has one, and its lines."""
    try:
        tree = ast.parse(''.join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ()
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args)
    return tuple(
        (getattr(call.args[0], 'id', ''), call.lineno, call.end_lineno or call.lineno)
        for call in calls
        if _name_of(call) == 'shard_map'
    )


def _calls_in(node: ast.AST) -> Iterator[ast.Call]:
    """The calls of a function, without the calls of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef | ast.Lambda):
            if isinstance(child, ast.Call):
                yield child
            yield from _calls_in(child)


def _name_of(call: ast.Call) -> str:
    return getattr(call.func, 'attr', getattr(call.func, 'id', ''))


def _names_of_layout(expression: ast.expr) -> Iterator[str]:
    """The variables of a layout, without those that say on which mesh."""
    if isinstance(expression, ast.Call) and _name_of(expression) == 'NamedSharding':
        for one in (*expression.args[1:], *(word.value for word in expression.keywords)):
            yield from _names_of_layout(one)
    else:
        yield from (node.id for node in ast.walk(expression) if isinstance(node, ast.Name))


def stack_of_traceback(traceback: Any) -> tuple[str, ...]:
    """Returns the 'file:line' of each frame of an equation, the innermost first.

    The frames of jax are left out, as XLA leaves them out of the text of a program.
    """
    return () if traceback is None else _stack_of(traceback)


@functools.lru_cache(maxsize=2**14)
def _stack_of(traceback: Any) -> tuple[str, ...]:
    """The lines of a traceback, which the equations of a trace and of its changes share."""
    frames = traceback.frames
    return tuple(f'{f.file_name}:{f.line_num}' for f in frames if not is_of_jax(f.file_name))


@functools.cache
def is_of_jax(path: str) -> bool:
    """Whether a file, or the code at a 'file:line', is jax's own."""
    return is_library_file(path, ('jax', 'jaxlib'))


def short_source(source: str) -> str:
    """A 'file:line' without the folders above the package or the current folder.

    Forecasts are shared, and the folders of one computer say nothing on another.
    """
    _, installed, rest = source.rpartition('-packages/')
    if installed:
        return rest
    folder = _ROOT if source.startswith(_ROOT) else f'{os.getcwd()}/'
    path = source.removeprefix(folder)
    return '/'.join(path.split('/')[-3:]) if os.path.isabs(path) else path


def shorten_sources(text: str) -> str:
    """A text in which `short_source` has shortened every 'file:line'."""
    return _ABSOLUTE.sub(lambda found: short_source(found[0]), text)


def is_library(line: str) -> bool:
    """Whether a "file:line" is of a library, of `meshwright` or of `partitioning`."""
    return _is_library_path(line.rpartition(':')[0])


@functools.cache
def _is_library_path(path: str) -> bool:
    return path.startswith(_PLUMBING) or is_library_file(path) or is_standard_file(path)
