"""Checkpoints on the disks or in the memory of the hosts, each part of them on two hosts."""
