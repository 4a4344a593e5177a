"""Workbench: controlled experiments on what makes large vision models train faster, and by how much.

Importing this package loads no torch. Training runs in child processes, so a notebook's own kernel never touches a device.
"""

__version__ = "0.1.0"
