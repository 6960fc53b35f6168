"""What XLA runs badly on a GPU: each a plain ``jnp`` reference and a Mosaic GPU kernel.

Everything here works under jit, scan, vmap and shard_map, whichever implementation runs.
"""

from pallas_kernels.attention import sparse_attention as sparse_attention
from pallas_kernels.ema import ema_scatter as ema_scatter
from pallas_kernels.hyper import mixing_weights as mixing_weights
from pallas_kernels.observe import top_k_and_observe as top_k_and_observe
from pallas_kernels.scoring import index_scores as index_scores
from pallas_kernels.selection import select_blocks as select_blocks
from pallas_kernels.selection import select_blocks_of_layers as select_blocks_of_layers
from pallas_kernels.topk import top_k_slots as top_k_slots

__all__ = [
    "ema_scatter",
    "index_scores",
    "mixing_weights",
    "select_blocks",
    "select_blocks_of_layers",
    "sparse_attention",
    "top_k_and_observe",
    "top_k_slots",
]
