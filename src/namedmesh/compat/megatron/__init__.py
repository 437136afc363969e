"""The Megatron dialect."""
