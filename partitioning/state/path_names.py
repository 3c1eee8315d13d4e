"""Axis names by regular expressions on the paths of arrays, for models that carry none."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax

from partitioning.rules import nearest
from partitioning.state.boxes import (
    Carrier,
    Path,
    array_of,
    carrier,
    is_carrier,
    key_names,
    lacks_names,
    shape_of,
)

# A name, the mesh axes themselves in a tuple, or None for each dimension.
PathNames = Sequence[str | tuple[str, ...] | None]
PathRules = Sequence[tuple[str, PathNames]]


def check_path_rules(rules: Iterable[Any]) -> tuple[tuple[str, tuple[Any, ...]], ...]:
    """Path rules as pairs of a regular expression and a tuple of names.

    Raises:
      ValueError: no such pair, or no regular expression.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(
            f"{rules!r} are no path rules: write [('.*/kernel', ('embed', 'mlp')), ...]"
        )
    checked: list[tuple[str, tuple[Any, ...]]] = []
    for rule in rules:
        match rule:
            case (str(pattern), [*names]) if all(map(_is_name, names)):
                _compiled(pattern)
                checked.append((pattern, tuple(names)))
            case _:
                raise ValueError(
                    f"{rule!r} is no path rule: write ('regular expression', ('name', None, ...)), "
                    'with one name or None a dimension (or a tuple of mesh axes)'
                )
    return tuple(checked)


def _is_name(name: Any) -> bool:
    if isinstance(name, tuple):
        return all(isinstance(axis, str) for axis in name)
    return name is None or isinstance(name, str)


Texts = Sequence[str]  # what a pattern may match for one array, the best to show last


def match_paths(
    arrays: Mapping[Path, Texts], rules: PathRules
) -> tuple[dict[Path, tuple[Any, ...]], set[int]]:
    """The names that path rules give arrays, and the places of the rules that gave some.

    Args:
      arrays: for each path the strings that a pattern may match.
      rules: path rules; the first that matches all of a string wins.
    """
    found: dict[Path, tuple[Any, ...]] = {}
    used: set[int] = set()
    literal: dict[str, int] = {}  # rules for one text need no search among thousands
    patterns: list[int] = []
    for place, (pattern, _) in enumerate(rules):
        if (text := _literal(pattern)) is None:
            patterns.append(place)
        else:
            literal.setdefault(text, place)
    for path, texts in arrays.items():
        first = min((literal[text] for text in texts if text in literal), default=len(rules))
        for place in patterns:
            if place < first and any(_compiled(rules[place][0]).fullmatch(text) for text in texts):
                first = place
                break
        if first < len(rules):
            found[path] = tuple(rules[first][1])
            used.add(first)
    return found, used


@functools.cache
def _literal(pattern: str) -> str | None:
    """The one text that a regular expression matches, if it is that text escaped."""
    text = re.sub(r'\\(.)', r'\1', pattern)
    return text if re.escape(text) == pattern else None


def check_all_named(missing: Sequence[str]) -> None:
    """Raises ValueError for arrays that no path rule names."""
    if missing:
        more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
        raise ValueError(
            f'no path rule matches all of {", ".join(missing[:3])}{more}. Add '
            f"('{re.escape(missing[0])}', (<a name or None for each dimension>))"
        )


def check_all_used(arrays: Mapping[Path, Texts], rules: PathRules, used: set[int]) -> None:
    """Raises ValueError for a path rule that names nothing."""
    for place, (pattern, _) in enumerate(rules):
        if place in used:
            continue
        known = [texts[-1] for texts in arrays.values()]
        taken = [
            texts[-1]
            for texts in arrays.values()
            if any(_compiled(pattern).fullmatch(text) for text in texts)
        ]
        why = (
            f'earlier rules take everything it matches, {taken[0]} first; move it up'
            if taken
            else f'it matches all of no path; there are {", ".join(known[:3])}, ... .'
            f'{nearest(pattern, known)}'
        )
        raise ValueError(f'path rule {pattern!r} names nothing: {why}')


