"""Inputs that break top-k, selection and scoring implementations."""

import numpy as np


def adversarial_scores(length, k, seed=0):
    """Named float32 rows of ``length`` scores."""
    rng = np.random.default_rng(seed)
    normal = rng.normal(size=length).astype(np.float32)
    tiny = np.float32(1e-45)
    edge = np.where(rng.random(length) < 0.5, 1.0, 0.0).astype(np.float32)
    edge[rng.choice(length, k // 2, replace=False)] = 2.0
    few = np.full(length, -np.inf, np.float32)
    few[rng.choice(length, k // 3, replace=False)] = normal[: k // 3]
    holes = normal.copy()
    holes[rng.random(length) < 0.3] = np.nan
    holes[rng.random(length) < 0.3] = -np.inf
    infinite = normal.copy()
    infinite[rng.choice(length, 5, replace=False)] = np.inf
    lowest = np.full(length, np.finfo(np.float32).min, np.float32)
    lowest[::7] = -np.inf
    clustered = np.sort(normal)[::-1].copy()
    clustered[: length // 2] += 100
    return {
        "normal": normal,
        "equal": np.full(length, 0.25, np.float32),
        "zeros": np.where(np.arange(length) % 2, 0.0, -0.0).astype(np.float32),
        "ascending": np.arange(length, dtype=np.float32),
        "descending": -np.arange(length, dtype=np.float32),
        "ties at the edge": edge,
        "three values": rng.integers(-1, 2, length).astype(np.float32),
        "few selectable": few,
        "none selectable": np.full(length, -np.inf, np.float32),
        "nan and -inf": holes,
        "inf": infinite,
        "lowest finite": lowest,
        "denormals": (rng.integers(-40, 40, length) * tiny).astype(np.float32),
        "close": (1 + rng.integers(0, 300, length) * np.float32(2**-23)).astype(np.float32),
        "negative": -np.abs(normal) - 1,
        "one block holds all": clustered,
    }


def unwritten(scores, counts):
    """The scores from each row's count on as memory may hold them, and the maxima of 16."""
    place = np.arange(scores.shape[-1])
    held = place < np.asarray(counts)[..., None]
    some = np.where(place % 3, np.inf, np.nan).astype(np.float32)
    groups = np.where(held, scores, -np.inf).reshape(*scores.shape[:-1], -1, 16).max(-1)
    return np.where(held, scores, some), np.where(held[..., 15::16], groups, some[::16])


def ascending_blocks(rng, num_blocks, count, capacity):
    """``count`` distinct blocks in ascending order, padded with -1."""
    ids = np.full(capacity, -1, np.int32)
    ids[:count] = np.sort(rng.choice(num_blocks, count, replace=False))
    return ids


def selection_case(rng, slots, block, ties):
    """One request's arguments of select_blocks."""
    num_blocks = -(-slots // block)
    draw = rng.integers(-3, 3, (2, slots)) if ties else rng.normal(size=(2, slots))
    V, D_rev = draw.astype(np.float32)
    V[rng.random(slots) < 0.2] = -np.inf
    D_rev[rng.random(slots) < 0.2] = -np.inf
    N = int(rng.integers(0, slots + 1))
    active = -(-N // block)
    forced = min(active, 2)
    budget = int(rng.integers(forced, active + 1))
    explore = int(rng.integers(0, budget - forced + 1))
    priority = rng.integers(0, 4 if ties else 2**32, num_blocks, dtype=np.uint32)
    return V, D_rev, N, budget, explore, priority


MIXING = {"width": 96, "rms_eps": 1e-3, "eps": 1e-6}


def mixing_case(rng, tokens, m):
    """Arguments of mixing_weights with logits of a few units."""
    rows = m * (m + 2)
    product = 10 * rng.normal(size=(*tokens, rows)).astype(np.float32)
    square = MIXING["width"] * rng.uniform(4, 40, tokens).astype(np.float32)
    scale = np.array([1, -0.5, 1.5], np.float32)
    return product, square, scale, rng.normal(size=rows).astype(np.float32)


def attention_case(rng, batch, rows, heads, width, *, window=(70, 60), slots=200, listed=100):
    """Arguments of sparse_attention, with lists of all lengths, empty ones among them."""
    held, seen = window
    q = rng.normal(size=(batch, rows, heads, width)).astype(np.float32)
    tables = [rng.normal(size=(batch, n, width)).astype(np.float32) for n in (held, slots)]
    window_ids = np.full((batch, rows, seen), -1, np.int32)
    slot_ids = np.full((batch, rows, listed), -1, np.int32)
    for at, (b, t) in enumerate(np.ndindex(batch, rows)):
        counts = [(seen, listed), (1, 0), (0, listed - 1), (0, 0), (seen // 2, listed // 2)]
        n, k = counts[at % len(counts)]
        window_ids[b, t, :n] = rng.permutation(held)[:n]
        slot_ids[b, t, :k] = rng.permutation(slots)[:k]
    num_slots = rng.integers(0, slots + 1, (batch, rows)).astype(np.int32)
    num_slots[0, 0] = slots
    sink = rng.normal(size=heads).astype(np.float32)
    return q, tables[0], window_ids, sink, tables[1], slot_ids, num_slots
