"""`PartitionedFunction`: a function over a mesh, with all that it knows and can do."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from partitioning.hardware import check_options, num_cached
from partitioning.programs.boundary import (
    PartitionSettings,
    check_divisible,
    check_donation,
    check_result_divides,
    find_boundary,
)
from partitioning.programs.contexts import PjittedFnWithContext, in_context
from partitioning.programs.inner_layouts import auto_where_needed, lay_out_inside
from partitioning.programs.trace_log import NO_RESULT, TraceLog, observe
from partitioning.rules import LogicalAxisRules, check_has_devices
from partitioning.state.structures import has_structure_of, like, match_by_path, with_static_fields
from partitioning.tracebacks import hide_own_frames, keep_user_frames

# On CPU, these versions of jaxlib crash if a donated array is used again. Elsewhere jax raises.
_CRASHES_ON_DONATED = (0, 10) <= jax.__version_info__ < (0, 11)


class PartitionedFunction(PjittedFnWithContext):
    """A function jitted over a mesh, as `BasePartitioner.partition` returns it.

    A call costs what a call of the plain `jax.jit` of the function costs through one function of
    Python, on a mesh of any size: the contexts are entered only while the function is traced, and
    errors are explained after they are raised.

    jax.jit accepts no keyword arguments together with in_shardings. Those that name a parameter
    with an entry in in_shardings become positional. The others are passed as one last dict, in the
    layout that they already have.

    Over an AbstractMesh, `trace` and `eval_shape` work as usual, and `lower` lowers for JAX's
    default backend; for another one, write `trace(...).lower(lowering_platforms=('tpu',))`. Calls
    raise ValueError.

    The rules are for the linen models and `constrain` calls inside. If gradients have other rules,
    `multiply` scatters them by these.

    Attributes:
      settings: what `partition` was called with, to partition the function again.
      boundary: its arguments and results, with their layouts.
      trace_log: the record of its traces.
      partitioner: what has partitioned it, if a partitioner has; `meshwright.forecast` moves both.

    Raises:
      ValueError: if a setting does not fit the signature of the function.
    """

    # Each call reads it, and a slot is faster than a dict.
    __slots__ = ('_dispatch',)

    def __init__(
        self,
        settings: PartitionSettings,
        mesh: Mesh,
        rules: LogicalAxisRules = (),
        gradient_rules: LogicalAxisRules | None = None,
    ):
        super().__init__(settings.fn, mesh, rules)
        if isinstance(settings.in_shardings, list):
            entries = tuple(settings.in_shardings)
            settings = dataclasses.replace(settings, in_shardings=entries)
        self.settings = settings
        self.partitioner: Any = None
        self.boundary = boundary = find_boundary(settings, mesh, rules)
        self.trace_log = TraceLog(boundary.arguments, boundary.static, settings.on_recompile)
        self._gradient_rules = gradient_rules
        self._jit = functools.partial(
            jax.jit,
            static_argnums=boundary.static,
            donate_argnums=boundary.donated,
            compiler_options=check_options(settings.compiler_options),
        )
        body = lay_out_inside(
            observe(settings.fn, self.trace_log, functools.partial(check_result_divides, boundary)),
            mesh,
            settings.in_shardings,
            settings.out_shardings,
            boundary.static,
        )
        self._use(body, boundary.in_shardings, boundary.out_shardings)
        self._dispatch: Callable[..., Any] = self._first_call
        on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == 'cpu'
        self._watches = bool(boundary.donated) and on_cpu and _CRASHES_ON_DONATED
        self._last_donated = 0
        self._compiled_ahead = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            try:
                return self._apply('__call__', args, kwargs)
            except Exception as error:
                keep_user_frames(error)
                raise
        try:  # costs nothing unless an exception is raised
            return self._dispatch(*args)
        except Exception as error:
            if not isinstance(error, ValueError) or not self._adopt_static_fields(args):
                try:
                    self._raise_cause(error, args, {})
                except Exception as found:
                    keep_user_frames(found)
                    raise
                keep_user_frames(error)
                raise
        return self._apply('__call__', args, {})

    @hide_own_frames
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """Lowers for arrays or ShapeDtypeStructs; see `jax.jit`."""
        if isinstance(self.boundary.mesh, AbstractMesh):
            return self.trace(*args, **kwargs).lower(lowering_platforms=(jax.default_backend(),))
        return super().lower(*args, **kwargs)

    @hide_own_frames
    def lower_and_compile(self, *args: Any, **kwargs: Any) -> jax.stages.Compiled:
        """Lowers and compiles for arrays or ShapeDtypeStructs."""
        self._check_has_devices()
        return super().lower_and_compile(*args, **kwargs)

    def clear_cache(self) -> None:
        """Forgets every trace and compilation of the function."""
        super().clear_cache()
        self._with_keywords.clear()
        self._cache_sizes.clear()
        self._compiled_ahead = False
        self.trace_log.clear()

    def num_traces(self) -> int:
        """The number of times the function was traced: once per kind of arguments."""
        return self.trace_log.count

    def num_compilations(self) -> int:
        """The number of times the function was compiled.

        The layout of positional arguments is always the same, so each trace is compiled once.
        """
        jitted = (self._pjitted_fn, *self._with_keywords.values())
        compiled = self._compiled_ahead or any(map(num_cached, jitted))
        return self.trace_log.num_compilations if compiled else 0

    def _first_call(self, *args: Any) -> Any:
        """The first call, which also checks what later calls need not check again."""
        self._check_has_devices()
        check_donation(self.boundary, args)
        check_divisible(self.boundary, args)
        self._use_for_later_calls()
        return self._dispatch(*args)

    def _use_for_later_calls(self) -> None:
        self._dispatch = self._call_watched if self._watches else self._pjitted_fn

    def _call_watched(self, *args: Any) -> Any:
        """A call that looks for deleted arrays if its state is the one that was just donated."""
        donated = self.boundary.donated[0]
        given = id(args[donated]) if donated < len(args) else 0
        if given == self._last_donated:
            check_donation(self.boundary, args)
        self._last_donated = given
        return self._pjitted_fn(*args)

    @hide_own_frames
    def _apply(self, method: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Applies a method of the jitted function, also with keyword arguments."""
        try:
            if method == '__call__':
                self._check_has_devices()
            positional, keywords = self._bind(args, kwargs) if kwargs else (args, {})
            check_divisible(self.boundary, positional)
            try:
                return self._run(method, positional, keywords)
            except ValueError:
                if not self._adopt_static_fields(positional):
                    raise
            return self._run(method, positional, keywords)
        except Exception as error:
            self._raise_cause(error, args, kwargs, abstract=method != '__call__')
            raise

    def _run(self, method: str, args: tuple, keywords: dict[str, Any]) -> Any:
        self._compiled_ahead |= method in ('lower', 'trace')
        if not keywords:
            return getattr(self._pjitted_fn, method)(*args)
        variant = self._keyword_variant(len(args))
        log, num_traces = self.trace_log, self.trace_log.count
        if method == '__call__' and log.on_recompile == 'error':
            log.check_layouts(keywords)
        result = getattr(variant, method)(*args, keywords)
        if num_cached(variant) != self._cache_sizes.get(len(args), 0):
            # jax may have compiled again without a trace: keywords have no fixed layout.
            log.record_layouts(keywords, traced=log.count > num_traces)
            self._cache_sizes[len(args)] = num_cached(variant)
        return result

    def _raise_cause(
        self, error: Exception, args: tuple, kwargs: dict[str, Any], *, abstract: bool = False
    ) -> None:
        """Raises our own error if the arguments of a call explain an exception of jax.

        `abstract` says whether the call takes ShapeDtypeStructs.
        """
        from partitioning.programs.explaining.causes import find_cause

        if kwargs and self.boundary.arguments.call_error(args, kwargs) is None:
            args, kwargs = self._bind(args, kwargs)
        found = find_cause(error, self.boundary, self.trace_log, args, kwargs, abstract=abstract)
        if found is not None:
            raise found from found.__cause__

    def _check_has_devices(self) -> None:
        function = self.boundary.arguments.function
        check_has_devices(self.boundary.mesh, f'calling or compiling {function}')

    def _use(self, body: Callable[..., Any], in_shardings: Any, out_shardings: Any) -> None:
        """Compiles this body from now on, with these shardings."""
        self._body, self._in_shardings, self._out_shardings = body, in_shardings, out_shardings
        self._with_keywords: dict[int, Any] = {}
        self._cache_sizes: dict[int, int] = {}
        self._pjitted_fn = self._jit(
            self._inside(body), in_shardings=in_shardings, out_shardings=out_shardings
        )

    def _inside(self, body: Callable[..., Any]) -> Callable[..., Any]:
        """`body` in the contexts."""
        boundary = self.boundary
        typed = auto_where_needed(body, boundary.mesh, self._out_shardings, boundary.static)
        return in_context(typed, boundary.mesh, self._logical_axis_rules, self._gradient_rules)

    def _adopt_static_fields(self, args: tuple) -> bool:
        """Gives the shardings the static fields of the arguments, if it is these that differ.

        An optimizer or a bound method that init creates is new in every trace, so a state can have
        other ones than the specs that were made for it. It returns whether another call with these
        positional arguments may succeed.
        """
        body, out_shardings = self._body, self._out_shardings
        returned = self.trace_log.result
        dynamic = [args[i] for i in self.boundary.dynamic_indices(len(args))]
        try:
            adapted = with_static_fields(self._in_shardings, out_shardings, dynamic)
        except ValueError:  # jax cannot compare arrays in static fields
            return False
        if adapted is None:
            if returned is NO_RESULT or has_structure_of(out_shardings, returned):
                return False
            if match_by_path(out_shardings, returned, types=True) is None:
                return False
            # The result differs, and does so in every trace. An inner jit keeps one of them.
            self.trace_log.count -= 1  # nothing was compiled
            body = jax.jit(body, static_argnums=self.boundary.static)
            result = jax.jit(self._inside(body), static_argnums=self.boundary.static)
            if (out_shardings := like(out_shardings, result.eval_shape(*args))) is None:
                return False
            adapted = self._in_shardings, out_shardings
        self._use(body, *adapted)
        self._use_for_later_calls()
        return True

    def _bind(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Splits a call into arguments with an entry in in_shardings, and other keywords."""
        names = self.boundary.arguments.positional
        if isinstance(self._in_shardings, tuple):
            laid_out = len(self._in_shardings) + len(self.boundary.static)
        else:  # one entry for all arguments, up to the first one that is missing
            named = itertools.takewhile(kwargs.__contains__, names[len(args) :])
            laid_out = len(args) + len(list(named))
        laid_out = max(laid_out, len(args))
        signature = self.boundary.arguments.signature
        if signature is None:
            return args, kwargs
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()  # for arguments before one that is given
        keywords = {k: v for k, v in kwargs.items() if k not in names[:laid_out]}
        return bound.args[:laid_out], keywords

    def _keyword_variant(self, num_positional: int) -> Any:
        """The jitted function for calls whose last argument is a dict of keyword arguments."""
        if num_positional not in self._with_keywords:
            body, shardings = self._body, self._in_shardings
            if not isinstance(shardings, tuple):
                static = sum(i < num_positional for i in self.boundary.static)
                shardings = (shardings,) * (num_positional - static)

            @functools.wraps(body)
            def call(*args: Any) -> Any:
                return body(*args[:-1], **args[-1])

            self._with_keywords[num_positional] = self._jit(
                self._inside(call),
                in_shardings=(*shardings, None),
                out_shardings=self._out_shardings,
            )
        return self._with_keywords[num_positional]


PartitionedCallable = PartitionedFunction
CompiledPartitionedCallable = Callable[..., Any]