def override_params_axes_names(params: Any, rules: PathRules) -> Any:
    """Parameters with the names that path rules give them, by T5X's name.

    Args:
      params: a pytree of parameters, with names or without; or T5X's variables, with 'params' and
        'params_axes' in a dict.
      rules: (regular expression, names) pairs; the first that matches all of a path, such as
        'decoder/layers_0/mlp/kernel', wins. Parameters that no rule matches keep the names that
        they have.

    Returns:
      `params` with each array that a rule names in a `flax.linen.LogicallyPartitioned`; of T5X's
      variables, these with the new names in 'params_axes'.

    Raises:
      ValueError: a parameter without any names, a rule that names nothing, or names of another
        number than the array's dimensions.
    """
    from partitioning.state.linen import LogicallyPartitioned  # of flax, which is heavy

    checked = check_path_rules(rules)
    if isinstance(params, Mapping) and 'params_axes' in params:
        return _override_collection(params, checked)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_carrier)
    entries = [(key_names(path), leaf) for path, leaf in flat]
    found = _match(
        {path: ('/'.join(path),) for path, _ in entries},
        checked,
        [path for path, leaf in entries if lacks_names(leaf)],
    )

    def named(path: Path, leaf: Any) -> Any:
        if path not in found:
            return leaf
        array = array_of(leaf)
        check_rank('/'.join(path), found[path], shape_of(array))
        if carrier(leaf) is Carrier.VARIABLE:
            return leaf.replace(array, out_sharding=found[path])
        return LogicallyPartitioned(array, found[path])

    return jax.tree.unflatten(treedef, [named(path, leaf) for path, leaf in entries])


def _match(
    arrays: Mapping[Path, Texts], rules: PathRules, unnamed: Sequence[Path]
) -> dict[Path, tuple[Any, ...]]:
    found, used = match_paths(arrays, rules)
    check_all_named(['/'.join(path) for path in unnamed if path not in found])
    check_all_used(arrays, rules, used)
    return found


def check_rank(path: str, names: Sequence[Any], shape: Sequence[int]) -> None:
    """Raises ValueError unless there is one name a dimension."""
    if len(names) != len(shape):
        raise ValueError(f'{path}: {rank_message(names, shape)}')


def rank_message(names: Sequence[Any], shape: Sequence[int]) -> str:
    """What is wrong with names of another number than the dimensions."""
    return (
        f'{len(names)} logical axes {tuple(names)} for an array of {len(shape)} dimensions '
        f'{tuple(shape)}; give one name or None a dimension'
    )


def _override_collection(variables: Mapping[str, Any], rules: PathRules) -> dict[str, Any]:
    from flax.linen.partitioning import AxisMetadata

    shapes = {
        key_names(path): shape_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables['params'])
    }
    axes = jax.tree_util.tree_leaves_with_path(variables['params_axes'], is_leaf=is_carrier)
    merged = {key_names(path): metadata for path, metadata in axes}
    unnamed = [path for path in shapes if shapes[path] and metadata_path(path) not in merged]
    found = _match({path: ('/'.join(path),) for path in shapes}, rules, unnamed)
    for path, names in found.items():
        check_rank('/'.join(path), names, shapes[path])
        merged[metadata_path(path)] = AxisMetadata(names=names)
    nested: dict[str, Any] = {}
    for path, metadata in merged.items():
        inner = functools.reduce(lambda node, key: node.setdefault(key, {}), path[:-1], nested)
        inner[path[-1]] = metadata
    return {**variables, 'params_axes': nested}


def metadata_path(path: Path) -> Path:
    """Where T5X's 'params_axes' has the names of the array at `path` of 'params'."""
    return (*path[:-1], f'{path[-1]}_axes')


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ValueError(f'path rule {pattern!r} is no regular expression: {error}') from error
