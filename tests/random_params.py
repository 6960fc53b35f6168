"""Random parameters from numpy: ``init_params`` compiles a program for every shape of a leaf."""

import jax
import jax.numpy as jnp
import numpy as np

from models.params import is_spec, param_specs


def random_params(cfg, seed=0):
    """Float32 parameters, distributed as those of ``models.params.init_params``."""
    rng = np.random.default_rng(seed)

    def leaf(spec):
        if spec.init in ("ones", "zeros"):
            value = np.full(spec.shape, spec.init == "ones")
        elif spec.init == "experts":
            value = rng.random((spec.shape[0], cfg.n_routed_experts)).argsort(axis=1)
            value = value[:, : spec.shape[1]]
        else:
            scale = 0.02 if spec.init == "small" else spec.shape[-1] ** -0.5
            value = scale * rng.standard_normal(spec.shape)
        return jnp.asarray(value.astype(spec.dtype(jnp.float32)))

    return jax.tree.map(leaf, param_specs(cfg), is_leaf=is_spec)
