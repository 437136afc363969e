"""Migration from Megatron's ``parallel_state`` to a mesh; :mod:`namedmesh.compat.migration` is its public module."""
