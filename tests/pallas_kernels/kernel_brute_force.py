"""The operations once more, in numpy loops straight from their formulas."""

import math

import numpy as np

LOWEST = float(np.finfo(np.float32).min)


def index_scores(q, w, keys, num_slots, block_ids, block_size, key_scales=None):
    B, R, n, _ = q.shape
    S = keys.shape[1]
    C = block_ids.shape[1]
    scores = np.full((B, R, C * block_size), -np.inf, np.float64)
    for b in range(B):
        for r in range(R):
            for c in range(C):
                for i in range(block_size):
                    slot = block_ids[b, c] * block_size + i
                    if block_ids[b, c] < 0 or slot >= min(S, num_slots[b, r]):
                        continue
                    total = 0.0
                    for h in range(n):
                        dot = float(np.dot(q[b, r, h], keys[b, slot]))
                        total += w[b, r, h] * (dot if dot > 0 or math.isnan(dot) else 0.0)
                    if key_scales is not None:
                        total *= key_scales[b, slot]
                    bad = math.isnan(total) or total == -math.inf
                    scores[b, r, c * block_size + i] = LOWEST if bad else total
    groups = range(0, C * block_size, 16)
    return scores, np.stack([scores[..., i : i + 16].max(-1) for i in groups], axis=-1)


def top_k_slots(scores, k, block_ids=None, block_size=64):
    """One row of scores: a Python sort by (score descending, position)."""
    usable = [p for p, s in enumerate(scores) if not math.isnan(s) and s != -math.inf]
    best = sorted(sorted(usable, key=lambda p: (-float(scores[p]), p))[:k])
    if block_ids is not None:
        best = [int(block_ids[p // block_size]) * block_size + p % block_size for p in best]
    return best + [-1] * (min(k, len(scores)) - len(best))


def select_blocks(V, D_rev, N, budget, explore, priority, block_size, capacity):
    """One request; D is turned back to distances first."""
    S = len(V)
    D = D_rev[::-1]
    if N == 0:
        return [-1] * capacity, 0
    active = -(-N // block_size)
    predicted = [max(V[i], D[N - 1 - i]) for i in range(min(N, S))]
    pooled = [max(predicted[j * block_size : (j + 1) * block_size]) for j in range(active)]
    forced = {0, (N - 1) // block_size}
    others = sorted(set(range(active)) - forced, key=lambda j: (-float(pooled[j]), j))
    chosen = forced | set(others[: budget - explore - len(forced)])
    rest = sorted(set(range(active)) - chosen, key=lambda j: (-int(priority[j]), j))
    ids = sorted(chosen | set(rest[:explore]))
    return (ids + [-1] * capacity)[:capacity], budget


def ema_scatter(V, D_rev, scores, block_ids, N, block_size, decay):
    """One request, in float64."""
    V, D = V.astype(np.float64), D_rev[::-1].astype(np.float64)
    for c, j in enumerate(block_ids):
        for i in range(block_size):
            slot, z = j * block_size + i, float(scores[c * block_size + i])
            if j < 0 or slot >= N or not math.isfinite(z) or z <= LOWEST:
                continue
            for table, at in ((V, slot), (D, N - 1 - slot)):
                old = 0.0 if table[at] == -np.inf else table[at]
                table[at] = decay * old + (1 - decay) * z
    return V, D[::-1]


def mixing_weights(product, square, scale, base, width, rms_eps, iterations, eps):
    """Token by token, in float64; Sinkhorn is row and column normalisation in turns."""
    m = round(math.sqrt(len(base) + 1)) - 1
    pre, post = np.empty((2, *square.shape, m))
    comb = np.empty((*square.shape, m, m))
    for at in np.ndindex(*square.shape):
        x = product[at].astype(np.float64) / math.sqrt(square[at] / width + rms_eps)
        a, b, c = np.split(x * np.repeat(scale, (m, m, m * m)) + base, [m, 2 * m])
        pre[at], post[at] = 1 / (1 + np.exp(-a)) + eps, 2 / (1 + np.exp(-b))
        c = c.reshape(m, m)
        c = np.exp(c - c.max(axis=1, keepdims=True))
        c = c / c.sum(axis=1, keepdims=True) + eps
        for turn in range(2 * iterations - 1):
            c = c / (c.sum(axis=turn % 2, keepdims=True) + eps)
        comb[at] = c
    return pre, post, comb


def sparse_attention(q, tables, lists, sink, scale):
    """``tables`` of rows and ``lists`` [B, T, n] of those that each token sees, -1 for none."""
    out = np.zeros(q.shape, np.float64)
    for b, t, h in np.ndindex(*q.shape[:3]):
        seen = [
            table[b][ids[b, t][ids[b, t] >= 0]] for table, ids in zip(tables, lists, strict=True)
        ]
        rows = np.concatenate(seen).astype(np.float64)
        s = rows @ q[b, t, h].astype(np.float64) * scale
        top = max(float(sink[h]), s.max(initial=-np.inf))
        e = np.exp(s - top)
        out[b, t, h] = e @ rows / (e.sum() + np.exp(float(sink[h]) - top))
    return out
