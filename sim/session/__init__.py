"""One place that runs ranks: Megatron brought up, a world assembled, traces and numbers back."""
