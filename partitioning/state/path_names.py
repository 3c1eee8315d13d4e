"""Axis names by regular expressions on the paths of arrays, for models that carry none."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
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
    shape_of,
)

PathRules = Sequence[tuple[str, Sequence[str | None]]]


def check_path_rules(rules: Iterable[Any]) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    """Path rules as pairs of a regular expression and a tuple of names.

    Raises:
      ValueError: no such pair, or no regular expression.
    """
    if isinstance(rules, str) or not isinstance(rules, Iterable):
        raise ValueError(
            f"{rules!r} are no path rules: write [('.*/kernel', ('embed', 'mlp')), ...]"
        )
    checked: list[tuple[str, tuple[str | None, ...]]] = []
    for rule in rules:
        match rule:
            case (str(pattern), [*names]) if all(n is None or isinstance(n, str) for n in names):
                _compiled(pattern)
                checked.append((pattern, tuple(names)))
            case _:
                raise ValueError(
                    f"{rule!r} is no path rule: write ('regular expression', ('name', None, ...)), "
                    'with one name or None a dimension'
                )
    return tuple(checked)


def names_by_path(
    paths: Sequence[tuple[str, ...]], rules: PathRules, *, unnamed: Iterable[int]
) -> dict[int, tuple[str | None, ...]]:
    """The names that path rules give: the first that fully matches wins.

    Args:
      paths: for each array the strings that a pattern may match.
      rules: path rules.
      unnamed: indices of the arrays that have no other names.

    Returns:
      Names by index of the array.

    Raises:
      ValueError: an array of `unnamed` that no pattern matches, or a pattern that names nothing.
    """
    found: dict[int, tuple[str | None, ...]] = {}
    used: set[int] = set()
    for index, texts in enumerate(paths):
        for place, (pattern, names) in enumerate(rules):
            if any(_compiled(pattern).fullmatch(text) for text in texts):
                found[index] = tuple(names)
                used.add(place)
                break
    missing = [paths[index][-1] for index in unnamed if index not in found]
    if missing:
        more = f' and {len(missing) - 3} more' if len(missing) > 3 else ''
        raise ValueError(
            f'no path rule matches all of {", ".join(missing[:3])}{more}. Add '
            f"('{re.escape(missing[0])}', (<a name or None for each dimension>))"
        )
    for place, (pattern, _) in enumerate(rules):
        if place in used:
            continue
        taken = [
            texts[-1]
            for texts in paths
            if any(_compiled(pattern).fullmatch(text) for text in texts)
        ]
        known = [texts[-1] for texts in paths]
        why = (
            f'earlier rules take everything it matches, {taken[0]} first; move it up'
            if taken
            else f'it matches all of no path; there are {", ".join(known[:3])}, ... .'
            f'{nearest(pattern, known)}'
        )
        raise ValueError(f'path rule {pattern!r} names nothing: {why}')
    return found


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
    if isinstance(params, dict) and 'params_axes' in params:
        return _override_collection(params, checked)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_carrier)
    paths = [('/'.join(key_names(path)),) for path, _ in flat]
    bare = [i for i, (_, leaf) in enumerate(flat) if not is_carrier(leaf) and shape_of(leaf)]
    found = names_by_path(paths, checked, unnamed=bare)
    leaves = []
    for index, (_, leaf) in enumerate(flat):
        if index not in found:
            leaves.append(leaf)
            continue
        check_rank(paths[index][0], found[index], shape_of(array_of(leaf)))
        if carrier(leaf) is Carrier.VARIABLE:
            leaves.append(leaf.replace(array_of(leaf), out_sharding=found[index]))
        else:
            leaves.append(LogicallyPartitioned(array_of(leaf), found[index]))
    return jax.tree.unflatten(treedef, leaves)


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


def _override_collection(variables: dict[str, Any], rules: PathRules) -> dict[str, Any]:
    from flax.linen.partitioning import AxisMetadata

    flat = jax.tree_util.tree_leaves_with_path(variables['params'])
    axes, treedef = jax.tree_util.tree_flatten_with_path(
        variables['params_axes'], is_leaf=is_carrier
    )
    held = {key_names(path) for path, _ in axes}
    targets = [metadata_path(key_names(path)) for path, _ in flat]
    paths = [('/'.join(key_names(path)),) for path, _ in flat]
    unnamed = [i for i, target in enumerate(targets) if target not in held]
    found = names_by_path(paths, rules, unnamed=unnamed)
    names = {}
    for index, given in found.items():
        check_rank(paths[index][0], given, shape_of(flat[index][1]))
        names[targets[index]] = AxisMetadata(names=given)
    if not names.keys() - held:
        new = jax.tree.unflatten(treedef, [names.get(key_names(p), old) for p, old in axes])
        return {**variables, 'params_axes': new}
    nested: dict[str, Any] = {}
    for path, metadata in {**{key_names(p): m for p, m in axes}, **names}.items():
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
