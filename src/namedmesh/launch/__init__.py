"""Start a job: from the environment to a default process group that all ranks agree on.

It imports ``namedmesh.layout``, ``namedmesh._torch`` and ``namedmesh._errors``.
"""

from namedmesh.launch.default_group import init

__all__ = ["init"]
