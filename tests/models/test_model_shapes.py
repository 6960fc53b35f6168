"""The released models' sizes without allocating them, and arguments that do not fit."""

import math

import jax
import jax.numpy as jnp
import pytest
from oracle_cases import variants

from models.cache import init_cache
from models.model import forward, mtp_forward
from models.params import abstract_params, count_params, init_params
from models.presets import flash_config, pro_config, tiny_config

# The spec's "Configurations" table.
SHARED = {
    "vocab_size": 129280,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "o_lora_rank": 1024,
    "num_experts_per_tok": 6,
    "num_hash_layers": 3,
    "num_nextn_predict_layers": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "hc_mult": 4,
}
TABLE = {
    "flash": SHARED
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 43,
        "num_attention_heads": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "n_routed_experts": 256,
        "moe_intermediate_size": 2048,
        "compress_ratios": [0, 0] + [4, 128] * 20 + [4] + [0],
    },
    "pro": SHARED
    | {
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4] + [0],
    },
}
# Worked out on paper from the table: the 284B and, MTP block included, the 1.6T class.
MODELS = [
    ("flash", flash_config, 284_332_240_471, 290_942_289_362),
    ("pro", pro_config, 1_572_997_201_763, 1_598_837_347_742),
]


@pytest.mark.parametrize("name,config,trunk,whole", MODELS)
def test_parameter_counts(name, config, trunk, whole):
    cfg = config()
    shapes = jax.eval_shape(lambda key: init_params(cfg, key, jnp.bfloat16), jax.random.key(0))
    leaves = jax.tree.leaves(shapes)
    trained = sum(math.prod(x.shape) for x in leaves if x.dtype != jnp.int32)
    table = {
        tensor: math.prod(shape)
        for tensor, (shape, kind) in variants.tensors(TABLE[name]).items()
        if kind != "experts"
    }
    assert trained == sum(table.values()) == count_params(cfg) == whole
    without_mtp = (n for tensor, n in table.items() if not tensor.startswith("mtp."))
    assert sum(without_mtp) == count_params(cfg, mtp=False) == trunk
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(
        lambda x: (x.shape, x.dtype), abstract_params(cfg, jnp.bfloat16)
    )


@pytest.mark.parametrize("name,config", [model[:2] for model in MODELS])
def test_a_step_of_the_released_models(name, config):
    cfg = config()
    params = abstract_params(cfg, jnp.bfloat16)
    cache = jax.eval_shape(lambda: init_cache(cfg, 2, 4096, dtype=jnp.bfloat16))
    mtp = jax.eval_shape(lambda: init_cache(cfg, 2, 4096, dtype=jnp.bfloat16, mtp=True))
    tokens = jax.ShapeDtypeStruct((2, 3), jnp.int32)

    def step(params, tokens, cache, mtp):
        out = forward(params, tokens, cache, cfg, trace=True)
        return out, mtp_forward(params, out.streams, tokens, mtp, cfg)

    out, draft = jax.eval_shape(step, params, tokens, cache, mtp)
    for found in (out, draft):
        assert found.logits.shape == (2, 3, 129280) and found.logits.dtype == jnp.float32
        assert found.streams.shape == (2, 3, 4, cfg.hidden_size)
        assert found.streams.dtype == jnp.bfloat16
    same = jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, cache, out.cache)
    assert jax.tree.all(same)
    slots = [t.slots.shape for t in out.trace if t.slots is not None]
    assert slots == [(2, 3, cfg.index_topk)] * TABLE[name]["compress_ratios"].count(4)


def test_dtypes_of_parameters():
    """Float32 where the release has it whatever the compute type, ids int32, the rest bfloat16."""
    tree = abstract_params(tiny_config(), jnp.bfloat16)
    layer = tree["layers"][2]
    for leaf in (
        *jax.tree.leaves(tree["hc_head"]),
        *jax.tree.leaves((layer["hc_attn"], layer["hc_ffn"])),
        layer["attn"]["attn_sink"],
        layer["attn"]["compressor"]["ape"],
        layer["attn"]["indexer"]["compressor"]["ape"],
        tree["layers"][3]["ffn"]["bias"],
    ):
        assert leaf.dtype == jnp.float32
    assert layer["ffn"]["tid2eid"].dtype == jnp.int32
    for leaf in (tree["embed"], tree["norm"], layer["attn"]["wq_a"], layer["ffn"]["experts"]["w1"]):
        assert leaf.dtype == jnp.bfloat16


@pytest.mark.parametrize("shape", [(2,), (2, 0), (3, 1), (2, 1, 1)])
def test_tokens_that_do_not_fit_the_cache(shape):
    cfg = tiny_config()
    with pytest.raises(ValueError, match=r"tokens have shape .*; expected \[2, T >= 1\]"):
        forward(abstract_params(cfg), jnp.zeros(shape, jnp.int32), init_cache(cfg, 2, 8), cfg)


def test_selector_state_of_another_model():
    cfg = tiny_config()
    with pytest.raises(ValueError, match="selector_state has 1 entries; the model has 3 CSA"):
        forward(
            abstract_params(cfg),
            jnp.zeros((1, 1), jnp.int32),
            init_cache(cfg, 1, 8),
            cfg,
            selector_state=((),),
        )


def test_mtp_of_a_model_without_it():
    cfg = tiny_config()
    with pytest.raises(ValueError, match="no MTP block"):
        mtp_forward({"mtp": []}, None, jnp.zeros((1, 1), jnp.int32), None, cfg)


@pytest.mark.parametrize("batch,max_len,max_draft", [(0, 8, 7), (1, 0, 7), (1, 8, -1)])
def test_caches_of_no_size(batch, max_len, max_draft):
    with pytest.raises(ValueError, match="must be at least 1"):
        init_cache(tiny_config(), batch, max_len, max_draft=max_draft)
