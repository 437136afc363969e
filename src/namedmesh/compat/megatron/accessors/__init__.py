"""Megatron's accessors: what they answer is in the state, and each reads one slot of it."""
