# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the Flint patch set
"""A step's block tables are gathered for other requests or new blocks only.

The tables and their staged writes are vLLM's own. Only the kernels are not: what they
do, done here to the tensors of the tables that are tested.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu import block_table, buffer_utils
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor

from support.uva import HostBuffer

SLOTS, COLUMNS = 5, (6, 9)
Ids = tuple[list[int], ...]


class Tables:
    """Block tables, what they should hold, and how often kernels ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
        monkeypatch.setattr(buffer_utils, "UvaBuffer", HostBuffer)
        monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
        monkeypatch.setattr(StagedWriteTensor, "apply_write", lambda t: self._write(t))
        monkeypatch.setattr(
            FusedStagedWriter,
            "apply",
            lambda writer, tensors, *others: [self._write(t) for t in tensors],
        )
        monkeypatch.setattr(block_table, "_gather_block_tables_kernel", self)
        columns = list(COLUMNS[:groups])
        sizes = [16] * groups
        self.tables = BlockTables(sizes, SLOTS, 32, columns, torch.device("cpu"))
        self.gathered = self.written = 0
        self.truth: dict[int, Ids] = {}

    def _write(self, tensor: StagedWriteTensor) -> None:
        start = 0
        for row, column, end in zip(
            tensor._staged_write_indices,
            tensor._staged_write_starts,
            tensor._staged_write_cu_lens,
            strict=True,
        ):
            ids = torch.tensor(tensor._staged_write_contents[start:end])
            tensor.gpu[row, column : column + len(ids)] = ids.int()
            start = end
            self.written += 1
        tensor.clear_staged_writes()

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        """vLLM's kernel, by the pointers that it gets."""

        def gather(idx_mapping, src_ptrs, out_ptrs, strides, counts, *others, **more):
            self.gathered += 1
            assert grid[0] == len(strides)
            for group, out in enumerate(out_ptrs.tolist()):
                (target,) = [t for t in self.targets() if t.data_ptr() == out]
                target[: grid[1]] = 0
                for row, slot in enumerate(idx_mapping.tolist()):
                    count = int(counts[group, slot])
                    source = self.tables.block_tables[group].gpu
                    target[row, :count] = source[slot, :count]

        return gather

    def targets(self) -> list[torch.Tensor]:
        return [*self.tables.input_block_tables, *getattr(self, "others", ())]

    def add(self, slot: int, ids: Ids, overwrite: bool) -> None:
        self.tables.append_block_ids(slot, ids, overwrite)
        old = ([],) * len(ids) if overwrite else self.truth[slot]
        self.truth[slot] = tuple(a + b for a, b in zip(old, ids, strict=True))

    def step(self, idx_mapping: torch.Tensor, padded: int) -> None:
        """A step's tables hold what was added, padded with zeros."""
        self.tables.apply_staged_writes()
        found = self.tables.gather_block_tables(idx_mapping, padded)
        assert len(found) == len(self.tables.block_sizes)
        for group, table in enumerate(found):
            assert len(table) == padded
            assert table.data_ptr() == self.tables.input_block_tables[group].data_ptr()
            for row, slot in enumerate(idx_mapping.tolist()):
                ids = self.truth[slot][group]
                assert table[row, : len(ids)].tolist() == ids
            assert not table[len(idx_mapping) :].any()


@pytest.fixture(params=[1, 2])
def tables(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Tables:
    return Tables(monkeypatch, request.param)


def ids_of(tables: Tables, *first: int) -> Ids:
    groups = len(tables.tables.block_sizes)
    return tuple([100 * group + i for i in first] for group in range(groups))


def test_the_same_requests_are_gathered_once(tables: Tables) -> None:
    for slot in (0, 3):
        tables.add(slot, ids_of(tables, slot + 1, slot + 11), True)
    idx_mapping = torch.tensor([3, 0])
    for _ in range(3):
        tables.step(idx_mapping, 4)
    written = tables.written
    assert tables.gathered == 1
    tables.add(3, ids_of(tables, 77), False)
    for _ in range(3):
        tables.step(idx_mapping, 4)
    assert tables.gathered == 2 and tables.written > written


def test_counts_are_copied_with_blocks_only(
    tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies: list[Any] = []
    num_blocks = tables.tables.num_blocks
    copy = num_blocks.copy_to_uva
    monkeypatch.setattr(num_blocks, "copy_to_uva", lambda: copies.append(copy()))
    for expected in (1, 2):
        tables.add(1, ids_of(tables, expected), True)
        for _ in range(2):
            tables.step(torch.tensor([1]), 1)
            assert len(copies) == expected


@pytest.mark.parametrize("change", ["requests", "padding", "dummy", "other tables"])
def test_whatever_changes_them_gathers_again(tables: Tables, change: str) -> None:
    for slot in (0, 3):
        tables.add(slot, ids_of(tables, slot + 1), True)
    idx_mapping = torch.tensor([3, 0])
    tables.step(idx_mapping, 4)
    own = tables.tables
    if change == "requests":
        # As many, and equal ones in a tensor of its own.
        tables.step(torch.tensor([0, 3]), 4)
        tables.step(idx_mapping, 4)
        tables.step(idx_mapping.clone(), 4)
        assert tables.gathered == 4
    elif change == "padding":
        tables.step(idx_mapping, 3)
        tables.step(idx_mapping, 4)
        assert tables.gathered == 3
    elif change == "dummy":
        assert not any(table.any() for table in own.get_dummy_block_tables(2))
        tables.step(idx_mapping, 4)
        assert tables.gathered == 2
    else:
        tables.others = [torch.ones_like(t) for t in own.input_block_tables]
        out = tuple(tables.others)
        for gathered in (2, 3):
            own.gather_block_tables(idx_mapping, 4, out, own._make_ptr_tensor(out))
            assert tables.gathered == gathered
        tables.step(idx_mapping, 4)
        assert tables.gathered == 3


def test_any_order_of_steps(tables: Tables) -> None:
    """Against tables that nothing was kept for, 2000 steps of all kinds."""
    rng = random.Random(0)
    idx_mapping, padded, kept = torch.tensor([0]), 1, 0
    tables.add(0, ids_of(tables, 5), True)
    for step in range(2000):
        slot, what = rng.randrange(SLOTS), rng.random()
        if what < 0.15:
            tables.add(slot, ids_of(tables, *rng.sample(range(1, 99), 2)), True)
        elif what < 0.4:
            open_slots = [
                s for s, ids in tables.truth.items() if len(ids[0]) < min(COLUMNS)
            ]
            if open_slots:
                tables.add(rng.choice(open_slots), ids_of(tables, step + 1), False)
        elif what < 0.5:
            known = list(tables.truth)
            chosen = rng.sample(known, rng.randint(1, len(known)))
            idx_mapping = torch.tensor(chosen)
            padded = rng.randint(len(chosen), SLOTS)
        elif what < 0.55:
            tables.tables.get_dummy_block_tables(rng.randint(1, SLOTS))
        before = tables.gathered
        tables.step(idx_mapping, padded)
        kept += before == tables.gathered
    assert 500 < kept < 1500
