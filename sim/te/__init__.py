"""CPU stand-in for Transformer Engine 2.17.1: real arithmetic, the real order of gradient work.

`installed()` makes `import transformer_engine` find it. It models bf16 and fp32 training of
Megatron's own Transformer Engine layer spec on one tensor parallel rank, and refuses the rest by
name. It never imports Megatron and does not depend on the fake CUDA runtime.
"""

from sim.te.modules import VERSION, installed, stand_in_modules

__all__ = ["VERSION", "installed", "stand_in_modules"]
