"""Every comparison of values between ranks.

The ranks compare before the step of an optimizer, or in ``clip_grad_norm_``, on steps 1, 2, 4 and so
on up to 1024. In a forward or backward, layers only keep references to tensors. A check never
changes a number, and nothing that it computes is seen by autograd or by a dispatch mode.

This room imports meshes and how tensors are sharded; tensor parallelism and training import it.
"""
