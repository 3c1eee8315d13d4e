"""Runs every job as one of several JAX processes with 8 CPU devices in total.

  python worker.py <port of process 0> <number of processes> <index> <folder>

All jobs share one start of the processes, because the start takes most of the time.
"""

import json
import sys

import jax

from train.machine import devices as machine
from train.processes.environment import ProcessAddress
from train.processes.joining import join_processes


def main():
    port, count, index, folder = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    jax.config.update('jax_platforms', 'cpu')
    machine.use_virtual_devices(8 // count)
    join_processes(ProcessAddress(f'127.0.0.1:{port}', count, index, 'the test'))

    # These modules use jax's devices, so they are imported after the configuration.
    import job_meshes
    import job_rows
    from processes import report_path

    report = {
        'meshes': job_meshes.run(count),
        'sum': job_meshes.sum_over_all_devices(),
        'rows': job_rows.run(count, index),
    }
    if count < 8:  # Of eight, each reads the rows of one device, which job_rows covers.
        import job_batches

        report['batches'] = job_batches.run(folder)
    if count == 2:
        import job_failures
        import job_training

        report['failures'] = job_failures.run(index, folder)
        report['training'] = job_training.run(folder)
    if count == 4:
        import job_restoring

        report['restoring'] = job_restoring.run(folder)
    report_path(folder, index).write_text(json.dumps(report))


if __name__ == '__main__':
    main()
