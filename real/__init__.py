"""The product: hook installation for MFSDP v2 under combined 1F1B, and what runs it on GPUs."""
