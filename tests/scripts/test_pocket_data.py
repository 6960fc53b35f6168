"""The retrieval tasks: an answer follows from its prompt, by a parser that shares no code."""

import re

import numpy as np
import pocket_data
import pytest
from pocket_data import ANSWER, FILLER, TASKS, make_sample, training_batch, training_row
from pocket_text import HELD_OUT, TRAIN, english, filler, synthetic

FACT = re.compile(rb"#([a-z]{3}):(\d{3}|@[a-z]{3})\.")


def solve(text: bytes) -> bytes:
    """The answer to the question at the end of ``text``."""
    facts = FACT.findall(text)
    values = {}
    for key, value in facts:
        values.setdefault(key, []).append(value)
    question = text[text.rindex(b"\n?") + 2 :].rstrip(b":")
    if question.startswith(b"*"):
        return b",".join(values[question[1:]])
    if question[:1].isdigit():
        return values[question[1:]][int(question[:1]) - 1]
    if question.startswith(b"@"):
        at, answer = question[1:], b""
        while not (value := values[at][0]).isdigit():
            at = value[1:]
            answer += b"@" + at + b":"
        return answer + value
    keys = question.split(b",")
    assert all(len(values[k]) == 1 for k in keys)
    if len(keys) == 1:
        return values[keys[0]][0]
    return b",".join(k + b":" + values[k][0] for k in keys)


@pytest.mark.parametrize("task", TASKS)
def test_answers_follow_from_prompts_at_exact_lengths(task):
    for length in (128, 700):
        for number in range(8):
            sample = make_sample(f"test {number}", task, length)
            assert len(sample.prompts[0]) == length
            text = b""
            for prompt, answer, places in zip(
                sample.prompts, sample.answers, sample.places, strict=True
            ):
                text += prompt
                assert solve(text) + b"\n" == answer
                needed = [FACT.match(text, p)[2].lstrip(b"@") for p in places]
                assert all(n in answer for n in needed)
                assert needed[-1] in answer.rstrip(b"\n").split(b",")[-1]
                text += answer


def test_training_rows_are_right_and_classified():
    tokens, classes = training_batch(5, 3, 12, 512)
    for row, kinds in zip(tokens, classes, strict=True):
        text, questions = row.tobytes(), 0
        for match in re.finditer(rb"\n\?[^:\n#]+:", text):
            answer = solve(text[: match.end()]) + b"\n"
            assert text[match.end() :].startswith(answer)
            assert (kinds[match.end() : match.end() + len(answer)] == ANSWER).all()
            assert (kinds[match.start() : match.end()] != ANSWER).all()
            questions += len(answer)
        assert questions == (kinds == ANSWER).sum() > 0
        assert (kinds == FILLER).sum() > 50
        for match in FACT.finditer(text):
            assert (kinds[match.start() : match.end()] == pocket_data.UNTRAINED).all()


def test_rows_depend_on_seed_step_and_row_alone():
    first = training_batch(1, 2, 4, 256)
    again = training_batch(1, 2, 2, 256)
    np.testing.assert_array_equal(first[0][:2], again[0])
    np.testing.assert_array_equal(first[1][:2], again[1])
    assert (training_batch(1, 3, 2, 256)[0] != again[0]).any(axis=1).all()
    assert (training_batch(2, 2, 2, 256)[0] != again[0]).any(axis=1).all()


def facts_of(split):
    if split == TRAIN:
        texts = [training_batch(9, step, 16, 512)[0].tobytes() for step in range(4)]
    else:
        samples = [make_sample(str(i), t, 300) for i in range(12) for t in TASKS]
        texts = [b"".join(s.prompts) for s in samples]
    found = [fact for text in texts for fact in FACT.findall(text)]
    return {k for k, _ in found}, {v for _, v in found if v.isdigit()}


def test_evaluation_keys_values_and_text_never_occur_in_training():
    (keys, values), (held_keys, held_values) = facts_of(TRAIN), facts_of(HELD_OUT)
    assert len(keys) > 300 and len(held_keys) > 100
    assert not keys & held_keys and not values & held_values
    for source in (english, synthetic):
        # No held-out passage of some length stands in the training text.
        text = source(HELD_OUT)
        passages = [text[i : i + 120] for i in range(0, len(text) - 120, len(text) // 20)]
        assert not any(p in source(TRAIN) for p in passages)


def test_filler_cannot_be_taken_for_a_fact_or_a_question():
    for split in (TRAIN, HELD_OUT):
        assert not set(english(split) + synthetic(split)) & set(b"#?@")
        assert len(english(split)) > 20_000
        assert max(english(split)) < 128
    import random

    longer = len(english(HELD_OUT)) + len(synthetic(HELD_OUT)) + 1
    assert len(filler(random.Random(0), longer, HELD_OUT)) == longer


def test_the_late_task_needs_an_early_fact_last():
    for number in range(10):
        places = make_sample(str(number), "late", 600).places[0]
        assert places[-1] < 320 < 400 < min(places[:-1])


def test_single_needle_mixture():
    import random

    text, _ = training_row(random.Random(3), 512, pocket_data.SINGLE_ONLY)
    assert re.findall(rb"\n\?[a-z]{3}:", text) == re.findall(rb"\n\?[^:]*:", text)


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="task 'needle' is unknown; tasks are single"):
        make_sample("0", "needle", 300)
    with pytest.raises(ValueError, match="do not fit into"):
        make_sample("0", "multi_needle", 40)
