"""Finds the arrays of a state that have names, and the parameters among them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from partitioning.rules import PathRules, ProblemError
from partitioning.state.boxes import (
    Entry,
    Parameter,
    Path,
    carried_names,
    described_path,
    is_inexact,
    is_optimizer_variable,
    is_parameter_variable,
    lacks_names,
)
from partitioning.state.follow import Parameters
from partitioning.state.path_names import (
    Texts,
    check_all_named,
    check_all_used,
    match_paths,
    replicating_rules,
)


class NoNamesError(ValueError):
    """No parameter of a state has names."""


class NamedArrays(NamedTuple):
    """The names of a state, collected before its leaves are classified one by one.

    Attributes:
      parameters: the parameters by path.
      trees: the paths of the trees that contain only parameters, such as ('params',).
      to_follow: the parameters, for looking up the owner of a statistic.
      carried: all arrays that carry names, with these names, by path. Path rules are ignored.
      overridden: the arrays that path rules name but that are neither parameters nor statistics.
      missing: for each parameter without names, a message that says what to write for all of them.
    """

    parameters: Mapping[Path, Parameter]
    trees: set[Path]
    to_follow: Parameters
    carried: Mapping[Path, Parameter]
    overridden: Mapping[Path, Parameter]
    missing: Mapping[Path, str] = MappingProxyType({})


def named_arrays(
    entries: Sequence[Entry],
    overrides: PathRules,
    exact: Mapping[Path, tuple[Any, ...]] | None = None,
) -> NamedArrays:
    """Finds the arrays that have names, and the parameters among them.

    The names that path rules give replace the names that arrays carry. If names are given by exact
    paths, no other names are read.

    Raises:
      ValueError: if no array has names, if a parameter without names matches no path rule, or if a
        path rule is never used.
    """
    if exact is not None:
        roots = parameter_roots([entry for entry in entries if entry.path in exact])
        named = _parameters(exact, {entry.path: entry for entry in entries})
        parameters = {path: named.pop(path) for path in roots if path in named}
        return _known(parameters, roots, {}, named)
    carried = _carried(entries)
    roots = _roots(entries, carried, bool(overrides))
    if not roots:
        raise NoNamesError(
            "Missing axis names: no parameter of the state has any. PjitPartitioner(layout='fsdp') "
            'needs none. If init adds names, pass partitioner.eval_shape(init, key), which keeps '
            'them; or create parameters with flax.linen.with_logical_partitioning(init, names) or '
            'nnx.Param(..., out_sharding=names); or name them by path: '
            'layout=AxisRules(names=suggest_rules(init, mesh, key)), or names=your own rules '
            "[('.*/kernel', ('embed', 'mlp')), ...]"
        )
    if not overrides:
        known = _known({path: carried[path] for path in roots}, roots, carried, {})
        return known._replace(missing=_missing(entries, known))
    arrays = _arrays(entries)
    texts = _path_texts(roots, arrays)
    found = match_paths(texts, overrides)
    unnamed = [path for path in roots if path not in carried and lacks_names(arrays[path].leaf)]
    check_all_named({path: arrays[path].shape for path in unnamed if path not in found}, texts)
    given = _parameters({path: tuple(overrides[i][1]) for path, i in found.items()}, arrays)
    named = {**carried, **given}
    known = _known({path: named[path] for path in roots if path in named}, roots, carried, {})
    for path in given.keys() - roots.keys():
        if _follows(path, given[path].shape or (), known.to_follow):
            del given[path], found[path], texts[path]  # a statistic gets the names of its parameter
    check_all_used(texts, overrides, found.values())
    return known._replace(overridden={p: x for p, x in given.items() if p not in roots})


class RuleTarget(NamedTuple):
    """An array, without its carrier, that a path rule can name.

    A regular expression may match any of the texts. The shortest is the last. Only a parameter
    needs names. A path rule would replace the names that the array has.
    """

    path: Path
    texts: Texts
    array: Any
    is_parameter: bool
    has_names: bool


def rule_targets(entries: Sequence[Entry]) -> list[RuleTarget]:
    """The arrays that path rules can name: all but those that follow a parameter."""
    carried = _carried(entries)
    roots = _roots(entries, carried, True)
    arrays = _arrays(entries)
    without = {path: (None,) * len(arrays[path].shape) for path in roots}
    known = _known(_parameters(without, arrays), roots, {}, {})
    return [
        RuleTarget(path, texts, arrays[path].array, path in roots, path in carried)
        for path, texts in _path_texts(roots, arrays).items()
        if path in roots or not _follows(path, arrays[path].shape, known.to_follow)
    ]


def _arrays(entries: Sequence[Entry]) -> dict[Path, Entry]:
    """The arrays of a state by path; an AxisMetadata is not one."""
    return {entry.path: entry for entry in entries if entry.carrier != 'metadata'}


def _path_texts(roots: Mapping[Path, Path], paths: Iterable[Path]) -> dict[Path, Texts]:
    """The strings that path rules match for each array, the parameters first."""
    texts = {path: ['/'.join(path), '/'.join(path[len(root) :])] for path, root in roots.items()}
    return {**texts, **{path: ['/'.join(path)] for path in paths if path not in roots}}


def parameter_roots(entries: Sequence[Entry]) -> Mapping[Path, Path]:
    """The paths of all parameters, with names or without, each with the path of its tree."""
    return _roots(entries, {}, True)


def _known(
    parameters: Mapping[Path, Parameter],
    roots: Mapping[Path, Path],
    carried: Mapping[Path, Parameter],
    overridden: Mapping[Path, Parameter],
) -> NamedArrays:
    by_path: dict[Path, list[Parameter]] = {}
    for path, parameter in parameters.items():
        by_path.setdefault(path[len(roots[path]) :], []).append(parameter)
    if len(roots) == 1 and not any('params' in path for path in roots):
        # If the parameters are a single array, paths of statistics have no key for it.
        by_path.setdefault((), list(next(iter(by_path.values()))))
    trees = set(roots.values()) - {()}
    return NamedArrays(parameters, trees, Parameters(by_path), carried, overridden)


def _missing(entries: Sequence[Entry], known: NamedArrays) -> dict[Path, str]:
    """What to write for the parameters without names, if other parameters have names."""
    shapes = {
        e.path: e.shape
        for e in entries
        if e.shape and _is_parameter(e, known.trees) and e.path not in known.carried
    }
    if not shapes:
        return {}
    texts = {entry.path: ['/'.join(entry.path)] for entry in entries}
    first, *others = shapes
    them = 'them' if others else 'it'
    message = (
        f'Missing axis names for parameters: {"/".join(first)} of shape {shapes[first]} '
        f'{f"and {len(others)} more have" if others else "has"} no names, but other parameters do. '
        f'To replicate {them}, write layout=AxisRules(names='
        f'{replicating_rules(shapes, texts)}), with names in place of None to shard {them}, as '
        "suggest_rules(init, mesh, key) does; or write only layout='fsdp'"
    )
    return {first: message} | {
        path: f'Missing axis names for parameters: no names, like {"/".join(first)}'
        for path in others
    }


def _is_parameter(entry: Entry, trees: set[Path]) -> bool:
    if entry.carrier == 'variable':
        return is_parameter_variable(entry.leaf)
    for tree in trees:  # noqa: SIM110  # called for every leaf, and twice as fast as any()
        if entry.path[: len(tree)] == tree:
            return True
    return False


def _parameters(
    names: Mapping[Path, tuple[Any, ...]], arrays: Mapping[Path, Entry]
) -> dict[Path, Parameter]:
    return {path: Parameter(path, n, arrays[path].shape) for path, n in names.items()}


def _follows(path: Path, shape: tuple[int, ...], parameters: Parameters) -> bool:
    try:
        return not shape or parameters.follow(path, shape)[0] is not None
    except ProblemError:
        return False


def _carried(entries: Sequence[Entry]) -> dict[Path, Parameter]:
    """The arrays that carry names, or whose names are in a collection of AxisMetadata."""
    carriers = [entry for entry in entries if entry.carrier is not None]
    has_metadata = any(entry.carrier == 'metadata' for entry in carriers)
    shapes = {entry.path: entry.shape for entry in entries} if has_metadata else {}
    named: dict[Path, Parameter] = {}
    for path, leaf, array, _, carrier, _ in carriers:
        if isinstance(getattr(leaf, 'names', None), str):
            raise ValueError(
                f'{"/".join(path)}: names must be a tuple, such as ({leaf.names!r},), not '
                f'{leaf.names!r}'
            )
        if (parameter := carried_names(leaf, path)) is None:
            continue
        if isinstance(array, dict | list | tuple):
            raise ValueError(
                f'{"/".join(path)}: the box with names {parameter.names} contains several arrays; '
                'put each array in a separate box'
            )
        if carrier == 'metadata':
            path = described_path(path)
            if path not in shapes:
                raise ValueError(
                    f'{"/".join(parameter.path)} names the array {"/".join(path)}, which does not '
                    'exist'
                )
            parameter = parameter._replace(path=path, shape=shapes[path])
        named[path] = parameter
    return named


def _roots(
    entries: Sequence[Entry], carried: Mapping[Path, Parameter], overridden: bool
) -> dict[Path, Path]:
    """The paths of parameters, each with the path of its tree.

    The parameters are below the key 'params' that is nearest to the top of the state, because
    states of optimizers may contain that key at greater depth. If no path contains it, all paths
    are parameters, in one tree. The arrays inside states of optimizers are not, unless there are
    no others. With `overridden`, path rules name arrays, so that arrays without names can be
    parameters too.
    """
    variables = [entry for entry in entries if entry.carrier == 'variable']
    optimizer = {entry.path for entry in variables if is_optimizer_variable(entry.leaf)}
    shapes = {path: parameter.shape or () for path, parameter in carried.items()}
    paths = [path for path in shapes if path not in optimizer] or list(shapes)
    if overridden:
        shapes = {path: entry.shape for path, entry in _arrays(entries).items()}
        paths = [entry.path for entry in variables if is_parameter_variable(entry.leaf)]
        paths = paths or [path for path in shapes if path not in optimizer]
    paths = _outside_optimizers(entries, paths)
    depths = {path: path.index('params') + 1 for path in paths if 'params' in path}
    if not depths:
        keys = zip(*(path[:-1] for path in paths), strict=False)
        same = itertools.takewhile(lambda keys: len({*keys}) == 1, keys)
        return dict.fromkeys(paths, tuple(first for first, *_ in same))
    least = min(depths.values())
    roots = {path: path[:depth] for path, depth in depths.items() if depth == least}
    # A tree nearer to the top may have the same arrays: L-BFGS keeps a copy of it in 'params'.
    for above in dict.fromkeys(path[:n] for n in range(1, least) for path in paths):
        if all(shapes.get((*above, *path[least:])) == shapes[path] for path in roots):
            return {path: above for path in paths if path[: len(above)] == above}
    return roots


def _outside_optimizers(entries: Sequence[Entry], paths: list[Path]) -> list[Path]:
    """The paths that are not inside states of optimizers, or all of them if there are no others.

    A step number or a random key next to the trees of the state is not a parameter either.
    """
    inside = {entry.path for entry in entries if entry.in_optimizer}
    if not inside:
        return paths
    numbers = {e.path for e in entries if len(e.path) == 1 and not is_inexact(e.array)}
    outside = [path for path in paths if path not in inside]
    return [path for path in outside if path not in numbers] or outside or paths
