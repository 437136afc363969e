"""Layouts: named axes, their sizes and order, and the ranks that follow from them.

Arithmetic on ints, without torch. It imports only ``namedmesh._errors``.
"""

from namedmesh.layout.layout import Layout

__all__ = ["Layout"]
