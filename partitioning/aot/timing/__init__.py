"""How long a step takes: what a device has to do, and how fast its chip and its links are.

`work` says what a device has to do, which `compiled_work` reads from a compiled program and
`traced_work` estimates from a jaxpr; `kernels` knows the kernels in one. `links` knows how devices
are connected, `exchanges` how long one exchange takes, `constants` has the constants of the chips,
and `step_model` adds it up.
"""

from partitioning.aot.timing.compiled_work import (
    read_work as read_work,
)
from partitioning.aot.timing.constants import (
    ChipConstants as ChipConstants,
    constants_of as constants_of,
)
from partitioning.aot.timing.kernels import (
    find_kernel_work as find_kernel_work,
)
from partitioning.aot.timing.links import (
    Machine as Machine,
    describe_machine as describe_machine,
)
from partitioning.aot.timing.step_model import (
    estimate_step_time as estimate_step_time,
)
from partitioning.aot.timing.step_time import (
    Constant as Constant,
    StepTime as StepTime,
    TimePart as TimePart,
)
from partitioning.aot.timing.traced_work import (
    estimate_work as estimate_work,
)
from partitioning.aot.timing.work import (
    KernelWork as KernelWork,
    Work as Work,
)
