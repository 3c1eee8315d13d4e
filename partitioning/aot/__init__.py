"""Programs and steps on machines that are not here: what they need, and how long they take.

`compiled` reads the text of a compiled program, and `traced` a function that was only traced.
`timing` knows how long the work takes that they found. `blame` finds the line and the rule that an
exchange or a buffer comes from. `report` has the type of a forecast. `preparing` has the parts that
`forecasting` puts together, `remedies` what makes a function fit, and `forecast_tables` and
`forecast_lists` the text.
"""

from partitioning.aot.compiled.collectives import (
    Collective as Collective,
    MeshAxes as MeshAxes,
)
from partitioning.aot.compiled.costs import (
    MemoryUse as MemoryUse,
    ProgramCosts as ProgramCosts,
    costs_of_text as costs_of_text,
    mesh_axes as mesh_axes,
    read_costs as read_costs,
)
from partitioning.aot.compiled.operations import (
    Kernel as Kernel,
    Operation as Operation,
)
from partitioning.aot.compiled.peak_memory import (
    LiveArray as LiveArray,
    PeakMemory as PeakMemory,
)
from partitioning.aot.forecast_tables import (
    forecast_table as forecast_table,
)
from partitioning.aot.forecasting import (
    forecast as forecast,
)
from partitioning.aot.golden import (
    assert_forecast_unchanged as assert_forecast_unchanged,
    check_golden as check_golden,
    golden_path as golden_path,
)
from partitioning.aot.golden_file import (
    Tolerances as Tolerances,
)
from partitioning.aot.page import (
    render_page as render_page,
    write_page as write_page,
)
from partitioning.aot.report import (
    Compilation as Compilation,
    Forecast as Forecast,
    MemoryForecast as MemoryForecast,
    Remedy as Remedy,
    Replicated as Replicated,
)
