"""The mesh, the rules and everything else that surrounds a function while jax traces it."""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, Self

import jax
from jax.sharding import Mesh

from partitioning.hardware import described_cudnn
from partitioning.hardware.compilers import own_compiler_errors
from partitioning.products import find_rounds, in_rounds
from partitioning.rules import AxisRules, LogicalAxisRules
from partitioning.short_help import ShortHelp
from partitioning.tracebacks import hide_own_frames


class PjittedFnWithContext(metaclass=ShortHelp):
    """Calls a jitted function inside a mesh and logical axis rules, entered at every call.

    It has the name, the docstring and the signature of the function. `PartitionedFunction`, which
    partitioners make, pays for the contexts only while it is traced.

    Args:
      pjitted_fn: the result of `jax.jit`.
      partition_mesh: the mesh.
      logical_axis_rules: rules for the linen models and `constrain` calls inside.
    """

    def __init__(
        self,
        pjitted_fn: Callable[..., Any],
        partition_mesh: Mesh,
        logical_axis_rules: LogicalAxisRules = (),
    ):
        # The attributes of the function, but not the methods that jax.jit adds to it.
        given = getattr(pjitted_fn, '__dict__', {})
        vars(self).update({k: v for k, v in given.items() if not hasattr(type(self), k)})
        functools.update_wrapper(self, pjitted_fn, updated=())
        self._pjitted_fn: Any = pjitted_fn
        self._mesh = partition_mesh
        self._logical_axis_rules = AxisRules(logical_axis_rules)

    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        with jax.set_mesh(self._mesh), _context(self._mesh, self._logical_axis_rules):
            return getattr(self._pjitted_fn, method)(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._apply('__call__', args, kwargs)

    @hide_own_frames
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('lower', args, kwargs)

    @hide_own_frames
    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Lowers and compiles for arrays or ShapeDtypeStructs."""
        lowered = self.lower(*args, **kwargs)
        with own_compiler_errors(getattr(self, '__name__', 'the function'), self._mesh):
            return lowered.compile()

    @hide_own_frames
    def trace(self, *args: Any, **kwargs: Any) -> jax.stages.Traced:
        """Traces for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('trace', args, kwargs)

    @hide_own_frames
    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """The abstract result for arrays or ShapeDtypeStructs; see `jax.jit`."""
        return self._apply('eval_shape', args, kwargs)

    def clear_cache(self) -> None:
        """Forgets every trace and compilation of the function."""
        self._pjitted_fn.clear_cache()

    # As for a plain function, a copy is the function itself, and an attribute of a class a method.

    def __deepcopy__(self, memo: Any = None) -> Self:
        return self

    __copy__ = __deepcopy__

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)


def in_context(
    fn: Callable[..., Any],
    mesh: Mesh,
    rules: LogicalAxisRules,
    gradient_rules: LogicalAxisRules | None = None,
) -> Callable[..., Any]:
    """`fn` inside the mesh and the rules; jax runs its body only to trace it."""

    @functools.wraps(fn)
    def inside(*args: Any) -> Any:
        with (
            jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
            _context(mesh, rules, gradient_rules),
        ):
            return fn(*args)

    return inside


@contextlib.contextmanager
def _context(
    mesh: Mesh, rules: LogicalAxisRules, gradient_rules: LogicalAxisRules | None = None
) -> Iterator[None]:
    """Errors of jax, flax and optax inside become ValueErrors that say what to write."""
    from flax.core import spmd  # heavy, and only tracing needs it

    from partitioning.state.linen import boxes_like_ours

    # nnx would lay out variables where they are created. It fails if the rank of a statistic is not
    # the rank of its parameter. Here the shardings decide.
    nnx = sys.modules.get('flax.nnx')
    try:
        with (
            spmd.logical_axis_rules(rules),
            in_rounds(find_rounds(mesh), gradient_rules),
            boxes_like_ours(),
            described_cudnn(mesh),
            contextlib.nullcontext() if nnx is None else nnx.use_eager_sharding(False),
        ):
            yield
    except Exception as error:
        from partitioning.programs.explaining.trace_errors import translate

        if (found := translate(error, rules)) is None:
            raise
        found.__dict__['explains_itself'] = True
        raise found.with_traceback(error.__traceback__) from found.__cause__
