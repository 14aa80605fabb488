"""Sequences by id in one cache: each keeps its own rows, whatever the others do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from d3d.model.attention import attend
from d3d.model.kv_cache import SPARE_TOKENS, KVCache, PassThrough


def new_cache(ids: Sequence[int] = (0, 1, 2), capacity: int = 10, layers: int = 2) -> KVCache:
    cache = KVCache(layers, 1, 2, torch.float32, torch.device("cpu"))
    for sequence_id in ids:
        cache.open(sequence_id, capacity)
    return cache


def rows(*values: list[float]) -> Tensor:
    """[batch, 1 head, rows, head_dim 2], each row its value twice."""
    return (
        torch.tensor(values, dtype=torch.float32)[:, None, :, None]
        .expand(-1, -1, -1, 2)
        .contiguous()
    )


def add(cache: KVCache, values: Tensor, kept: list[int], ids: Sequence[int] | None = None) -> None:
    """A pass over the sequences `ids`, neighbours in the cache; all of them by default."""
    window = cache.window(cache.ids if ids is None else ids)
    for layer in range(2):
        window.append(layer, values + 100 * layer, -values)
    window.advance(kept)


def held(cache: KVCache, sequence_id: int, layer: int = 0) -> list[float]:
    length = cache.length(sequence_id)
    keys, values = cache.window([sequence_id]).read(layer, length)
    assert torch.equal(keys[0] - 100 * layer, -values[0])
    return keys[0, 0, :, 0].tolist()


def test_sequences_of_different_length_hold_their_own_rows() -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    add(cache, rows([7, 8], [9, 0], [10, 11]), [2, 1, 2])
    assert cache.lengths == [5, 3, 3]
    assert [held(cache, i) for i in range(3)] == [[1, 2, 3, 7, 8], [4, 5, 9], [6, 10, 11]]
    add(cache, rows([12, 0], [13, 14], [15, 0]), [1, 2, 1])
    assert [held(cache, i) for i in range(3)] == [
        [1, 2, 3, 7, 8, 12],
        [4, 5, 9, 13, 14],
        [6, 10, 11, 15],
    ]
    assert held(cache, 2, layer=1) == [106, 110, 111, 115]


def test_a_pass_sees_what_is_cached_and_its_own_rows() -> None:
    cache = new_cache(ids=(0, 1))
    add(cache, rows([1, 2], [3, 0]), [2, 1])
    window = cache.window([0, 1])
    keys, values = window.append(0, rows([5, 6], [7, 8]), -rows([5, 6], [7, 8]))
    assert keys.shape == (2, 1, 4, 2)
    assert window.num_keys(2) == 4
    assert keys[0, 0, :, 0].tolist() == [1, 2, 5, 6]
    assert keys[1, 0, :3, 0].tolist() == [3, 7, 8]
    assert values[1, 0, :3, 1].tolist() == [-3, -7, -8]


def test_cropped_rows_are_overwritten_and_cropping_never_extends() -> None:
    cache = new_cache(ids=(0, 1))
    add(cache, rows([1, 2, 3], [4, 5, 6]), [3, 3])
    cache.crop(0, 1)
    cache.crop(1, 9)
    assert cache.lengths == [1, 3]
    add(cache, rows([7, 8], [9, 10]), [2, 1])
    assert [held(cache, 0), held(cache, 1)] == [[1, 7, 8], [4, 5, 6, 9]]
    window = cache.window([0, 1])
    window.crop([2, 9])
    assert window.lengths == cache.lengths == [2, 4]


def test_rows_that_are_not_kept_do_not_stay() -> None:
    cache = new_cache(ids=(0,))
    add(cache, rows([1, 2, 3, 4]), [2])
    add(cache, rows([5]), [1])
    assert held(cache, 0) == [1, 2, 5]


@pytest.mark.parametrize("ended", [[], [0], [2], [1], [0, 1], [0, 2], [2, 0], [1, 2], [0, 1, 2]])
def test_the_last_sequence_takes_the_place_of_one_that_ends(ended: list[int]) -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    before = {sequence_id: held(cache, sequence_id) for sequence_id in range(3)}
    for sequence_id in ended:
        cache.end(sequence_id)
        cache.end(sequence_id)  # harmless
        assert sequence_id not in cache
    assert len(cache) == 3 - len(ended)
    staying = [sequence_id for sequence_id in before if sequence_id not in ended]
    assert sorted(cache.ids) == staying
    assert {sequence_id: held(cache, sequence_id) for sequence_id in staying} == {
        sequence_id: before[sequence_id] for sequence_id in staying
    }
    if not staying:
        return
    add(cache, rows(*[[50.0 + sequence_id] for sequence_id in cache.ids]), [1] * len(staying))
    assert {sequence_id: held(cache, sequence_id) for sequence_id in staying} == {
        sequence_id: [*before[sequence_id], 50.0 + sequence_id] for sequence_id in staying
    }


def test_memory_is_given_back_with_the_last_sequence() -> None:
    cache = new_cache()
    assert cache.keys.numel() > 0
    for sequence_id in (1, 0, 2):
        cache.end(sequence_id)
    assert cache.keys.numel() == cache.values.numel() == cache.capacity == len(cache) == 0
    cache.open(7, 4)
    add(cache, rows([1, 2]), [2])
    assert held(cache, 7) == [1, 2]


def test_room_grows_with_the_tokens_in_few_steps() -> None:
    cache, sizes = new_cache(ids=(0,), capacity=SPARE_TOKENS), set[int]()
    for token in range(2000):
        add(cache, rows([float(token)]), [1])
        sizes.add(cache.capacity)
        assert cache.capacity < max(SPARE_TOKENS, 1.5 * (token + 1)) + 1
    assert len(sizes) < 11
    assert sum(sizes) < 3 * max(sizes), "rows written by all copies"
    assert held(cache, 0) == [float(token) for token in range(2000)]


def test_room_is_given_back_when_sequences_end() -> None:
    cache = new_cache(ids=range(8), capacity=4)
    add(cache, rows(*[[float(i)] for i in range(8)]), [1] * 8)
    for token in range(300):
        add(cache, rows([float(token)]), [1], ids=[3])
    full = cache.keys.numel()
    for sequence_id in (0, 1, 2, 4, 5, 6):
        cache.end(sequence_id)
    assert cache.keys.numel() <= full // 2, "of few long sequences"
    cache.end(3)
    assert cache.capacity == 1, "of short ones"
    assert held(cache, 7) == [7]
    add(cache, rows([8, 9]), [2])
    assert held(cache, 7) == [7, 8, 9]


def test_an_id_is_opened_once_and_unknown_ones_are_refused() -> None:
    cache = new_cache()
    with pytest.raises(ValueError, match="sequence 1 is in the cache already"):
        cache.open(1)
    with pytest.raises(KeyError, match="not all of"):
        cache.window([0, 9])
    assert cache.ids == [0, 1, 2]
    cache.end(9)
    assert len(cache) == 3


def test_others_join_where_some_have_gone() -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    cache.end(1)
    assert cache.ids == [0, 2]
    cache.open(3)
    assert (cache.lengths, cache.ids) == ([3, 1, 0], [0, 2, 3])
    add(cache, rows([7, 8], [9, 0], [10, 11]), [2, 1, 2])
    assert [held(cache, i) for i in (0, 2, 3)] == [[1, 2, 3, 7, 8], [6, 9], [10, 11]]
    for sequence_id in (0, 2, 3):
        cache.end(sequence_id)
    for sequence_id in (4, 5, 6):
        cache.open(sequence_id)
    assert (cache.lengths, cache.ids) == ([0, 0, 0], [4, 5, 6])
    add(cache, rows([1], [2], [3]), [1, 1, 1])
    assert [held(cache, i) for i in (4, 5, 6)] == [[1], [2], [3]]


def test_it_grows_by_as_many_sequences_as_come_and_keeps_what_it_holds() -> None:
    cache = new_cache(ids=())
    for sequence_id in range(9):
        cache.open(sequence_id, 3 + sequence_id)
        assert cache.capacity >= 3 + sequence_id
        row = [10 * sequence_id + 1.0, 10 * sequence_id + 2.0]
        add(cache, rows(row), [2], ids=[sequence_id])
    assert [held(cache, i) for i in range(9)] == [[10 * i + 1, 10 * i + 2] for i in range(9)]


def test_a_window_holds_the_bystanders_between_and_a_pass_leaves_them_alone() -> None:
    cache = new_cache(ids=(5, 6, 7, 8))
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0], [8, 9, 10]), [3, 2, 1, 3])
    window = cache.window([8, 6])
    assert (window.ids, window.lengths, window.num_keys(4)) == ([6, 7, 8], [2, 1, 3], 7)
    for layer in range(2):
        values = rows([7, 8, 9, 10], [0, 0, 0, 0], [11, 12, 0, 0])
        window.append(layer, values + 100 * layer, -values)
    window.advance([3, 0, 2])
    assert cache.lengths == [3, 5, 1, 5]
    expected = [[1, 2, 3], [4, 5, 7, 8, 9], [6], [8, 9, 10, 11, 12]]
    assert [held(cache, i) for i in (5, 6, 7, 8)] == expected
    add(cache, rows([13], [14], [15], [16]), [1, 1, 1, 1])
    assert [held(cache, i) for i in (5, 6, 7, 8)] == [
        [*row, 13 + place] for place, row in enumerate(expected)
    ]


def test_what_an_ended_sequence_left_behind_cannot_poison_the_one_that_joins() -> None:
    cache = new_cache(ids=(0, 1))
    add(cache, torch.cat((rows([1, 2, 0, 0]), rows([float("nan")] * 4))), [2, 4])
    cache.end(1)
    cache.open(2)
    keys, values = cache.window([0, 2]).read(0, 4)
    assert torch.isfinite(keys).all()
    assert torch.isfinite(values).all()


def test_what_an_ended_sequence_left_behind_cannot_poison_the_one_that_takes_its_place() -> None:
    cache = new_cache(ids=(0, 1))
    add(cache, torch.cat((rows([float("nan")] * 4), rows([1, 2, 0, 0]))), [4, 2])
    cache.end(0)
    window = cache.window([1])
    assert window.lengths == [2]
    keys, values = window.read(0, 4)
    assert torch.isfinite(keys).all(), "kernels that add the mask to the scores would see them"
    assert torch.isfinite(values).all()
    query = torch.ones(1, 1, 4, 2)
    mask = torch.tensor([[[True, True, True, False, False, False]] * 4])
    out = window.attend(0, query, rows([3, 0, 0, 0]), rows([3, 0, 0, 0]), mask)
    assert torch.isfinite(out).all()


def test_what_stands_behind_a_sequence_can_be_erased() -> None:
    cache = new_cache(ids=(0, 1))
    nan = float("nan")
    add(cache, rows([1, 2, nan, nan], [3, nan, nan, nan]), [2, 1])
    cache.clear_behind(1)
    keys, values = cache.window([1]).read(0, 4)
    assert keys[0, 0, :, 0].tolist() == [3, 0, 0, 0]
    assert torch.isfinite(values).all()
    assert not torch.isfinite(cache.window([0]).read(0, 4)[0]).all(), "only its own"


def test_it_grows_in_the_middle_of_a_pass() -> None:
    """The rows of earlier layers of the same pass move along."""
    cache = new_cache(ids=(0, 1), capacity=4)
    add(cache, rows([1, 2, 3], [4, 0, 0]), [3, 1])
    window = cache.window([0, 1])
    new = rows([5, 6, 7], [8, 9, 10])
    for layer in range(2):
        keys, values = window.append(layer, new + 100 * layer, -new)
        assert keys.shape[2] == values.shape[2] == 6
        assert (keys[0, 0, :, 0] - 100 * layer).tolist() == [1, 2, 3, 5, 6, 7]
        assert (keys[1, 0, :4, 0] - 100 * layer).tolist() == [4, 8, 9, 10]
        if layer == 0:
            assert cache.capacity >= 6
            cache.reserve(40)  # as a pass over other sequences would, were there one
    window.advance([3, 2])
    assert [held(cache, i, layer) for i in (0, 1) for layer in (0, 1)] == [
        [1, 2, 3, 5, 6, 7],
        [101, 102, 103, 105, 106, 107],
        [4, 8, 9],
        [104, 108, 109],
    ]


def test_one_that_has_grown_in_a_pass_can_be_used_after_it() -> None:
    cache = new_cache((0, 1), 4)
    with torch.inference_mode():
        for _ in range(3):
            add(cache, rows([1.0, 2.0], [3.0, 4.0]), [2, 2])
    cache.end(0)
    cache.open(2)
    cache.clear_behind(1)
    assert held(cache, 1) == [3.0, 4.0] * 3


def test_room_is_made_ahead_and_never_taken_away() -> None:
    cache = new_cache(ids=(0, 1), capacity=4)
    add(cache, rows([1, 2, 3], [4, 0, 0]), [3, 1])
    keys = cache.keys
    for capacity in (0, 3, 4):
        cache.reserve(capacity)
        assert cache.keys is keys, "there is room already"
    cache.reserve(9)
    assert cache.capacity >= 9
    assert [held(cache, 0), held(cache, 1)] == [[1, 2, 3], [4]]
    keys = cache.keys
    add(cache, rows([5, 6, 7, 8, 9, 10], [11, 12, 0, 0, 0, 0]), [6, 2])
    assert cache.keys is keys, "it was made before"
    assert [held(cache, 0), held(cache, 1)] == [[1, 2, 3, 5, 6, 7, 8, 9, 10], [4, 11, 12]]


def test_a_text_that_grows_by_single_tokens_is_copied_now_and_then_only() -> None:
    cache = new_cache(ids=(0,), capacity=4)
    capacities = set()
    for value in range(200):
        add(cache, rows([float(value)]), [1])
        capacities.add(cache.capacity)
    assert held(cache, 0) == list(range(200))
    assert len(capacities) < 15


def test_one_window_serves_pass_after_pass() -> None:
    cache = new_cache(ids=(0, 1))
    window = cache.window([0, 1])
    for values, kept in (
        (rows([1, 2], [3, 4]), [2, 1]),
        (rows([5, 6], [7, 8]), [1, 2]),  # as many rows, at other places
        (rows([9, 10], [11, 12]), [0, 1]),
        (rows([13, 14], [15, 16]), [2, 2]),
        (rows([17], [18]), [1, 1]),
    ):
        for layer in range(2):
            window.append(layer, values + 100 * layer, -values)
        window.advance(kept)
    assert held(cache, 0) == [1, 2, 5, 13, 14, 17]
    assert held(cache, 1) == [3, 7, 8, 11, 15, 16, 18]
    assert held(cache, 1, layer=1) == [103, 107, 108, 111, 115, 116, 118]


def test_a_full_cache_is_no_error() -> None:
    cache = new_cache(ids=(0,), capacity=4)
    add(cache, rows([1, 2, 3, 4]), [4])
    assert cache.lengths == [cache.capacity] == [4]


@pytest.mark.parametrize("seed", range(5))
def test_a_long_life_equals_a_list_for_each_sequence(seed: int) -> None:
    """Joins, ends, crops and passes over some, in any order."""
    draw = random.Random(seed)
    cache, expected, number = new_cache(ids=()), {}, 0
    for value in range(1, 400):
        move = draw.random()
        if move < 0.15 or not expected:
            cache.open(number, draw.choice([0, 3, 20]))
            expected[number] = []
            number += 1
        elif move < 0.25:
            gone = draw.choice(list(expected))
            cache.end(gone)
            del expected[gone]
        elif move < 0.4:
            cropped, length = draw.choice(list(expected)), draw.randrange(12)
            cache.crop(cropped, length)
            del expected[cropped][length:]
        else:
            some = draw.sample(list(expected), draw.randint(1, len(expected)))
            window = cache.window(some)
            count = draw.randint(1, 4)
            fed = {i: [value + 0.1 * place for place in range(count)] for i in some}
            values = rows(*[fed.get(i, [-1.0] * count) for i in window.ids])
            for layer in range(2):
                window.append(layer, values + 100 * layer, -values)
            kept = {i: draw.randint(0, count) for i in some}
            window.advance([kept.get(i, 0) for i in window.ids])
            for i in some:
                expected[i] += fed[i][: kept[i]]
        assert sorted(cache.ids) == sorted(expected)
        for i, row in expected.items():
            assert held(cache, i) == pytest.approx(row)


def test_a_store_without_memory_attends_to_the_pass_alone_and_lets_gradients_through() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    out = PassThrough().attend(0, query, key, value, None)
    assert torch.equal(out, attend(query, key, value, None))
    out.sum().backward()
    assert all(tensor.grad is not None for tensor in (query, key, value))
