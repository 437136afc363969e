"""``namedmesh migrate``: from Megatron's and fairscale's calls to a mesh; ``pip install 'namedmesh[migrate]'``."""
