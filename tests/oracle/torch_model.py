"""The transformers library's DeepSeek-V4 on a release folder, with what its port leaves out.

Added here with the library's own modules: the MTP block, and as hooks expert weights that are not
normalised, simulated quantisation, a rule for equal index scores (the lowest slot), and a record
of how close every choice of slots and experts was.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4 as hf

_RENAMES = (
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.attn\.indexer\.", ".self_attn.compressor.indexer."),
    (r"\.attn\.", ".self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"(compressor|indexer)\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.wq_a\.", ".q_a_proj."),
    (r"\.q_norm\.", ".q_a_norm."),
    (r"\.wq_b\.", ".q_b_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.wo_a\.", ".o_a_proj."),
    (r"\.wo_b\.", ".o_b_proj."),
    (r"\.ffn\.", ".mlp."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"\.shared_experts\.w1\.", ".shared_experts.gate_proj."),
    (r"\.shared_experts\.w2\.", ".shared_experts.down_proj."),
    (r"\.shared_experts\.w3\.", ".shared_experts.up_proj."),
)
_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
}


def library_config(cfg: dict[str, Any]) -> DeepseekV4Config:
    """The library's configuration of a release's ``config.json``."""
    plain = {
        k: cfg[k]
        for k in (
            "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim q_lora_rank "
            "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk "
            "n_routed_experts num_experts_per_tok moe_intermediate_size num_hash_layers "
            "routed_scaling_factor swiglu_limit hc_mult hc_sinkhorn_iters hc_eps rms_norm_eps "
            "compress_ratios qk_rope_head_dim max_position_embeddings scoring_func"
        ).split()
    }
    if "rope_parameters" in cfg:
        rope = copy.deepcopy(cfg["rope_parameters"])
    else:
        scaling = dict(cfg.get("rope_scaling") or {"type": "default"})
        scaling["rope_type"] = scaling.pop("type", scaling.get("rope_type"))
        rope = {
            "main": {"rope_type": "default", "rope_theta": cfg["rope_theta"]},
            "compress": {**scaling, "rope_theta": cfg["compress_rope_theta"]},
        }
    for table in rope.values():
        table["partial_rotary_factor"] = cfg["qk_rope_head_dim"] / cfg["head_dim"]
    if rope["compress"]["rope_type"] == "yarn":
        rope["compress"]["attention_factor"] = 1.0
    config = DeepseekV4Config(**plain, rope_parameters=rope)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"
    if config.qk_rope_head_dim != cfg["qk_rope_head_dim"]:
        raise SystemExit(f"the library makes the rotary width {config.qk_rope_head_dim}")
    return config


def library_state(
    values: dict[str, torch.Tensor], prefix: str, target: str, experts: int
) -> dict[str, torch.Tensor]:
    """The tensors under ``prefix`` by the library's names under ``target``, experts stacked."""
    state, single = {}, {}
    for name, value in values.items():
        if not name.startswith(prefix):
            continue
        value = value.float() if value.is_floating_point() else value
        if ".ffn.experts." in name:
            single[name] = value
            continue
        rest = name.removeprefix(prefix)
        for pattern, replacement in _RENAMES:
            rest = re.sub(pattern, replacement, "." + rest).removeprefix(".")
        state[target + rest] = value
    for stem in {re.sub(r"ffn\.experts\..*", "", name) for name in single}:

        def stack(part: str, stem: str = stem) -> torch.Tensor:
            return torch.stack(
                [single.pop(f"{stem}ffn.experts.{e}.{part}.weight") for e in range(experts)]
            )

        to = target + stem.removeprefix(prefix) + "mlp.experts."
        state[to + "gate_up_proj"] = torch.cat((stack("w1"), stack("w3")), dim=1)
        state[to + "down_proj"] = stack("w2")
    if single:
        raise SystemExit(f"experts beyond n_routed_experts: {sorted(single)[:4]}")
    return state


