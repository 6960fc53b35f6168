"""Whole prompts of every variant against the transformers library's outputs."""

import numpy as np
import pytest
from oracle_cases import (
    TOLERANCE,
    Case,
    advance,
    assert_slots,
    cut,
    empty,
    golden,
    load_case,
    variants,
)


def assert_prefill(case: Case) -> None:
    rows, total = case.ids.shape
    start, count = np.zeros(rows, np.int32), np.full(rows, total, np.int32)
    tokens, following = cut(case.ids, start, total)
    _, out = advance(case, empty(case.cfg, rows, total), tokens, following, (count, count - 1))
    for layer, slots in zip(case.cfg.csa_layers, out.slots, strict=True):
        assert_slots(slots, case.expected[f"slots_{layer}"])
    np.testing.assert_allclose(out.logits, case.expected["logits"], rtol=0, atol=TOLERANCE)
    assert (out.mtp_logits is None) == ("mtp_logits" not in case.expected)
    if out.mtp_logits is not None:
        np.testing.assert_allclose(
            out.mtp_logits[:, :-1], case.expected["mtp_logits"], rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("name", list(variants.VARIANTS))
def test_whole_prompt(name, tmp_path):
    assert_prefill(load_case(name, golden(name), tmp_path))
