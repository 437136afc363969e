"""From Megatron's ``parallel_state`` to a mesh, call by call.

This page lists every name of ``megatron.core.parallel_state`` beside the expression on a
:class:`namedmesh.NamedMesh` that gives the same answer. ``python -m namedmesh migrate PATH`` finds the calls in a
code base and prints the line of the page for each; with ``--write`` it replaces those that are certain.

Step by step
------------

1. Keep everything running: ``import namedmesh.compat.megatron; namedmesh.compat.megatron.install()``, before the
   first import of ``megatron.core``. Unmodified code now asks ``namedmesh.compat.megatron.parallel_state``.
2. Make the mesh where the code called ``initialize_model_parallel``, and bind it:
   ``mesh = namedmesh.init_mesh(pp=4, dp=-1, tp=2)``, then ``namedmesh.compat.megatron.bind(mesh)``. Old and new
   calls answer from the same process groups. Axes are slowest first; Megatron's order string is fastest first.
3. Run once, on every rank, what the remarks of the table call *once*. Afterwards every call is a look-up.
4. Move call by call, in any order, with tests in between. ``namedmesh.current_mesh()`` finds the mesh where it was
   not passed on.
5. When ``migrate`` finds nothing any more: ``namedmesh.compat.megatron.uninstall()``.

How to read the table
---------------------

``mesh`` is the mesh. A number in brackets is a remark below. *stays* marks what has no replacement on a mesh: it goes
on working in ``namedmesh.compat.megatron.parallel_state``, and the remark says what to do in the long run. So does an
assignment to a private name, which patches that module. The *once* statements are written for Megatron's default order
``tp-cp-ep-dp-pp``; with another one, give the sizes of a view in the order of the mesh.
"""

from __future__ import annotations

from namedmesh.migrate.findings import Finding, Problem, Scan
from namedmesh.migrate.report import advise, as_json, as_text, page
from namedmesh.migrate.rules import Advice, Row
from namedmesh.migrate.scan import scan
from namedmesh.migrate.table import TABLE

__all__ = [
    "TABLE",
    "Advice",
    "Finding",
    "Problem",
    "Row",
    "Scan",
    "advise",
    "as_json",
    "as_text",
    "page",
    "scan",
]

__doc__ = f"{__doc__ or ''}\n{page()}"  # what help() shows