class Mtp(torch.nn.Module):
    """``x' = e_proj(enorm(embed)) + h_proj(hnorm(stream))``, one sliding block, own head."""

    def __init__(self, config: DeepseekV4Config) -> None:
        super().__init__()
        extended = copy.deepcopy(config)
        extended.num_hidden_layers += 1
        extended.layer_types = [*config.layer_types, "sliding_attention"]
        extended.mlp_layer_types = [*config.mlp_layer_types, "moe"]
        extended._attn_implementation = extended._experts_implementation = "eager"
        width, eps = config.hidden_size, config.rms_norm_eps
        self.window = config.sliding_window
        self.e_proj = torch.nn.Linear(width, width, bias=False)
        self.h_proj = torch.nn.Linear(width, width, bias=False)
        self.enorm, self.hnorm, self.norm = (hf.DeepseekV4RMSNorm(width, eps) for _ in range(3))
        self.block = hf.DeepseekV4DecoderLayer(extended, config.num_hidden_layers)
        self.hc_head = hf.DeepseekV4HyperHead(config)
        self.rotary = hf.DeepseekV4RotaryEmbedding(config)

    def forward(self, streams: torch.Tensor, embedded: torch.Tensor, tokens: torch.Tensor):
        x = self.e_proj(self.enorm(embedded))[:, :, None] + self.h_proj(self.hnorm(streams))
        count = tokens.shape[1]
        at = torch.arange(count)
        age = at[:, None] - at[None]
        mask = torch.zeros(count, count).masked_fill((age < 0) | (age >= self.window), -torch.inf)
        angles = self.rotary(embedded, position_ids=at[None], layer_type="main")
        x = self.block(
            x,
            input_ids=tokens,
            position_embeddings={"main": angles},
            position_ids=at[None],
            attention_mask=mask[None, None],
        )
        return self.norm(self.hc_head(x))


