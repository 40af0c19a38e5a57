"""Adapters between the hooks and the installed Megatron-core."""
