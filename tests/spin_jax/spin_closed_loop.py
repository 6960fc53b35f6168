"""A step of SPIN on recorded dense scores: the state sees those of the selected blocks alone."""

import jax.numpy as jnp

from spin_jax import observe, select_blocks, slots_of


def closed_loop_step(state, num_slots, scores, cfg, top_k, capacity=None):
    """The selection, and the state after it, from dense scores [B, S]."""
    selection, state = select_blocks(state, num_slots, cfg, top_k=top_k, capacity=capacity)
    slots = slots_of(selection.block_ids, cfg.block_size)
    z = jnp.take_along_axis(scores, jnp.clip(slots, 0, scores.shape[1] - 1), axis=1)
    return selection, observe(state, selection, z, num_slots, cfg)
