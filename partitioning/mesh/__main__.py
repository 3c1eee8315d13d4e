"""Shows the mesh of a real or described machine: its axes, their networks and their hops.

python -m partitioning.mesh --topology=v5e:16x16 --num_partitions=8 --png=mesh.png
"""

import sys

from partitioning.pictures.mesh_command import main

if __name__ == '__main__':
    sys.exit(main())
