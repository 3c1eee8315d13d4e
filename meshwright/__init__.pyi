"""The names of `meshwright`, each listed once with the module that has it."""

from meshwright.auditing import (
    audit as audit,
)
from meshwright.checking.document import (
    check_schema as check_schema,
)
from meshwright.checks.asserting import (
    assert_exchanges as assert_exchanges,
    assert_no_implicit_reshard as assert_no_implicit_reshard,
    assert_peak_below as assert_peak_below,
)
from meshwright.checks.goldens import (
    assert_forecast_unchanged as assert_forecast_unchanged,
    assert_layout_unchanged as assert_layout_unchanged,
    check_golden as check_golden,
    golden as golden,
    golden_path as golden_path,
)
from meshwright.dumps.drawing import (
    dump_table as dump_table,
)
from meshwright.dumps.program import (
    DumpedProgram as DumpedProgram,
)
from meshwright.dumps.reading import (
    read_dump as read_dump,
)
from meshwright.explaining import (
    explain as explain,
)
from meshwright.findings.layout_maps import (
    lint_layout_map as lint_layout_map,
)
from meshwright.findings.program_findings import (
    Findings as Findings,
    lint_program as lint_program,
)
from meshwright.forecasting import (
    forecast as forecast,
)
from meshwright.linting import (
    lint as lint,
)
from meshwright.program.collectives import (
    Collective as Collective,
    MeshAxes as MeshAxes,
)
from meshwright.program.costs import (
    MemoryUse as MemoryUse,
    ProgramCosts as ProgramCosts,
    costs_of_text as costs_of_text,
    mesh_axes as mesh_axes,
    read_costs as read_costs,
)
from meshwright.program.operations import (
    Kernel as Kernel,
    Operation as Operation,
)
from meshwright.program.peak_memory import (
    LiveArray as LiveArray,
    PeakMemory as PeakMemory,
)
from meshwright.records.difference import (
    Tolerances as Tolerances,
)
from meshwright.report.answers import (
    answer_schema as answer_schema,
)
from meshwright.report.call_audit import (
    AuditedArray as AuditedArray,
    CallAudit as CallAudit,
)
from meshwright.report.explained import (
    Explained as Explained,
    ExplainedRow as ExplainedRow,
)
from meshwright.report.forecasts import (
    Compilation as Compilation,
    Forecast as Forecast,
    MemoryChange as MemoryChange,
    MemoryForecast as MemoryForecast,
    Replicated as Replicated,
)
from meshwright.report.mesh_ranking import (
    MeshRanking as MeshRanking,
)
from meshwright.report.page import (
    render_page as render_page,
    write_page as write_page,
)
from meshwright.report.terminal import (
    forecast_table as forecast_table,
)
from meshwright.searching import (
    place as place,
    search as search,
)
from meshwright.watching import (
    Watch as Watch,
    watch as watch,
)
