"""Every format gives back the samples that were written, bit for bit, and every file is known by its content."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dump_writers as writers
import numpy as np
import pytest
import torch
from dump_writers import KEEPS_MISSING, NONFINITE_IS_NULL, WRITERS, Given, draw

from rlk_audit.dumps import files, table_parquet
from rlk_audit.dumps.sample import DumpError, DumpSample, ReadOptions

PICKLES = ReadOptions(allow_pickle=True)


class Told(list[tuple[Path, str]]):
    def __call__(self, path: Path, sentence: str) -> None:
        self.append((path, sentence))

    @property
    def text(self) -> str:
        return "\n".join(f"{path}: {sentence}" for path, sentence in self)


def read_all(paths: Sequence[Path], told: Told, format: str = "auto") -> list[DumpSample]:
    parts = files.find(paths, format, tell=told)
    return [sample for part in parts for sample in files.read(part, PICKLES, told)]


def written(name: str, folder: Path, step: int, samples: Sequence[Given]) -> tuple[list[Path], list[Given]]:
    """Write samples as far as the format can hold them; return its files and what it holds."""
    if name not in KEEPS_MISSING:
        samples = [given.without_missing() for given in samples]
    paths = WRITERS[name][1](folder, step, samples)
    if name in NONFINITE_IS_NULL:
        samples = [
            replace(
                given,
                train=np.where(np.isfinite(given.train), given.train, np.nan),
                rollout=np.where(np.isfinite(given.rollout), given.rollout, 0).astype(np.float32),
                missing=given.missing | ~np.isfinite(given.rollout),
            )
            for given in samples
        ]
    return paths, list(samples)


def assert_same(sample: DumpSample, given: Given, step: int) -> None:
    assert sample.train_log_probs is not None and sample.rollout_log_probs is not None
    assert same_bits(sample.train_log_probs, given.train)
    assert same_bits(sample.rollout_log_probs, given.rollout)
    assert sample.mask.dtype == bool and sample.mask.tolist() == given.mask.tolist()
    missing = np.zeros(len(given), dtype=bool) if sample.rollout_missing is None else sample.rollout_missing
    assert missing.tolist() == given.missing.tolist()
    assert sample.token_ids is not None and sample.token_ids.dtype == np.int64
    assert sample.token_ids.tolist() == given.tokens
    assert (sample.step, sample.sample_index, sample.prompt_length) == (step, given.index, len(given.prompt))


def same_bits(values: np.ndarray, expected: np.ndarray) -> bool:
    """Equal in float32, NaN where NaN is; JSON's float64 must be the float32 value exactly."""
    narrow = values.astype(np.float32)
    exact = np.array_equal(narrow.astype(values.dtype), values, equal_nan=True)
    finite = ~np.isnan(expected)
    same = np.array_equal(narrow[finite].view(np.int32), expected[finite].astype(np.float32).view(np.int32))
    return exact and same and bool(np.all(np.isnan(narrow[~finite])))


def in_index_order(samples: Sequence[DumpSample]) -> list[DumpSample]:
    return sorted(samples, key=lambda sample: sample.sample_index)


# --- samples --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("seed", range(8))
def test_samples_come_back_bit_for_bit(name: str, seed: int, tmp_path: Path) -> None:
    paths, given = written(name, tmp_path, 3, draw(np.random.default_rng(seed)))
    told = Told()
    samples = in_index_order(read_all(paths, told))
    assert len(samples) == len(given), told.text
    for sample, expected in zip(samples, given, strict=True):
        assert_same(sample, expected, 3)
    assert not told, told.text


