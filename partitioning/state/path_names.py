"""Axis names by regular expressions on the paths of arrays, for models without names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import jax

from partitioning.rules import PathRules, check_path_rules, check_rank, compiled, nearest
from partitioning.state.boxes import (
    Path,
    array_of,
    is_carrier,
    is_variable,
    key_names,
    lacks_names,
    metadata_path,
    shape_of,
)

Texts = Sequence[str]  # the strings that a pattern may match for one array, the shortest last


How = Literal['fullmatch', 'search']  # the method of a regular expression


def match_paths(
    arrays: Mapping[Path, Texts], rules: Sequence[tuple[str, Any]], how: How = 'fullmatch'
) -> dict[Path, int]:
    """The index of the first rule that matches one of the strings of each array, by path."""
    matches = [getattr(compiled(pattern), how) for pattern, _ in rules]
    found = {}
    for path, texts in arrays.items():
        for index, match in enumerate(matches):
            if any(map(match, texts)):
                found[path] = index
                break
    return found


def check_all_named(missing: Mapping[Path, tuple[int, ...]], arrays: Mapping[Path, Texts]) -> None:
    """Raises ValueError if there are `missing` arrays, without names and without a path rule."""
    if missing:
        names = [arrays[path][-1] for path in missing]
        more = f' and {len(names) - 3} more' if len(names) > 3 else ''
        raise ValueError(
            f'no path rule matches {", ".join(names[:3])}{more}. Add '
            f'{replicating_rules(missing, arrays)[1:-1]}, with a name in place of None to shard a '
            'dimension'
        )


def replicating_rules(
    replicated: Mapping[Path, tuple[int, ...]], arrays: Mapping[Path, Texts]
) -> str:
    """Path rules, as code, that replicate some arrays and match no others.

    Arrays of repeated layers, whose paths differ in numbers only, share a rule.
    """
    others = [text for path, texts in arrays.items() if path not in replicated for text in texts]
    alike: dict[tuple[str, int], dict[str, str]] = {}
    for path, shape in replicated.items():
        # Without backslashes, which `repr` would double.
        exact = re.sub(
            r'[^\w/-]',
            lambda c: re.escape(c[0]) if c[0] in '^\\' else f'[{c[0]}]',
            arrays[path][-1],
        )
        above, _, last = re.sub(r'\d+', '[0-9]+', exact).rpartition('/')
        alike.setdefault((above, len(shape)), {})[exact] = last
    rules: list[tuple[str, tuple[None, ...]]] = []
    for (above, rank), by_path in alike.items():
        last = '|'.join(dict.fromkeys(by_path.values()))
        last = f'({last})' if '|' in last else last
        pattern = f'{above}/{last}' if above else last
        taken = any(map(compiled(pattern).fullmatch, others))
        rules += [(one, (None,) * rank) for one in (by_path if taken else [pattern])]
    return str(rules)


def check_all_used(arrays: Mapping[Path, Texts], rules: PathRules, used: Collection[int]) -> None:
    """Raises ValueError if a path rule is not used."""
    for index, (pattern, _) in enumerate(rules):
        if index not in used:
            raise ValueError(f'path rule {pattern!r} is never used: {why_unused(pattern, arrays)}')


def why_unused(pattern: str, arrays: Mapping[Path, Texts], how: How = 'fullmatch') -> str:
    """Why a path rule takes no array, and what to do."""
    known = [texts[-1] for texts in arrays.values()]
    match = getattr(compiled(pattern), how)
    if taken := [texts[-1] for texts in arrays.values() if any(map(match, texts))]:
        return f'earlier rules match {taken[0]} and everything else that it matches; move it up'
    return (
        f'no {"whole path" if how == "fullmatch" else "path"} matches it. Paths are '
        f'{", ".join(known[:3])}{", ..." if len(known) > 3 else "."}{nearest(pattern, known)}'
    )


def override_params_axes_names(params: Any, rules: PathRules) -> Any:
    """Names parameters by path rules. The function has the same name in T5X.

    Args:
      params: a pytree of parameters, with names or without, or a dict of T5X's variables with
        'params' and 'params_axes'.
      rules: (regular expression, names) pairs. The first rule that matches a whole path, such as
        'decoder/layers_0/mlp/kernel', wins. Parameters that no rule matches keep their names.

    Returns:
      `params`, where each array that a rule names is in a `flax.linen.LogicallyPartitioned`. T5X's
      variables are returned with the new names in 'params_axes'.

    Raises:
      ValueError: if a parameter has no names and no rule matches it, if a rule is never used, or if
        the number of names is not the number of dimensions.
    """
    from partitioning.state.linen import LogicallyPartitioned  # imports flax, which is slow

    checked = check_path_rules(rules)
    if isinstance(params, Mapping) and 'params_axes' in params:
        return _override_collection(params, checked)
    flat, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_carrier)
    entries = [(key_names(path), leaf) for path, leaf in flat]
    shapes = {path: shape_of(array_of(leaf)) for path, leaf in entries}
    names = _names(shapes, checked, [path for path, leaf in entries if lacks_names(leaf)])

    def named(path: Path, leaf: Any) -> Any:
        if path not in names:
            return leaf
        if is_variable(leaf):
            return leaf.replace(array_of(leaf), out_sharding=names[path])
        return LogicallyPartitioned(array_of(leaf), names[path])

    return jax.tree.unflatten(treedef, [named(path, leaf) for path, leaf in entries])


def _names(
    shapes: Mapping[Path, tuple[int, ...]], rules: PathRules, unnamed: Sequence[Path]
) -> dict[Path, tuple[Any, ...]]:
    """The names that the rules give to arrays, with all checks."""
    texts = {path: ('/'.join(path),) for path in shapes}
    found = match_paths(texts, rules)
    check_all_named({path: shapes[path] for path in unnamed if path not in found}, texts)
    check_all_used(texts, rules, found.values())
    names = {path: tuple(rules[index][1]) for path, index in found.items()}
    for path in names:
        check_rank(names[path], shapes[path], '/'.join(path))
    return names


def _override_collection(variables: Mapping[str, Any], rules: PathRules) -> dict[str, Any]:
    from flax.linen.partitioning import AxisMetadata
    from flax.traverse_util import unflatten_dict

    shapes = {
        key_names(path): shape_of(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(variables['params'])
    }
    axes = jax.tree_util.tree_leaves_with_path(variables['params_axes'], is_leaf=is_carrier)
    merged = {key_names(path): metadata for path, metadata in axes}
    unnamed = [path for path in shapes if shapes[path] and metadata_path(path) not in merged]
    for path, names in _names(shapes, rules, unnamed).items():
        merged[metadata_path(path)] = AxisMetadata(names=names)
    return {**variables, 'params_axes': unflatten_dict(merged)}
