"""Meshes: named axes over live process groups, in torch's ``DeviceMesh``.

It imports ``namedmesh.launch`` and the rooms below it.
"""

from namedmesh.mesh.groups import Communicator
from namedmesh.mesh.init import init_mesh
from namedmesh.mesh.mesh import NamedMesh, current_mesh
from namedmesh.mesh.options import GroupOptions
from namedmesh.mesh.sharing import share_groups
from namedmesh.mesh.tracing import trace

__all__ = [
    "Communicator",
    "GroupOptions",
    "NamedMesh",
    "current_mesh",
    "init_mesh",
    "share_groups",
    "trace",
]
