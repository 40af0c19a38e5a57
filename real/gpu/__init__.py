"""The real runtime: one process a GPU, NCCL, Transformer Engine."""
