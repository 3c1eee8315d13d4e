"""Training steps that others have measured, rebuilt as train steps of this project.

`measured_steps.json` has the published measurements. `rebuild` turns one of them into a `Program`,
or says why it cannot. `compiling` compiles the programs for the machines that they were measured
on, and keeps what the compiler says.
"""
