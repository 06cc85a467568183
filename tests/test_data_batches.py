"""The order of the images: every epoch has each image exactly once, whatever the batch size."""

import numpy as np
import pytest

from smallvit.data import batch_indices, eval_batches, order


@pytest.mark.parametrize("n, batch_size", [(10, 10), (10, 3), (7, 16), (100, 32), (1, 4), (5, 1)])
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_epoch_has_every_image(n: int, batch_size: int, repeats: int):
    epochs = 4
    steps = -(-epochs * n * repeats // batch_size)
    batches = [batch_indices(3, step, batch_size, n, repeats) for step in range(steps)]
    assert {batch.shape for batch in batches} == {(batch_size,)}
    stream = np.concatenate(batches)[: epochs * n * repeats].reshape(epochs, n, repeats)
    assert (stream == stream[:, :, :1]).all()  # the copies of an image stand together
    np.testing.assert_array_equal(np.sort(stream[:, :, 0], axis=1), np.tile(np.arange(n), (epochs, 1)))


def test_order_depends_on_seed_and_epoch_alone():
    first = order(0, 0, 100).copy()
    order.cache_clear()
    np.testing.assert_array_equal(order(0, 0, 100), first)
    assert not np.array_equal(order(0, 1, 100), first)
    assert not np.array_equal(order(1, 0, 100), first)
    with pytest.raises(ValueError, match="read-only"):
        order(0, 0, 100)[0] = 1


@pytest.mark.parametrize("n, batch_size", [(10, 10), (10, 3), (7, 16), (0, 4)])
def test_evaluation_counts_each_image_once(n: int, batch_size: int):
    counted = []
    for indices, mask in eval_batches(n, batch_size):
        assert indices.shape == mask.shape == (batch_size,)
        assert (indices < n).all()
        counted += indices[mask].tolist()
    assert counted == list(range(n))


def test_impossible_batches_are_refused():
    with pytest.raises(ValueError, match="batch_size=0"):
        batch_indices(0, 0, 0, 10)
    with pytest.raises(ValueError, match="batch_size=0 must be at least 1"):
        next(eval_batches(10, 0))
