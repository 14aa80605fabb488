from __future__ import annotations

import pytest
import torch
from torch import Tensor

from d3d.model.attention import attend
from d3d.model.kv_cache import KVCache, PassThrough


def new_cache(batch: int = 3, capacity: int = 10, layers: int = 2) -> KVCache:
    return KVCache(layers, batch, 1, capacity, 2, torch.float32, torch.device("cpu"))


def rows(*values: list[float]) -> Tensor:
    """[batch, 1 head, rows, head_dim 2], each row its value twice."""
    return (
        torch.tensor(values, dtype=torch.float32)[:, None, :, None]
        .expand(-1, -1, -1, 2)
        .contiguous()
    )


def add(cache: KVCache, values: Tensor, kept: list[int]) -> None:
    for layer in range(2):
        cache.append(layer, values + 100 * layer, -values)
    cache.advance(kept)


def held(cache: KVCache, sequence: int, layer: int = 0) -> list[float]:
    keys, values = cache.read(layer, cache.lengths[sequence])
    assert torch.equal(keys[sequence] - 100 * layer, -values[sequence])
    return keys[sequence, 0, :, 0].tolist()


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
    cache = new_cache(batch=2)
    add(cache, rows([1, 2], [3, 0]), [2, 1])
    keys, values = cache.append(0, rows([5, 6], [7, 8]), -rows([5, 6], [7, 8]))
    assert keys.shape == (2, 1, 4, 2)
    assert cache.num_keys(2) == 4
    assert keys[0, 0, :, 0].tolist() == [1, 2, 5, 6]
    assert keys[1, 0, :3, 0].tolist() == [3, 7, 8]
    assert values[1, 0, :3, 1].tolist() == [-3, -7, -8]


def test_cropped_rows_are_overwritten_and_cropping_never_extends() -> None:
    cache = new_cache(batch=2)
    add(cache, rows([1, 2, 3], [4, 5, 6]), [3, 3])
    cache.crop([1, 9])
    assert cache.lengths == [1, 3]
    add(cache, rows([7, 8], [9, 10]), [2, 1])
    assert [held(cache, 0), held(cache, 1)] == [[1, 7, 8], [4, 5, 6, 9]]


def test_rows_that_are_not_kept_do_not_stay() -> None:
    cache = new_cache(batch=1)
    add(cache, rows([1, 2, 3, 4]), [2])
    add(cache, rows([5]), [1])
    assert held(cache, 0) == [1, 2, 5]


@pytest.mark.parametrize("order", [[0, 1, 2], [2], [1, 2], [0, 2], [2, 1]])
def test_keep_moves_sequences_to_the_front(order: list[int]) -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    before = [held(cache, i) for i in range(3)]
    cache.keep(order)
    assert [held(cache, place) for place in range(len(order))] == [before[row] for row in order]
    add(cache, rows(*[[50.0 + row] for row in order]), [1] * len(order))
    assert [held(cache, place) for place in range(len(order))] == [
        [*before[row], 50.0 + row] for row in order
    ]


@pytest.mark.parametrize("order", [[1, 0], [0, 0], [0, 2, 1]])
def test_keep_refuses_to_move_a_sequence_back(order: list[int]) -> None:
    with pytest.raises(ValueError, match="only move to the front"):
        new_cache().keep(order)


def test_others_join_where_some_have_gone() -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    cache.keep([0, 2])
    cache.join(1)
    assert (cache.lengths, cache.sequence_ids) == ([3, 1, 0], [0, 2, 3])
    add(cache, rows([7, 8], [9, 0], [10, 11]), [2, 1, 2])
    assert [held(cache, i) for i in range(3)] == [[1, 2, 3, 7, 8], [6, 9], [10, 11]]
    cache.keep([])
    cache.join(3)
    assert (cache.lengths, cache.sequence_ids) == ([0, 0, 0], [4, 5, 6])
    add(cache, rows([1], [2], [3]), [1, 1, 1])
    assert [held(cache, i) for i in range(3)] == [[1], [2], [3]]


def test_no_more_join_than_there_is_room_for() -> None:
    cache = new_cache()
    cache.keep([0, 1])
    with pytest.raises(IndexError, match="holds 3 sequences, 4 are needed"):
        cache.join(2)
    assert cache.lengths == [0, 0]


def test_a_pass_over_some_sequences_leaves_the_others_alone() -> None:
    cache = new_cache()
    add(cache, rows([1, 2, 3], [4, 5, 0], [6, 0, 0]), [3, 2, 1])
    with cache.only(1, 2):
        assert (cache.lengths, cache.num_keys(4)) == ([2], 6)
        add(cache, rows([7, 8, 9, 10]), [3])
    assert cache.lengths == [3, 5, 1]
    assert [held(cache, i) for i in range(3)] == [[1, 2, 3], [4, 5, 7, 8, 9], [6]]
    with pytest.raises(RuntimeError), cache.only(0, 2):
        raise RuntimeError
    add(cache, rows([11], [12], [13]), [1, 1, 1])
    assert [held(cache, i) for i in range(3)] == [[1, 2, 3, 11], [4, 5, 7, 8, 9, 12], [6, 13]]


def test_what_a_dropped_sequence_left_behind_cannot_poison_the_one_that_joins() -> None:
    cache = new_cache(batch=2)
    add(cache, torch.cat((rows([1, 2, 0, 0]), rows([float("nan")] * 4))), [2, 4])
    cache.keep([0])
    cache.join(1)
    assert all(torch.isfinite(held).all() for held in cache.read(0, 4))


def test_what_a_dropped_sequence_left_behind_cannot_poison_the_one_that_takes_its_place() -> None:
    cache = new_cache(batch=2)
    add(cache, torch.cat((rows([float("nan")] * 4), rows([1, 2, 0, 0]))), [4, 2])
    cache.keep([1])
    cache.lengths = [2]
    keys, values = cache.read(0, 4)
    assert torch.isfinite(keys).all(), "kernels that add the mask to the scores would see them"
    assert torch.isfinite(values).all()
    query = torch.ones(1, 1, 4, 2)
    mask = torch.tensor([[[True, True, True, False, False, False]] * 4])
    out = cache.attend(0, query, rows([3, 0, 0, 0]), rows([3, 0, 0, 0]), mask)
    assert torch.isfinite(out).all()


def test_too_many_tokens_are_refused() -> None:
    cache = new_cache(batch=1, capacity=4)
    add(cache, rows([1, 2, 3]), [3])
    with pytest.raises(IndexError, match="holds 4 tokens a sequence, 5 are needed"):
        cache.append(0, rows([4, 5]), rows([4, 5]))


def test_a_full_cache_is_no_error() -> None:
    cache = new_cache(batch=1, capacity=4)
    add(cache, rows([1, 2, 3, 4]), [4])
    assert cache.lengths == [cache.capacity] == [4]


def test_a_store_without_memory_attends_to_the_pass_alone_and_lets_gradients_through() -> None:
    query, key, value = (torch.randn(1, 2, 3, 4, requires_grad=True) for _ in range(3))
    out = PassThrough().attend(0, query, key, value, None)
    assert torch.equal(out, attend(query, key, value, None))
    out.sum().backward()
    assert all(tensor.grad is not None for tensor in (query, key, value))
