"""The only package that touches private torch API, and that knows about torch releases.

Each function replaces something that torch does not offer publicly. Its docstring names the public
function that comes closest, and the reason why it is not used.

namedmesh changes torch for the whole process in five places:

- ``list_operators.accept_mixed_lists`` adds handlers to DTensor;
- ``groups`` replaces default arguments of ``torch.distributed.nn.functional``;
- ``tensors.hide_redistribution_warnings`` filters a log, on all ranks except rank 0;
- ``training.checkpoint_names`` notes the steps of optimizers;
- ``tensor_parallel.gradients.install_optimizer_step_hook`` hooks the steps of optimizers.

The guide has a page about them; what is not listed there must not exist.
"""
