"""What a dump says about a program, as an answer of the contract for programs."""

from __future__ import annotations

from meshwright.dumps.program import DumpedProgram
from meshwright.report.answers import Answer, describe_exchange
from meshwright.report.figures import sum_collectives
from meshwright.report.plain_values import to_plain


def dump_answer(program: DumpedProgram) -> Answer:
    """The answer of a program in a dump. Its details are its file, stage, layouts and memory."""
    memory = program.memory
    origin = 'live ranges' if memory is None else 'buffer assignment'
    return Answer(
        function=program.name,
        machine=None,
        num_devices=program.num_devices,
        chip=program.chip.name if program.chip else None,
        mesh=dict(program.mesh.sizes) if program.mesh else None,
        compiler=f'dump, {origin}' if program.stage == 'compiled' else f'dump, {program.stage}',
        fits=program.fits,
        peak=program.peak,
        limit=program.limit,
        sent=sum_collectives(program.collectives),
        exchanges=tuple(map(describe_exchange, program.collectives)),
        notes=program.notes,
        details={
            'file': str(program.file),
            'language': program.language,
            'stage': program.stage,
            'back_end': program.back_end,
            'mesh_from': program.mesh_from,
            'arguments_bytes': program.arguments_bytes,
            'memory': to_plain(memory),
            'buffers': to_plain(program.buffers),
            'arguments': [
                {**to_plain(one), 'layout': None if one.layout is None else str(one.layout)}
                for one in program.arguments
            ],
            'modules': [module.name for module in program.modules],
        },
    )
