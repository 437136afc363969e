"""Compatibility layer for Megatron: ``parallel_state``, its accessors and its layers.

There are three ways to use it: :func:`install` for unchanged code; ``from namedmesh.compat.megatron
import parallel_state`` for code that imports the layer; and :func:`bind` for code that has a mesh.
:func:`current_mesh` returns the mesh behind the accessors.

There are two parallel states. If it can be imported, :func:`install` replaces only its
``initialize_model_parallel`` and ``destroy_model_parallel``: its own code then runs inside of
:func:`namedmesh.share_groups`, in any release, installed or vendored, so that its own accessors,
layers and process group collections use our groups. ``namedmesh.compat.megatron.parallel_state`` is
then megatron-core's module too. If it is not installed, our fallback can be imported as
``megatron.core.parallel_state``, ``megatron.core.mpu`` and ``megatron.core.tensor_parallel``.
"""

from namedmesh.compat.megatron import parallel_state, tensor_parallel

# Much code imports the module by its short name.
from namedmesh.compat.megatron import parallel_state as mpu
from namedmesh.compat.megatron.binding import bind, current_mesh, install, unbind, uninstall
from namedmesh.compat.state import BindingContext

__all__ = ["BindingContext", "bind", "current_mesh", "install", "unbind", "uninstall"]
__all__ += ["mpu", "parallel_state", "tensor_parallel"]
