"""Shards on disk: what one number of ranks wrote, any other reads, each only its rows."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from slipstream.errors import RunHalted, UserError
from slipstream.learner.model.tensor_shards import RankFile, Saved, file_name, own_rows

WHOLE = torch.arange(14.0).reshape(7, 2)


def write_rows(folder, name, parts, size):
    """`parts`: rows by rank, as a sharded state writes them."""
    for rank, (first, rows) in enumerate(parts):
        part = RankFile({name: rows}, {name: (first, (7, 2))})
        part.save(folder / file_name("model", rank, size))


def test_rows_of_several_files_are_one_tensor(tmp_path):
    write_rows(tmp_path, "w", [(0, WHOLE[:3].clone()), (3, WHOLE[3:6].clone()), (6, WHOLE[6:].clone())], 3)
    saved, own = Saved(tmp_path, "model"), torch.zeros(7, 2)
    saved.fill("w", own)
    assert torch.equal(own, WHOLE)
    assert saved.shapes == {"w": (7, 2)}


def test_a_rank_without_rows_and_a_tensor_without_dimensions(tmp_path):
    RankFile({"w": WHOLE[:7].clone(), "s": torch.tensor(3.0)}, {}).save(tmp_path / file_name("model", 0, 2))
    RankFile({}, {}).save(tmp_path / file_name("model", 1, 2))
    saved, scalar = Saved(tmp_path, "model"), torch.tensor(0.0)
    saved.fill("s", scalar)
    assert (scalar.item(), saved.shapes) == (3.0, {"w": (7, 2), "s": ()})
    assert own_rows(scalar) == (0, 1)


def test_the_only_rank_writes_what_others_know_as_a_model(tmp_path):
    assert file_name("model", 0, 1) == "model.safetensors"
    part = RankFile.of({"w": WHOLE}, leads=True, first_copy=True)
    assert part.tensors["w"].data_ptr() != WHOLE.data_ptr()
    assert (part.rows, torch.equal(part.tensors["w"], WHOLE)) == ({}, True)


def test_what_every_rank_has_whole_is_written_by_the_first_alone():
    assert not RankFile.of({"w": WHOLE}, leads=False, first_copy=True).tensors


def test_missing_rows_are_named(tmp_path):
    write_rows(tmp_path, "w", [(0, WHOLE[:3].clone())], 2)
    with pytest.raises(UserError, match="w has 3 of 7 rows"):
        Saved(tmp_path, "model")


def test_a_header_that_makes_no_sense_is_one_line(tmp_path):
    save_file({"w": WHOLE}, tmp_path / "model.safetensors", metadata={"rows": "nonsense"})
    with pytest.raises(UserError, match="cannot be read"):
        Saved(tmp_path, "model")
    with pytest.raises(UserError, match=r"no trainer\.safetensors"):
        Saved(tmp_path, "trainer")


def test_what_is_a_ranks_own_is_no_part_of_a_whole(tmp_path):
    for rank in range(2):
        RankFile({"rng/cpu": torch.tensor([rank])}, {}).save(tmp_path / file_name("trainer", rank, 2))
    saved = Saved(tmp_path, "trainer", "rng/")
    assert saved.shapes == {}
    assert [int(saved.of_rank(rank)["cpu"]) for rank in range(4)] == [0, 1, 0, 1]


def test_a_number_that_is_not_finite_is_never_written(tmp_path):
    with pytest.raises(RunHalted, match="tensor w is not finite"):
        RankFile({"w": torch.tensor([float("inf")])}, {}).save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())
