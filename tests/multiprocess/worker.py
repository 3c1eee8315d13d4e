"""Runs every job as one of several JAX processes with 8 CPU devices in total.

All jobs share one start of the processes, because the start takes most of the time.
"""

import atexit
import json
import os

import jax
from processes import report_path

from train.machine import devices as machine
from train.processes.environment import ProcessAddress
from train.processes.joining import join_processes


def main(port, count, index, folder, output):
    """Reports what the jobs of a process find.

    Args:
      port: the port of process 0.
      count: the number of processes.
      index: which of them this is.
      folder: where the files of the jobs and the report are.
      output: the file that gets what is printed.
    """
    with open(output, 'w') as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        run_jobs(port, count, index, folder)
    finally:
        atexit._run_exitfuncs()  # which multiprocessing does not do


def run_jobs(port, count, index, folder):
    jax.config.update('jax_platforms', 'cpu')
    machine.use_virtual_devices(8 // count)
    join_processes(ProcessAddress(f'127.0.0.1:{port}', count, index, 'the test'))

    # These modules use jax's devices, so they are imported after the configuration.
    import job_batches
    import job_meshes
    import job_rows

    report = {
        'meshes': job_meshes.run(count),
        'sum': job_meshes.sum_over_all_devices(),
        'rows': job_rows.run(count, index),
        'batches': job_batches.run(folder),
    }
    if count == 2:
        import job_failures
        import job_training

        report['failures'] = job_failures.run(index, folder)
        report['training'] = job_training.run(folder)
    if count == 4:
        import job_restoring

        report['restoring'] = job_restoring.run(folder)
    report_path(folder, index).write_text(json.dumps(report))
