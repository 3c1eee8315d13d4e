"""Forecasts the time of a step from the work of a device and the rates of its chip and links.

`work` says what a device has to do, which `compiled_work` reads from a compiled program and
`traced_work` estimates from a jaxpr. `kernels` counts the work of hand-written kernels. `links`
knows how devices are connected, and `loads` how long each part takes at peak rates. `constants` has
the constants of the chips, and `step_model` adds up the time of a step.
"""

from meshwright.time.compiled_work import (
    read_work as read_work,
)
from meshwright.time.constants import (
    ChipConstants as ChipConstants,
    Constant as Constant,
    constants_of as constants_of,
)
from meshwright.time.kernels import (
    find_kernel_work as find_kernel_work,
)
from meshwright.time.links import (
    Machine as Machine,
    describe_machine as describe_machine,
)
from meshwright.time.step_model import (
    StepTime as StepTime,
    TimePart as TimePart,
    estimate_step_time as estimate_step_time,
)
from meshwright.time.traced_work import (
    estimate_work as estimate_work,
)
from meshwright.time.work import (
    KernelWork as KernelWork,
    Work as Work,
)
