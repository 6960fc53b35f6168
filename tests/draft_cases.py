"""Models whose drafts are accepted at times."""

import jax.numpy as jnp


def agreeable(params, scale):
    """The parameters with an MTP block that sees what the trunk sees, less its layers.

    Random weights never agree with each other. With embeddings of size ``scale`` passed on as they
    are and the trunk's own head, the larger the scale the more the two agree.
    """
    embed = params["embed"] / jnp.sqrt(jnp.mean(params["embed"] ** 2, axis=-1, keepdims=True))
    mtp = params["mtp"][0] | {
        "e_proj": scale * jnp.eye(embed.shape[1]),
        "h_proj": 0 * params["mtp"][0]["h_proj"],
        "hc_head": params["hc_head"],
        "norm": params["norm"],
    }
    return params | {"embed": scale * embed, "mtp": [mtp]}