def recorded_samples() -> list[Given]:
    """Samples of a recorded pair of engines, with real log-probabilities."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "diagnosis"))
    try:
        from recordings import PAIRS, read
    finally:
        sys.path.pop(0)
    recording = read(min((PAIRS / "tune").glob("*.npz")))
    samples = next(iter(recording.conditions.values()))[:24]
    rng = np.random.default_rng(1)
    given = []
    for index, sample in enumerate(samples):
        length = len(sample["train"])
        ids = rng.integers(1, recording.vocabulary, length + 8).tolist()
        none = np.zeros(length, dtype=bool)
        columns = sample["train"].astype(np.float32), sample["rollout"].astype(np.float32)
        given.append(Given(index, ids[:8], ids[8:], *columns, ~none, none))
    return given


@pytest.mark.parametrize("name", WRITERS)
def test_recorded_log_probs(name: str, tmp_path: Path) -> None:
    paths, given = written(name, tmp_path, 0, recorded_samples())
    for sample, expected in zip(in_index_order(read_all(paths, Told())), given, strict=True):
        assert_same(sample, expected, 0)


def test_labels(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 4)]
    ranks = {}
    for name in WRITERS:
        paths = WRITERS[name][1](tmp_path / name, 0, given)
        samples = in_index_order(read_all(paths, Told()))
        ranks[name] = [sample.labels.get("rank") for sample in samples]
        if name.startswith("table"):
            assert [sample.labels["engine"] for sample in samples] == ["e0", "e1", "e0", "e1"]
            assert [sample.rollout_id for sample in samples] == [0, 0, 1, 1]
    assert ranks["slime"] == ranks["prime-rl"] == ["0", "1", "0", "1"]
    for rank, sample in zip(ranks["miles"], given, strict=True):
        assert len(rank) == len(sample) and set(rank) <= {"0", "2"}  # those of tensor-parallel rank 0


def test_an_evidence_line_is_a_table(tmp_path: Path) -> None:
    line = {
        "step": 4,
        "rank": 1,
        "sample_index": None,
        "rollout_id": [5, 5],
        "labels": {"engine": "e1"},
        "train_log_probs": [-0.5, None],
        "train_log_probs_dtype": "bfloat16",
        "train_nonfinite": {"-Infinity": [1]},
        "mask": [1, 1],
        "rollout_log_probs": [None, None],
        "rollout_nonfinite": {"NaN": [0]},
    }
    path = tmp_path / "evidence.jsonl"
    path.write_text(json.dumps(line) + "\n")
    (sample,) = read_all([path], Told())
    assert sample.train_log_probs is not None and sample.train_log_probs.dtype == np.float32
    assert sample.train_log_probs.tolist() == [-0.5, -np.inf]
    assert sample.rollout_log_probs is not None and np.isnan(sample.rollout_log_probs[0])
    assert sample.rollout_missing is not None and sample.rollout_missing.tolist() == [False, True]
    assert (sample.step, sample.sample_index, sample.rollout_id) == (4, -1, 5)
    assert sample.labels == {"engine": "e1", "rank": "1"}


def test_json_accepts_null_and_bare_names_and_whole_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"train_log_probs": [-1, NaN, -Infinity], "rollout_log_probs": [null, Infinity, -2.5]}\n\n')
    (sample,) = read_all([path], Told())
    assert sample.train_log_probs is not None and sample.rollout_log_probs is not None
    assert np.array_equal(sample.train_log_probs, [-1.0, np.nan, -np.inf], equal_nan=True)
    assert sample.rollout_missing is not None and sample.rollout_missing.tolist() == [True, False, False]
    assert sample.rollout_log_probs[1:].tolist() == [np.inf, -2.5]
    assert sample.mask.all() and sample.token_ids is None and sample.step is None


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_an_id_that_is_null_is_unknown(ending: str, tmp_path: Path) -> None:
    """Kills: null read as token 0, or position 0."""
    record = {"train_log_probs": [-1.0] * 3, "rollout_log_probs": [-1.5] * 3}
    record |= {name: [7, None, 9] for name in ("token_ids", "rollout_token_ids", "token_position")}
    path = tmp_path / f"a{ending}"
    if ending == ".jsonl":
        path.write_text(json.dumps(record) + "\n")
    else:
        pyarrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([record]), path)
    (sample,) = read_all([path], Told())
    for ids in (sample.token_ids, sample.rollout_token_ids, sample.token_position):
        assert ids is not None and ids.tolist() == [7, -1, 9]


def test_what_is_null_is_missing_whatever_is_marked_beside_it(tmp_path: Path) -> None:
    """Kills: a value that the engine never gave, compared as 0."""
    path = tmp_path / "a.jsonl"
    record = {
        "train_log_probs": [-1.0] * 3,
        "rollout_log_probs": [None, -1.5, -2.0],
        "rollout_missing": [False, False, True],
    }
    path.write_text(json.dumps(record) + "\n")
    (sample,) = read_all([path], Told())
    assert sample.rollout_missing is not None and sample.rollout_missing.tolist() == [True, False, True]


@pytest.mark.parametrize("ending", [".npz", ".safetensors"])
@pytest.mark.parametrize("shape", [(), (1, 2, 3)])
def test_arrays_of_no_usable_shape_are_told(ending: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    arrays = {name: torch.full(shape, -1.0) for name in ("train_log_probs", "rollout_log_probs")}
    path = tmp_path / f"a{ending}"
    if ending == ".npz":
        np.savez(path, **{name: array.numpy() for name, array in arrays.items()})
    else:
        pytest.importorskip("safetensors.torch").save_file(arrays, path)
    told = Told()
    (part,) = files.find([path], "auto", tell=told)
    with pytest.raises(DumpError, match=r"train_log_probs\S* must .*one or two axes"):
        list(files.read(part, ReadOptions(), told))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.bool, torch.int8, torch.float64])
def test_a_padded_mask_may_be_of_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    arrays = {name: torch.full((2, 3), -1.0) for name in ("train_log_probs", "rollout_log_probs")}
    arrays["mask"] = torch.tensor([[0, 1, 1], [1, 0, 0]]).to(dtype)
    pytest.importorskip("safetensors.torch").save_file(arrays, tmp_path / "a.safetensors")
    samples = read_all([tmp_path / "a.safetensors"], Told())
    assert [sample.mask.tolist() for sample in samples] == [[True, True], [True]]


def test_unequal_arrays_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        json.dumps({"train_log_probs": [-1.0, -2.0], "rollout_log_probs": [-1.0], "mask": [1, 1, 1]}) + "\n"
    )
    (sample,) = read_all([path], Told())
    assert sample.train_log_probs is not None and sample.rollout_log_probs is not None
    assert (len(sample.train_log_probs), len(sample.rollout_log_probs), len(sample)) == (2, 1, 3)


def test_padded_arrays_of_either_side(tmp_path: Path) -> None:
    train = np.array([[0, -1, -2], [-3, 0, 0]], dtype=np.float32)
    np.savez(tmp_path / "a.npz", train_log_probs=train, rollout_log_probs=train - 1, mask=train < 0)
    samples = read_all([tmp_path / "a.npz"], Told())
    assert [sample.train_log_probs.tolist() for sample in samples if sample.train_log_probs is not None] == [
        [-1.0, -2.0],
        [-3.0],
    ]
    np.savez(tmp_path / "a.npz", train_log_probs=train, rollout_log_probs=train, mask=train < 0, lengths=[3, 2])
    samples = read_all([tmp_path / "a.npz"], Told())
    assert [sample.mask.tolist() for sample in samples] == [[False, True, True], [True, False]]


def test_bfloat16_is_read_as_float32(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 1, odd=False)]
    (path,) = writers.slime(tmp_path, 0, given)
    payload = torch.load(path)
    payload["samples"][0]["rollout_log_probs"] = payload["samples"][0]["rollout_log_probs"].bfloat16()
    torch.save(payload, path)
    (sample,) = read_all([path], Told())
    expected = torch.from_numpy(given[0].rollout).bfloat16().float().numpy()
    assert sample.rollout_log_probs is not None and sample.rollout_log_probs.dtype == np.float32
    assert same_bits(sample.rollout_log_probs, expected)


# --- NeMo-RL and prime-rl -------------------------------------------------------------------------------------------


def edit_lines(path: Path, **changes: Any) -> None:
    records = [json.loads(line) | changes for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_nemo_sample_mask_turns_a_sample_off(tmp_path: Path) -> None:
    (path,) = writers.nemo_rl(tmp_path, 2, draw(np.random.default_rng(0), 2))
    edit_lines(path, sample_loss_mask=0.0)
    samples = read_all([path], Told())
    assert [len(sample) > 0 and not sample.mask.any() for sample in samples] == [True, True]


def test_prime_tokens_of_cross_entropy_are_not_active(tmp_path: Path) -> None:
    given = draw(np.random.default_rng(3), 1)
    path = writers.prime_rl(tmp_path, 2, given)[0]
    length = len(given[0].prompt) + len(given[0])
    weights = [0.0] * length
    weights[len(given[0].prompt)] = 1.0
    edit_lines(path, rl_weights=weights)
    (sample, *_) = [s for part in files.find([path], tell=Told()) for s in files.read(part, PICKLES, Told())]
    assert np.flatnonzero(sample.mask).tolist() == [0]


def test_no_response_begins_at_the_first_token_of_a_sequence(tmp_path: Path) -> None:
    path = writers.nemo_rl(tmp_path, 2, draw(np.random.default_rng(0), 1))[0]
    record = json.loads(path.read_text())
    edit_lines(path, token_loss_mask=[1] * len(record["token_loss_mask"]))
    (sample,) = read_all([path], Told())
    assert sample.prompt_length == 1 and len(sample) == record["input_lengths"] - 1


def test_a_sequence_without_response_is_an_empty_sample(tmp_path: Path) -> None:
    path = writers.nemo_rl(tmp_path, 2, draw(np.random.default_rng(0), 1))[0]
    edit_lines(path, token_loss_mask=[0] * len(json.loads(path.read_text())["token_loss_mask"]))
    (sample,) = read_all([path], Told())
    assert len(sample) == 0 and sample.train_log_probs is not None and len(sample.train_log_probs) == 0


def test_prime_ranks_and_exports_that_are_missing(tmp_path: Path) -> None:
    for step in (1, 2):
        paths = writers.prime_rl(tmp_path, step, draw(np.random.default_rng(step), 4))
    paths[1].unlink()
    (paths[0].parent / "STABLE").unlink()
    told = Told()
    assert len(read_all([tmp_path], told)) == 6
    assert [(path.name, sentence) for path, sentence in told] == [
        ("step_2", "the files of the ranks 1 are missing, which other steps have"),
        ("step_2", "the step has no file STABLE: its export was not finished when it was read"),
    ]


def test_skyrl_without_a_response_mask_is_refused(tmp_path: Path) -> None:
    """Of left-padded rows nothing else tells where the prompt ends."""
    given = [sample.without_missing() for sample in draw(np.random.default_rng(2))]
    with pytest.raises(DumpError, match="must have loss_mask, response_mask"):
        read_all(writers.skyrl(tmp_path, 1, given, response_mask=False), Told())


# --- ranks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tells_cp", [True, False])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("cp", [1, 2, 3])
@pytest.mark.parametrize(("dp", "pp"), [(1, 1), (2, 1), (2, 2)])
def test_ranks_are_put_together(tells_cp: bool, tp: int, cp: int, dp: int, pp: int, tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(cp), 7)]
    paths = writers.ranks(tmp_path, 1, given, tp=tp, cp=cp, dp=dp, pp=pp, tells_cp=tells_cp)
    told = Told()
    samples = in_index_order(read_all(paths, told))
    assert len(samples) == 7, told.text
    for sample, expected in zip(samples, given, strict=True):
        assert_same(sample, expected, 1)
    assert not told, told.text


def test_padded_rows_are_cut_by_their_padded_length(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 4)]
    paths = writers.ranks(tmp_path, 1, given, cp=2, padded=40)
    for sample, expected in zip(read_all(paths, Told()), given, strict=True):
        assert_same(sample, expected, 1)


def test_a_missing_context_parallel_rank_is_never_papered_over(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 6)]
    writers.ranks(tmp_path, 1, given, cp=2, dp=2, drop=[3])
    told = Told()
    samples = read_all([tmp_path], told)
    assert [sample.sample_index for sample in samples] == [0, 2, 4]
    assert "of its 2 context-parallel ranks the files of 1 are missing: its 3 samples are left out" in told.text


def test_a_missing_tensor_parallel_copy_costs_nothing_but_is_told(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 6)]
    writers.ranks(tmp_path, 1, given, tp=2, cp=2, drop=[1])
    told = Told()
    assert len(read_all([tmp_path], told)) == 6
    assert "step 1 lacks the files of the ranks 1" in told.text


def test_older_slime_ranks_that_do_not_fit_are_left_out(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 6)]
    writers.ranks(tmp_path, 1, given, cp=2, tells_cp=False, drop=[1])
    told = Told()
    with pytest.raises(DumpError, match="no sample of the format slime could be read"):
        read_all([tmp_path], told)
    assert "its 6 samples are left out" in told.text


def test_copies_that_differ_are_told(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 3)]
    paths = writers.ranks(tmp_path, 1, given, tp=2, cp=1)
    payload = torch.load(paths[1])
    payload["rollout_data"]["log_probs"][0] += 1
    torch.save(payload, paths[1])
    told = Told()
    for sample, expected in zip(read_all(paths, told), given, strict=True):
        assert_same(sample, expected, 1)
    assert "its log-probabilities differ from those of rank 0, which are taken" in told.text


def test_shards_of_equal_lengths_are_no_copies(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(5), 1)] * 2
    given[1] = replace(given[0], index=1, tokens=[token + 1 for token in given[0].tokens], train=given[0].train - 1)
    paths = writers.ranks(tmp_path, 1, given, cp=1, dp=2)
    told = Told()
    for sample, expected in zip(read_all(paths, told), given, strict=True):
        assert_same(sample, expected, 1)
    assert not told


# --- finding --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WRITERS)
def test_a_misnamed_file_is_known_by_its_content(name: str, tmp_path: Path) -> None:
    paths, _ = written(name, tmp_path / "a", 3, draw(np.random.default_rng(0)))
    renamed = tmp_path / "b" / "3_0.dat"
    renamed.parent.mkdir()
    shutil.copy(paths[0], renamed)
    assert [part.format for part in files.find([renamed], tell=Told())] == [WRITERS[name][0]]


@pytest.mark.parametrize("name", WRITERS)
def test_steps_of_a_folder_in_order_of_their_numbers(name: str, tmp_path: Path) -> None:
    for step in (10, 9, 11, 2):
        written(name, tmp_path, step, draw(np.random.default_rng(step)))
    told = Told()
    parts = files.find([tmp_path], tell=told)
    steps = [part.step for part in parts]
    assert list(dict.fromkeys(steps)) == [2, 9, 10, 11]
    assert "6 steps are missing between 2 and 11: 3, 4, 5, 6, 7, 8" in told.text
    assert [sample.step for part in parts for sample in files.read(part, PICKLES, Told())] == sorted(
        sample.step for part in parts for sample in files.read(part, PICKLES, Told())
    )


def test_every_kth_step_is_a_sequence_too(tmp_path: Path) -> None:
    for step in (10, 20, 40):
        written("table jsonl", tmp_path, step, draw(np.random.default_rng(0)))
    told = Told()
    files.find([tmp_path], tell=told)
    assert [sentence for _, sentence in told] == ["1 steps are missing between 10 and 40: 30"]


def test_globs_folders_and_files_are_read_once(tmp_path: Path) -> None:
    for step in range(3):
        written("table npz", tmp_path, step, draw(np.random.default_rng(0)))
    paths = [tmp_path / "step_*.npz", tmp_path, tmp_path / "step_1.npz"]
    assert [part.step for part in files.find(paths, tell=Told())] == [0, 1, 2]


def test_files_without_a_step_come_as_people_count(tmp_path: Path) -> None:
    for name in ("part10", "part9", "part1"):
        (tmp_path / f"{name}.jsonl").write_text('{"train_log_probs": [-1.0]}\n')
    parts = files.find([tmp_path], tell=Told())
    assert [part.paths[0].stem for part in parts] == ["part1", "part9", "part10"]
    assert {part.step for part in parts} == {None}


def test_all_formats_in_one_folder(tmp_path: Path) -> None:
    for name in WRITERS:
        written(name, tmp_path / name, 0, draw(np.random.default_rng(0)))
    found = {part.format for part in files.find([tmp_path], tell=Told())}
    assert found == set(files.FORMATS) - {"auto"}
    assert {part.format for part in files.find([tmp_path], "table", tell=Told())} == {"table"}


def test_files_that_are_no_dump(tmp_path: Path) -> None:
    written("table jsonl", tmp_path, 0, draw(np.random.default_rng(0)))
    for name in ("a.txt", "b.png"):
        (tmp_path / name).write_bytes(b"\x89 nothing")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "empty.jsonl").touch()
    told = Told()
    assert len(files.find([tmp_path], tell=told)) == 1
    assert {(path.name, sentence) for path, sentence in told} == {
        ("config.json", "it is no dump of a known format"),
        ("empty.jsonl", "the file is empty"),
    }
    named = Told()
    files.find([tmp_path / "step_0.jsonl", tmp_path / "a.txt"], tell=named)
    assert [(path.name, sentence) for path, sentence in named] == [("a.txt", "it is no dump of a known format")]


@pytest.mark.parametrize(
    ("path", "format", "match"),
    [
        ("nowhere", "auto", "nowhere does not exist"),
        ("none*.pt", "auto", "no dump of a known format was found"),
        (".", "auto", "no dump of a known format was found"),
        (".", "csv", "the format must be one of auto, slime"),
    ],
)
def test_nothing_found(path: str, format: str, match: str, tmp_path: Path) -> None:
    with pytest.raises(DumpError, match=match):
        files.find([tmp_path / path], format, tell=Told())


def test_a_pipe_is_no_dump(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(DumpError, match="no regular file"):
        files.find([tmp_path / "pipe.jsonl"], tell=Told())
    with pytest.raises(DumpError, match="no dump"):
        files.find([tmp_path], tell=Told())


# --- one side only --------------------------------------------------------------------------------------------------


def test_rollout_data_of_slime(tmp_path: Path) -> None:
    path = tmp_path / "rollout_data" / "0.pt"
    path.parent.mkdir()
    torch.save({"rollout_id": 0, "samples": [{"tokens": [1], "rollout_log_probs": [-1.0]}]}, path)
    with pytest.raises(DumpError, match="--dump-details or --save-debug-train-data"):
        files.find([path], tell=Told())
    written("slime", tmp_path, 0, draw(np.random.default_rng(0)))
    told = Told()
    assert [part.paths[0].parent.name for part in files.find([tmp_path], tell=told)] == ["train_data"]
    assert "the file holds the rollout side only" in told.text


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("1.jsonl", b'{"input": "a", "output": "b", "gts": "c", "score": 1.0, "step": 1}\n', "verl has no switch"),
        ("gen_batch.dp", b"\x80\x04\x95\x10cverl.protocol\nDataProto\n", "rollout side only"),
        ("rollouts_rank0_iteration1_math.json", b'[[{"logprobs": [[-1.0]], "generation_mask": [[true]]}]]', "Megatron"),
    ],
)
def test_rollout_only_files(name: str, content: bytes, match: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DumpError, match=match):
        files.find([tmp_path], tell=Told())


def test_no_train_side(tmp_path: Path) -> None:
    given = draw(np.random.default_rng(0))
    for name, key, match in (
        ("slime", "log_probs", "--get-mismatch-metrics"),
        ("miles", "log_probs", "--get-mismatch-metrics"),
    ):
        for path in WRITERS[name][1](tmp_path / name, 0, given):
            payload = torch.load(path)
            for record in payload.get("samples", [payload.get("rollout_data")]):
                record.pop(key)
            torch.save(payload, path)
        with pytest.raises(DumpError, match=match):
            read_all([tmp_path / name], Told())
    (path,) = writers.nemo_rl(tmp_path, 0, given)
    edit_lines(path, prev_logprobs=None)
    with pytest.raises(DumpError, match="force_on_policy_ratio"):
        read_all([path], Told())


@pytest.mark.parametrize("list_type", ["list_", "large_list"])
@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_cells_of_parquet_are_those_of_each_row(
    list_type: str, batch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever batches begin, with null lists, nulls in lists, empty lists, texts and plain numbers."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    listed = getattr(pa, list_type)
    kinds = {
        "train_log_probs": listed(pa.float32()), "rollout_log_probs": listed(pa.float64()), "mask": listed(pa.bool_()),
        "token_ids": listed(pa.int32()), "names": listed(pa.string()), "fixed": pa.list_(pa.int64(), 2),
        "step": pa.int64(), "prompt_length": pa.int16(), "text": pa.string(),
        "labels": pa.map_(pa.string(), pa.string()),
    }  # fmt: skip
    rows = [
        {
            "train_log_probs": [-0.5 * row] * (row % 4), "rollout_log_probs": None if row == 5 else [-1.0, -2.0 * row],
            "mask": [True, row % 2 == 0], "token_ids": [row, None] if row > 6 else [row],
            "names": ["a", None, str(row)], "fixed": [row, 7],
            "step": row, "prompt_length": None if row == 3 else row, "text": f"r{row}",
            "labels": {"engine": str(row)},
        }
        for row in range(10)
    ]  # fmt: skip
    path = tmp_path / "a.parquet"
    parquet.write_table(pa.Table.from_pylist(rows, schema=pa.schema(kinds)), path, row_group_size=7)
    monkeypatch.setattr("rlk_audit.dumps.table_parquet.BATCH_VALUES", batch * 3)
    found = [cells for _, cells in table_parquet.records(path, None)]
    assert len(found) == len(rows)
    for cells, row in zip(found, rows, strict=True):
        for name, cell in cells.items():
            plain = cell.tolist() if isinstance(cell, np.ndarray) else cell
            assert plain == (list(row[name].items()) if name == "labels" else row[name]), name
        assert cells["train_log_probs"].dtype == np.float32
        assert cells["mask"].dtype == np.bool_
    assert isinstance(found[8]["token_ids"], np.ma.MaskedArray)


@pytest.mark.parametrize("list_type", ["list_", "large_list", "list_view", "large_list_view"])
def test_cells_of_a_part_of_a_column(list_type: str) -> None:
    """A view's lists may lie anywhere, so that one need not end where the next begins."""
    pa = pytest.importorskip("pyarrow")
    if not hasattr(pa, list_type):
        pytest.skip("this pyarrow has no list views")
    lists = [[-0.5 * row] * (row % 4) for row in range(10)]
    columns = [pa.array(lists, getattr(pa, list_type)(pa.float32()))]
    if "view" in list_type:
        kind = pa.ListViewArray if list_type == "list_view" else pa.LargeListViewArray
        whole = pa.array(range(20), pa.float32())
        backwards = [list(range(2 * row, 2 * row + row % 3)) for row in reversed(range(10))]
        sizes = [len(one) for one in backwards]
        columns.append(kind.from_arrays([2 * row for row in reversed(range(10))], sizes, whole))
    for column, expected in zip(columns, (lists, backwards) if len(columns) > 1 else (lists,), strict=True):
        part = table_parquet._cells(column.slice(2, 5))
        assert [np.asarray(part(row)).tolist() for row in range(5)] == expected[2:7]
