"""Most programs here run a few times at most: unoptimised code is the quicker way to a result."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