class Oracle:
    """A loaded model; :meth:`run` gives everything that the tests compare."""

    def __init__(self, folder: Path) -> None:
        cfg = json.loads((folder / "config.json").read_text())
        values = load_file(folder / "model.safetensors")
        self.cfg, config = cfg, library_config(cfg)
        self.model = DeepseekV4ForCausalLM(config).float().eval()
        state = {_TOP[k]: values[k].float() for k in _TOP}
        for part in ("fn", "base", "scale"):
            state[f"model.hc_head.hc_{part}"] = values[f"hc_head_{part}"]
        experts = cfg["n_routed_experts"]
        state |= library_state(values, "layers.", "model.layers.", experts)
        used = set(_TOP) | {k for k in values if k.startswith(("hc_head_", "layers."))}
        self.model.load_state_dict(state, strict=True)
        self.mtp = None
        if cfg["num_nextn_predict_layers"]:
            self.mtp = Mtp(config).float().eval()
            state = library_state(values, "mtp.0.", "block.", experts)
            own = ("e_proj.", "h_proj.", "enorm.", "hnorm.", "norm.", "hc_head_")
            for name in [k for k in state if k.removeprefix("block.").startswith(own)]:
                to = name.removeprefix("block.").replace("hc_head_", "hc_head.hc_")
                state[to] = state.pop(name)
            used |= {k for k in values if k.startswith("mtp.0.")}
            self.mtp.load_state_dict(state, strict=True)
        if extra := set(values) - used:
            raise SystemExit(f"tensors that nothing reads: {sorted(extra)[:8]}")
        self.simulate = False
        self._hook()

    def _hook(self) -> None:
        self.slots: dict[int, torch.Tensor] = {}
        self.slot_margin = self.expert_margin = float("inf")
        self.streams: torch.Tensor | None = None
        rotary = self.cfg["qk_rope_head_dim"]

        def keep_streams(module, args, output):
            self.streams = output

        def lowest_slot_wins(module, args, scores):
            self._note_slot_margin(scores)
            order = torch.argsort(scores, dim=-1, descending=True, stable=True)
            return -torch.argsort(order, dim=-1).float()

        def on_fp4_grid(module, args):
            if not self.simulate:
                return None
            q, keys, hidden = args
            return simulate_fp4(hadamard(q)), simulate_fp4(hadamard(keys)), hidden

        def on_fp8_grid(module, args, output):
            if not self.simulate or output.shape[-1] == rotary:
                return None
            plain = simulate_fp8(output[..., : output.shape[-1] - rotary])
            return torch.cat((plain, output[..., output.shape[-1] - rotary :]), dim=-1)

        def route(module, args, output):
            logits, weights, chosen = output
            scores = torch.nn.functional.softplus(logits).sqrt()
            if isinstance(module, hf.DeepseekV4TopKRouter):
                moved = scores + module.e_score_correction_bias
                best = moved.sort(dim=-1, descending=True).values
                if module.top_k < module.num_experts:
                    gap = best[:, module.top_k - 1] - best[:, module.top_k]
                    self.expert_margin = min(self.expert_margin, gap.min().item())
            if not self.cfg["norm_topk_prob"]:
                weights = scores.gather(1, chosen) * module.routed_scaling_factor
            return logits, weights, chosen

        self.model.model.layers[-1].register_forward_hook(keep_streams)
        blocks = list(self.model.model.layers) + ([self.mtp.block] if self.mtp else [])
        for i, layer in enumerate(blocks):
            layer.mlp.gate.register_forward_hook(route)
            # Rotation leaves the other channels alone, so their grid may come before it.
            layer.self_attn.kv_norm.register_forward_hook(on_fp8_grid)
            compressor = layer.self_attn.compressor
            if compressor is not None:
                compressor.kv_norm.register_forward_hook(on_fp8_grid)
            if isinstance(compressor, hf.DeepseekV4CSACompressor):
                compressor.indexer.scorer.register_forward_pre_hook(on_fp4_grid)
                compressor.indexer.scorer.register_forward_hook(lowest_slot_wins)
                compressor.indexer.register_forward_hook(
                    lambda module, args, output, i=i: self.slots.update({i: output})
                )

    def _note_slot_margin(self, scores: torch.Tensor) -> None:
        """Smallest gap at the edge of the selection, exact zeros against each other apart."""
        k = self.cfg["index_topk"]
        for p in range(scores.shape[1]):
            visible = (p + 1) // 4
            if visible <= k:
                continue
            best = scores[:, p, :visible].sort(dim=-1, descending=True).values
            gap = best[:, k - 1] - best[:, k]
            tied_at_zero = (best[:, k - 1] == 0) & (best[:, k] == 0)
            gap = torch.where(tied_at_zero, torch.inf, gap)
            self.slot_margin = min(self.slot_margin, gap.min().item())

    @torch.no_grad()
    def run(self, ids: torch.Tensor, *, simulate: bool = False) -> dict[str, torch.Tensor]:
        """Float32 ``logits``; ``mtp_logits``; per CSA layer the chosen slots, descending."""
        self.simulate = simulate
        self.slot_margin = self.expert_margin = float("inf")
        ids = ids.long()
        out = {"logits": self.model(input_ids=ids, use_cache=False).logits}
        if self.mtp is not None:
            streams, following = self.streams[:, :-1], ids[:, 1:]
            x = self.mtp(streams, self.model.model.embed_tokens(following), following)
            out["mtp_logits"] = self.model.lm_head(x)
        for i, slots in self.slots.items():
            out[f"slots_{i}"] = slots.sort(dim=-1, descending=True).values.to(torch.int16)
        return out


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Rotation by the Hadamard matrix of Sylvester's order, by butterflies."""
    width = x.shape[-1]
    shape, half = x.shape, 1
    x = x.reshape(-1, width)
    while half < width:
        pairs = x.reshape(-1, width // (2 * half), 2, half)
        x = torch.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), dim=2)
        x, half = x.reshape(-1, width), 2 * half
    return x.reshape(shape) * width**-0.5


def _blocks(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    return list(x.split(size, dim=-1))


def simulate_fp8(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 64 on the e4m3 grid, scale ``2^ceil(log2(max(amax, 1e-4) / 448))``."""
    done = []
    for block in _blocks(x, 64):
        amax = block.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2((amax / 448).double()))).float()
        done.append((block / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(done, dim=-1)


def simulate_fp4(x: torch.Tensor) -> torch.Tensor:
    """Blocks of 32 on the e2m1 grid, scale ``2^ceil(log2(amax / 6))``, ties to even codes."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    done = []
    for block in _blocks(x, 32):
        amax = block.abs().amax(dim=-1, keepdim=True)
        scale = torch.exp2(torch.ceil(torch.log2((amax / 6).double()))).float()
        scale = torch.where(amax > 0, scale, torch.ones_like(scale))
        size = (block / scale).abs()
        distance = (size[..., None] - grid).abs()
        nearest = distance == distance.amin(dim=-1, keepdim=True)
        even = torch.arange(8) % 2 == 0
        code = (nearest.int() * 2 + (nearest & even).int()).argmax(dim=-1)
        done.append(grid[code] * block.sign() * scale)
    return torch.cat(done, dim=-1)
