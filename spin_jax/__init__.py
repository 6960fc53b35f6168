"""SPIN: predictive block selection for DeepSeek-V4's lightning indexer, as pure functions.

A step is ``select_blocks``, scores of the selected blocks from wherever they come, ``observe``.
"""

from pallas_kernels.scoring import slots_of as slots_of
from spin_jax.config import SpinConfig as SpinConfig
from spin_jax.config import block_budget as block_budget
from spin_jax.config import steady_capacity as steady_capacity
from spin_jax.observation import observe as observe
from spin_jax.selection import BlockSelection as BlockSelection
from spin_jax.selection import select_blocks as select_blocks
from spin_jax.selector import SpinSelector as SpinSelector
from spin_jax.selector import recorded_miss as recorded_miss
from spin_jax.selector import savings as savings
from spin_jax.speculative import observe_rows as observe_rows
from spin_jax.speculative import select_rows as select_rows
from spin_jax.state import SpinState as SpinState
from spin_jax.state import init_spin as init_spin
from spin_jax.state import reset as reset

__all__ = [
    "BlockSelection",
    "SpinConfig",
    "SpinSelector",
    "SpinState",
    "block_budget",
    "init_spin",
    "observe",
    "observe_rows",
    "recorded_miss",
    "reset",
    "savings",
    "select_blocks",
    "select_rows",
    "slots_of",
    "steady_capacity",
]
