"""SPIN for one request in loops and dictionaries, straight from the formulas."""

import math
from fractions import Fraction

import numpy as np

f32 = np.float32


def exact(x):
    return Fraction(repr(x))


def rounded(x, how):
    return {
        "floor": math.floor,
        "ceil": math.ceil,
        "nearest": lambda y: math.floor(y + Fraction(1, 2)),
    }[how](x)


def highest(entries, k):
    """The k entries of a {index: value} with the highest values, ties to the lowest index."""
    return set(sorted(entries, key=lambda i: (-entries[i], i))[: max(k, 0)])


def pooled(values, how):
    values = sorted(values, reverse=True)
    if how == "max":
        return f32(values[0])
    if how == "top4":
        values = values[:4]
    return f32(f32(sum(map(float, values))) / f32(len(values)))


class Request:
    def __init__(self, cfg, top_k):
        self.cfg, self.top_k = cfg, top_k
        self.reset()

    def reset(self):
        self.V, self.D, self.age = {}, {}, {}
        self.first = True

    def predicted(self, key, offset):
        nothing = f32(0) if self.cfg.unobserved == "zero" else f32(-np.inf)
        return max(self.V.get(key, nothing), self.D.get(offset, nothing))

    def block_slots(self, j, n):
        b = self.cfg.block_size
        return range(j * b, min((j + 1) * b, n))

    def block_scores(self, n):
        cfg, b, q = self.cfg, self.cfg.block_size, n - 1
        if cfg.reduction == "A2":
            return {j: self.predicted(j, q // b - j) for j in range(math.ceil(n / b))}
        how = "max" if cfg.reduction == "A0" else cfg.pooling
        return {
            j: pooled([self.predicted(i, q - i) for i in self.block_slots(j, n)], how)
            for j in range(math.ceil(n / b))
        }

    def select(self, n):
        """(blocks that are certain, blocks that one may explore, how many are explored)."""
        cfg, b = self.cfg, self.cfg.block_size
        if n == 0:
            return set(), set(), 0
        num_blocks = math.ceil(n / b)
        every = set(range(num_blocks))
        if self.first:
            self.first = False
            return every, set(), 0
        forced = {0, (n - 1) // b}
        gamma = 0 if cfg.policy == "none" else exact(cfg.exploration)
        S = self.block_scores(n)
        if cfg.reduction == "A0":
            slots = {i: self.predicted(i, n - 1 - i) for i in range(n)}
            budget = max(self.top_k, math.ceil((1 - exact(cfg.sparsity)) * n))
            best = {i // b for i in highest(slots, budget)} | forced
            e = min(rounded(gamma * len(best), cfg.exploration_rounding), num_blocks - len(best))
        else:
            m = min(
                num_blocks,
                max(math.ceil(self.top_k / b), math.ceil((1 - exact(cfg.sparsity)) * num_blocks)),
            )
            m = max(m, len(forced))
            e = min(rounded(gamma * m, cfg.exploration_rounding), m - len(forced))
            rest = {j: s for j, s in S.items() if j not in forced}
            best = forced | highest(rest, m - e - len(forced))
        free = every - best
        if cfg.policy == "age":
            best, e = best | highest({j: self.age.get(j, 0) for j in free}, e), 0
        elif cfg.policy == "staleness" and free:
            finite = [S[j] for j in free if np.isfinite(S[j])]
            stale = {}
            for j in free:
                important = f32(S[j] - min(finite)) if np.isfinite(S[j]) else f32(0)
                stale[j] = f32(self.age.get(j, 0)) * (important + f32(1e-6))
            best, e = best | highest(stale, e), 0
        return best, every - best, e

    def observe(self, n, blocks, z):
        """``z`` gives the score of every visible slot."""
        cfg, b, q = self.cfg, self.cfg.block_size, n - 1
        a = f32(cfg.decay)

        def ema(entries, key, value):
            old = entries.get(key, f32(0))
            entries[key] = f32(a * old + (1 - a) * f32(value))

        def is_observation(x):
            return np.isfinite(x) and x > np.finfo(f32).min

        for j in sorted(blocks):
            values = [(i, z[i]) for i in self.block_slots(j, n) if is_observation(z[i])]
            if cfg.reduction == "A2":
                values = [pooled([x for _, x in values], cfg.pooling)] if values else []
                values = [(j, x) for x in values]
            for key, value in values:
                ema(self.V, key, value)
                ema(self.D, (q // b if cfg.reduction == "A2" else q) - key, value)
        for j in range(math.ceil(n / b)):
            self.age[j] = 0 if j in blocks else self.age.get(j, 0) + 1
