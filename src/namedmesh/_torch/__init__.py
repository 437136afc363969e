"""The only package that touches private torch API, and that knows about torch releases.

Each function replaces something that torch does not offer publicly. Its docstring names the public
function that comes closest, and the reason why it is not used.
"""

from namedmesh._torch.execution import *
from namedmesh._torch.group_requests import *
from namedmesh._torch.groups import *
from namedmesh._torch.list_operators import *
from namedmesh._torch.meshes import *
from namedmesh._torch.modules import *
from namedmesh._torch.tensors import *
from namedmesh._torch.training import *
