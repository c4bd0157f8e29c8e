"""Prefetching gives the same batches from any position, and raises the thread's errors."""

import threading

import numpy as np
import pytest

from fasttfm.training.read_ahead import Place, ReadAhead


class Counted:
    """Three batches per epoch; a batch is (epoch, elements, name of the thread)."""

    def __len__(self):
        return 3

    def epoch(self, epoch):
        return [np.arange(4) + 10 * number + 100 * epoch for number in range(3)]

    def batch(self, indices, epoch=0):
        if indices[0] >= 400:
            raise OSError("the disk is gone")
        return epoch, indices.tolist(), threading.current_thread().name


def walk(reader: ReadAhead, place: Place, count: int) -> list:
    rows = []
    for _ in range(count):
        made, place = reader.get(place)
        rows.append(made and made[:2])
    return rows


@pytest.mark.parametrize("ahead", [0, 1, 4])
def test_every_place_gives_the_same_whatever_was_read_ahead(ahead):
    reader = ReadAhead(Counted(), 2, ahead=ahead)
    whole = walk(reader, Place(0, 0, 0), 9)
    assert whole == [(n // 3, [100 * (n // 3) + 10 * (n % 3) + i for i in range(4)]) for n in range(9)]
    for begin in (5, 2, 7, 0):  # forwards and back
        assert walk(reader, Place(begin // 3, begin % 3, begin % 2), 9 - begin) == whole[begin:]
    assert reader.get(Place(0, 0, 0))[0][2] != threading.current_thread().name


def test_ranks_have_every_row_once():
    for size, together in ((2, 1), (2, 4), (3, 2), (8, 8), (8, 2)):
        parts = [walk(ReadAhead(Counted(), together, rank, size), Place(0, 0, 0), 6) for rank in range(size)]
        for number, rows in enumerate(zip(*parts)):
            expected = (Counted().epoch(number // 3)[number % 3]).tolist()
            assert [i for row in rows if row is not None for i in row[1]] == expected


def test_what_the_thread_raises_comes_with_its_batch():
    reader = ReadAhead(Counted(), 1)
    assert walk(reader, Place(3, 1, 0), 2)[-1][1][0] == 320
    with pytest.raises(OSError, match="the disk is gone"):
        reader.get(Place(4, 0, 0))
    assert reader.get(Place(0, 1, 0))[0][1][0] == 10
