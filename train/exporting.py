"""Programs as files: a function of jax with its parameters, through jax.export."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from etils import epath
from flax import traverse_util
from jax import export

from partitioning.untrusted_text import parse_json, printable
from train.checkpoints.arrays.placing import read_all
from train.checkpoints.orbax.files import read_orbax
from train.errors import ConfigError, first_line, import_optional
from train.paths import absolute, as_path

PROGRAM, PARAMETERS, DESCRIPTION = 'program.stablehlo', 'params', 'export.json'
PLATFORMS = ('cpu', 'cuda', 'tpu')
# What programs of jax.export call: libraries of linear algebra, kernels of TPUs, and the compiler.
# What runs on the host, such as callbacks and kernels of Mosaic for GPUs, is not among it.
_CALLED = re.compile(
    r'(lapack|cusolver|cusparse|hipsolver|cu|hip)_\w+|(stablehlo|xla\.sdy)\.\w+|Sharding|SPMD\w+|'
    r'annotate_device_placement|Eigh|Qr|ProductOfElementaryHouseholderReflectors|LuDecomposition|'
    r'ApproxTopK|tpu_custom_call|AllocateBuffer|shape_assertion'
)
_CALLS = re.compile(r'(?:custom_call @|call_target_name = )(?:"([^"]*)"|([^(\s]+))')
# The name of a batch size that the caller of a program decides.
BATCH = 'batch'

Function = Callable[[Any, Mapping[str, Any]], Mapping[str, jax.Array]]


def export_program(
    function: Function,
    params: Any,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    folder: str | epath.Path,
    *,
    batch_size: int | None = None,
    platforms: Sequence[str] = PLATFORMS,
    description: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes a function and its parameters, so that any program with jax can call it.

    Usage:
      export_program(predict, state.params, {'tokens': jax.ShapeDtypeStruct((16,), 'int32')}, path)

    Args:
      function: (parameters, batch) -> outputs by name. It must be a pure function of jax.
      params: the parameters, a tree of dicts. They may be laid out over any mesh. The program does
        not depend on it: it computes where its caller puts the parameters.
      inputs: the shape of one row and the dtype of each array of a batch.
      folder: the folder to write, which must not contain a program.
      batch_size: the number of rows of a batch. With None, the caller of the program decides.
      platforms: the platforms that the program can run on.
      description: more entries for the description, as JSON data.

    Returns:
      The description: the names, shapes and dtypes of inputs, outputs and parameters.

    Raises:
      ConfigError: if the folder contains a program, or if the function cannot be exported.
    """
    import orbax.checkpoint as ocp

    folder = absolute(as_path('the folder of the program', folder))
    if (folder / DESCRIPTION).exists():
        raise ConfigError(f'{folder} contains a program already: use another folder')
    exported = _export(function, params, inputs, batch_size, platforms)
    outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    names = traverse_util.flatten_dict(params, sep='/')
    written = {
        'inputs': {name: _describe(x, batch_size) for name, x in inputs.items()},
        'outputs': {name: _describe(x) for name, x in outputs.items()},
        'parameters': {name: _describe(x) for name, x in names.items()},
        'platforms': list(exported.platforms),
        'jax': jax.__version__,
        **(description or {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(folder / PARAMETERS, args=ocp.args.PyTreeSave(params))
    if jax.process_index() == 0:
        (folder / PROGRAM).write_bytes(exported.serialize())
        (folder / DESCRIPTION).write_text(json.dumps(written, indent=1) + '\n')
    return written


def _export(
    function: Function,
    params: Any,
    inputs: Mapping[str, jax.ShapeDtypeStruct],
    batch_size: int | None,
    platforms: Sequence[str],
) -> export.Exported:
    """Traces and lowers a function for parameters and batches of these shapes."""
    import_optional('flatbuffers', 'export', 'exporting a program')
    rows = export.symbolic_shape(BATCH)[0] if batch_size is None else batch_size
    batch = {k: jax.ShapeDtypeStruct((rows, *x.shape), x.dtype) for k, x in inputs.items()}
    arrays = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)

    def named(params: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        return dict(function(params, batch))

    try:
        return export.export(jax.jit(named), platforms=platforms)(arrays, batch)
    except Exception as error:  # jax raises errors of many types if it cannot export
        hint = ' or give a batch_size' if batch_size is None else ''
        raise ConfigError(
            f'the function cannot be exported for {", ".join(platforms)}: {first_line(error)}: use '
            f'other platforms{hint}'
        ) from error


def _describe(x: Any, *rows: int | None) -> dict[str, Any]:
    """The shape and dtype of an array, as JSON data. None is a number that the caller decides."""
    shape = [size if isinstance(size, int) else None for size in (*rows, *x.shape)]
    return {'shape': shape, 'dtype': str(x.dtype)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """A function that was exported, with its parameters.

    Usage:
      program = load_program('exports/mine/1')
      outputs = program({'encoder_input_tokens': tokens, ...})

    Attributes:
      exported: the function (parameters, batch) -> outputs.
      description: what `export_program` has returned.
    """

    exported: export.Exported
    params: Any
    description: Mapping[str, Any]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
        """Calls the function. It is compiled for each new batch size.

        Raises a ConfigError if the batch does not have the arrays of the description.
        """
        wanted = self.description['inputs']
        for name in sorted(wanted.keys() ^ batch.keys()):
            what = 'is missing' if name in wanted else 'is not an input'
            raise ConfigError(f'{name} {what}: the program needs {", ".join(wanted)}')
        for name, x in batch.items():
            shape, dtype = wanted[name]['shape'], wanted[name]['dtype']
            fits = len(shape) == len(x.shape) and all(
                size in (None, given) for size, given in zip(shape, x.shape, strict=True)
            )
            if not fits or str(x.dtype) != dtype:
                raise ConfigError(f'{name} is {x.dtype}{[*x.shape]}: it must be {dtype}{shape}')
        return jax.jit(self.exported.call)(self.params, dict(batch))


def load_program(folder: str | epath.Path, sharding: Any = None) -> Program:
    """Reads a program that `export_program` has written.

    Args:
      sharding: where the parameters go: a jax Sharding for all of them, or one for each name. By
        default, the first device of this process.

    Raises:
      ConfigError: if there is no program, if its files are damaged, or if it calls functions that
        programs of jax.export do not call.
    """
    folder = absolute(as_path('the folder of the program', folder))
    if not (folder / DESCRIPTION).exists():
        raise ConfigError(f'{folder} contains no program (expected {DESCRIPTION} in it)')
    try:
        import_optional('flatbuffers', 'export', 'a program')
        description = parse_json((folder / DESCRIPTION).read_text())
        exported = export.deserialize(bytearray((folder / PROGRAM).read_bytes()))
        _check_calls(exported, folder)
        stored = read_orbax(folder / PARAMETERS)
        if sharding is None:
            sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        places = sharding if isinstance(sharding, Mapping) else dict.fromkeys(stored, sharding)
        wanted = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=places[name])
            for name, x in stored.items()
        }
        params = traverse_util.unflatten_dict(read_all(stored, wanted), sep='/')
    except ConfigError:
        raise
    except Exception as error:  # Many types, for files that are missing or damaged.
        raise ConfigError(
            f'the program in {folder} is damaged ({first_line(error)}): export it again'
        ) from error
    return Program(exported=exported, params=params, description=description)


def _check_calls(exported: export.Exported, folder: epath.Path) -> None:
    """Checks that a program calls nothing that might do more than compute.

    The runtime trusts the attributes of a call: a wrong one may crash the process, or run anything.
    """
    for names in _CALLS.findall(exported.mlir_module()):
        if not _CALLED.fullmatch(name := ''.join(names)):
            raise ConfigError(
                f'the program in {folder} calls {printable(name[:60])}, which may run code on the '
                'host: export the function without it'
            )
