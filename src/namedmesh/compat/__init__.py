"""The dialects: each module answers for one legacy API from a :class:`namedmesh.NamedMesh`."""
