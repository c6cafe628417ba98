"""Damaged and hostile files: a sentence and the samples that are whole, never a trace, a hang or a full memory."""

from __future__ import annotations

import io
import json
import pickle
import random
import struct
import sys
import time
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from dump_writers import WRITERS, draw, ranks

from rlk_audit.dumps import bounds, files, jsonl, parquet_footer, skyrl, table_arrays, table_parquet
from rlk_audit.dumps.sample import DumpError, DumpPart, DumpSample, ReadOptions, Tell

SAFE = ReadOptions()
MOST_BYTES = 64 * 2**20
"""Memory that reading a damaged file of a few kilobytes may take."""
MOST_SECONDS = 20

Told = list[tuple[Path, str]]


def read(path: Path, format: str = "auto", options: ReadOptions = SAFE) -> tuple[list[DumpSample], Told]:
    """Read a path's samples; a DumpError of a part is told with the rest, as a caller would."""
    told: Told = []
    samples: list[DumpSample] = []

    def tell(place: Path, sentence: str) -> None:
        told.append((place, sentence))

    try:
        for part in files.find([path], format, tell=tell):
            samples += read_part(part, options, tell)
    except DumpError as error:
        told.append((path, str(error)))
    for _, sentence in told:
        assert sentence and "\n" not in sentence and len(sentence) < 600 and "Traceback" not in sentence, sentence
    for sample in samples:
        check(sample)
    return samples, told


def read_part(part: DumpPart, options: ReadOptions, tell: Tell) -> Iterator[DumpSample]:
    try:
        yield from files.read(part, options, tell)
    except DumpError as error:
        tell(part.paths[0], str(error))


def check(sample: DumpSample) -> None:
    assert sample.train_log_probs is not None and sample.train_log_probs.dtype.kind == "f"
    arrays = [sample.train_log_probs, sample.mask, sample.rollout_log_probs, sample.rollout_missing, sample.token_ids]
    assert all(array.ndim == 1 and len(array) <= bounds.MAX_SAMPLE_TOKENS for array in arrays if array is not None)
    assert sample.mask.dtype == bool
    assert sample.token_ids is None or sample.token_ids.dtype == np.int64
    for number in (sample.step, sample.sample_index, sample.rollout_id, sample.prompt_length):
        assert number is None or -(2**63) <= number < 2**63


def refusal(path: Path, format: str = "auto", options: ReadOptions = SAFE) -> str:
    samples, told = read(path, format, options)
    assert not samples
    return "\n".join(sentence for _, sentence in told)


# --- mutations ------------------------------------------------------------------------------------------------------

HUGE = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00\x00\x00\x40", b"\xff" * 8, b"\x00" * 7 + b"\x40")
TEXTS = (
    b"null", b"[", b"]", b"{", b"}", b'"', b"1e999", b"-1", b"9" * 400, b"true", b"[[1]]", b"{}", b"NaN", b"\\u0000",
    b"\xff\xfe", b"[" * 200, b'{"a":' * 200, b"\n", b"",
)  # fmt: skip


def flip(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def truncate(data: bytearray, rng: random.Random) -> None:
    del data[rng.randrange(len(data)) :]


def insert_huge(data: bytearray, rng: random.Random) -> None:
    value = rng.choice(HUGE)
    at = rng.randrange(len(data))
    data[at : at + len(value)] = value


def replace_text(data: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(data))
    data[at : at + rng.choice((0, 1, 4, 16))] = rng.choice(TEXTS)


def move(data: bytearray, rng: random.Random) -> None:
    start, length, to = rng.randrange(len(data)), rng.randrange(1, 200), rng.randrange(len(data))
    data[to : to + (length if rng.random() < 0.5 else 0)] = data[start : start + length]


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (flip, truncate, insert_huge, replace_text, move)


def rebuilt_archive(data: bytes, rng: random.Random) -> bytes:
    """Damage one entry of a zip archive and write it with checksums that are right."""
    entries = zipfile.ZipFile(io.BytesIO(data))
    target = rng.choice([info for info in entries.infolist() if info.file_size])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for info in entries.infolist():
            content = bytearray(entries.read(info))
            if info is target:
                rng.choice(MUTATIONS)(content, rng)
            archive.writestr(info.filename, bytes(content), info.compress_type)
    return out.getvalue()


def mutated(data: bytes, rng: random.Random) -> bytes:
    if data.startswith(b"PK") and rng.random() < 0.7:
        return rebuilt_archive(data, rng)
    copy = bytearray(data)
    rng.choice(MUTATIONS)(copy, rng)
    return bytes(copy)


def damage(name: str, folder: Path, seeds: range) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    paths = WRITERS[name][1](folder / "whole", 7, given)
    whole = [path.read_bytes() for path in paths]
    started, resident = time.monotonic(), peak_resident()
    for seed in seeds:
        rng = random.Random(seed)
        chosen = rng.randrange(len(paths))
        paths[chosen].write_bytes(mutated(whole[chosen], rng))
        format = rng.choice(("auto", WRITERS[name][0]))
        samples, told = read(folder / "whole", format, ReadOptions(allow_pickle=name == "skyrl"))
        assert samples or told, f"seed {seed} was passed over in silence"
        paths[chosen].write_bytes(whole[chosen])
    assert peak_resident(reset=False) - resident < MOST_BYTES
    assert time.monotonic() - started < MOST_SECONDS * max(1, len(seeds) / 100)


def peak_resident(reset: bool = True) -> int:
    """Most bytes that the process had in memory since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


@pytest.mark.parametrize("name", WRITERS)
def test_damaged_files(name: str, tmp_path: Path) -> None:
    damage(name, tmp_path, range(200))


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITERS)
def test_damaged_files_at_length(name: str, tmp_path: Path) -> None:
    damage(name, tmp_path, range(1_000, 6_000))


WRONG: tuple[Any, ...] = (
    None, True, -1, 2**63, 10**400, 1.5, float("nan"), float("inf"), "text", [], [[]], [[1.0]], [None], ["a"],
    [True, 1.0], [10**400], [2**63], {}, {"a": 1}, (1,), [1.0] * 3,
)  # fmt: skip


@pytest.mark.parametrize("name", ["nemo-rl", "prime-rl", "table jsonl"])
def test_wrong_types_in_json(name: str, tmp_path: Path) -> None:
    """Each field of a line in turn; the other samples are read."""
    paths = WRITERS[name][1](tmp_path, 7, draw(np.random.default_rng(0), 4))
    lines = [json.loads(line) for line in paths[0].read_text().splitlines()]
    for key in lines[0]:
        for wrong in WRONG:
            paths[0].write_text("".join(json.dumps(line) + "\n" for line in [lines[0] | {key: wrong}, *lines[1:]]))
            samples, told = read(paths[0])
            assert len(samples) in (len(lines), len(lines) - 1) or "force_on_policy_ratio" in str(told), (key, wrong)
            assert len(samples) == len(lines) or told


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("token_ids", [1.5], "token_ids must be whole numbers of 64 bits"),
        ("token_ids", [2**63], "token_ids must be numbers of 64 bits"),
        ("sample_index", 1.5, "sample_index must be a whole number of 64 bits"),
        ("mask", [None], "mask must be numbers or booleans"),
        ("mask", [float("nan")], "mask must be numbers or booleans"),
        ("train_log_probs", [True, 1.0], "train_log_probs must be numbers or null, got bool"),
        ("train_log_probs", [True], "train_log_probs must be numbers, got bool"),
        ("train_log_probs", [[-1.0]], "train_log_probs must be numbers or null, got list"),
        ("labels", {"engine": [["e0"]]}, "the label engine must be text or numbers, got list"),
        ("labels", ["e0"], "its labels must be an object of names and labels"),
        ("rollout_missing", [1, 0], "its rollout_missing must be as long as its rollout_log_probs"),
        ("train_nonfinite", {"NaN": [1]}, "must be inside its arrays"),
        ("train_nonfinite", {"nan": [0]}, "must be lists by NaN, Infinity and -Infinity"),
    ],
)
def test_what_is_wrong_is_named(field: str, value: Any, match: str, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"train_log_probs": [-1.0], "rollout_log_probs": [-1.0], field: value}) + "\n")
    assert match in refusal(path)


@pytest.mark.parametrize(
    ("arrays", "match"),
    [
        ({"lengths": [2]}, "the lengths must be of all 3 tokens together"),
        ({"lengths": [4, -1]}, "the lengths must be of all 3 tokens together"),
        ({"cu_seqlens": [1, 3]}, "cu_seqlens must begin with 0"),
        ({}, "flat arrays need lengths"),
        ({"lengths": [3], "mask": [1]}, "mask must have the shape of train_log_probs"),
        ({"lengths": [3], "sample_index": [1, 2]}, "sample_index must have one entry a sample, 1"),
    ],
)
def test_arrays_that_do_not_fit_together(arrays: dict[str, Any], match: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", train_log_probs=np.zeros(3), **arrays)
    assert match in refusal(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["slime", "miles", "slime per rank"])
def test_wrong_types_in_torch_files(name: str, tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    paths = WRITERS[name][1](tmp_path, 7, given)
    payload = torch.load(paths[0])
    odd = (*WRONG, torch.zeros(2, 2), torch.tensor(1.0), torch.zeros(3, dtype=torch.complex64), torch.zeros(0))
    record = payload["samples"][0] if "samples" in payload else payload["rollout_data"]
    for holder in (record, payload):
        for key, value in list(holder.items()):
            for wrong in odd:
                holder[key] = wrong
                torch.save(payload, paths[0])
                samples, told = read(tmp_path)
                assert samples or told
            holder[key] = value


@pytest.mark.parametrize("name", ["loss_mask", "response_mask", "rollout_logprobs", "sequences", "attention_mask"])
@pytest.mark.parametrize("change", ["narrow", "short", "flat", "text", "none"])
def test_columns_of_skyrl_that_do_not_fit(name: str, change: str, tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    (path,) = WRITERS["skyrl"][1](tmp_path, 7, given)
    with path.open("rb") as file:
        state = skyrl._Unpickler(file).load()["state"]
    column = state["batch_dict"][name]
    array = np.frombuffer(column["data"], column["dtype"]).reshape(column["shape"])
    changed = {"narrow": array[:, :1], "short": array[:1], "flat": array[0]}.get(change)
    state["batch_dict"][name] = {"text": "text", "none": None}.get(change)
    if changed is not None:
        state["batch_dict"][name] = column | {"data": changed.tobytes(), "shape": changed.shape}
    batch = skyrl._Batch()
    batch["state"] = state
    path.write_bytes(pickle.dumps(batch))
    samples, told = read(path, "skyrl", ReadOptions(allow_pickle=True))
    needed = name in ("loss_mask", "response_mask")
    assert len(samples) == (3 if change == "none" and not needed else 0)
    assert samples or "of the batch" in str(told) or "the batch must have" in str(told)


def test_wrong_entries_in_columns_of_a_rank(tmp_path: Path) -> None:
    """One sample's entry of each column: it alone is left out, with a sentence."""
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    (path,) = ranks(tmp_path, 7, given, cp=1)
    payload = torch.load(path)
    for key in ("tokens", "loss_masks", "response_lengths", "total_lengths", "log_probs", "rollout_log_probs"):
        entry = payload["rollout_data"][key][1]
        for wrong in (*WRONG, torch.zeros(2, 2), torch.zeros(1).expand(2**40)):
            payload["rollout_data"][key][1] = wrong
            torch.save(payload, path)
            samples, told = read(path)
            assert len(samples) == 3 or (len(samples) == 2 and len(told) == 1), (key, wrong, told)
        payload["rollout_data"][key][1] = entry


# --- bounds ---------------------------------------------------------------------------------------------------------


def traced(path: Path, format: str = "auto") -> tuple[list[DumpSample], Told, int]:
    tracemalloc.start()
    try:
        samples, told = read(path, format)
        return samples, told, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_deep_nesting_is_refused_without_recursion(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = '{"train_log_probs": [-1.0], "rollout_log_probs": [-1.0]}\n'
    path.write_text(good + '{"train_log_probs": ' + "[" * 1_000_000 + "\n" + '{"a":' * 300_000 + "\n" + good)
    started = time.monotonic()
    samples, told = read(path)
    assert len(samples) == 2 and time.monotonic() - started < 5
    assert [sentence for _, sentence in told] == [
        f"line {line} is left out: lists and objects must be nested at most 32 deep" for line in (2, 3)
    ]


def test_brackets_in_strings_are_no_nesting() -> None:
    assert not jsonl.nesting_exceeds(json.dumps({"a": '\\"' + "[" * 100, "b": "{" * 100}).encode(), 4)
    assert jsonl.nesting_exceeds(b'{"a": "' + b"\\" * 2 + b'"' + b"[" * 100, 4)
    assert not jsonl.nesting_exceeds(b"[]" * 10_000, 4)
    started = time.monotonic()
    jsonl.nesting_exceeds(b'"' + b'\\"' * 200_000 + b"[" * 10 + b"\\", 4)
    assert time.monotonic() - started < 2


def test_a_line_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    good = b'{"train_log_probs": [-1.0], "rollout_log_probs": [-1.0]}\n'
    path.write_bytes(good + b'{"train_log_probs": [' + b"0," * 20_000_000 + b"\n" + good)
    samples, told, peak = traced(path)
    assert len(samples) == 2 and peak < 8 * 2**20
    assert [sentence for _, sentence in told] == ["line 2 is left out: a line must be at most 1000 bytes long"]


def npz_bomb(path: Path, size: int) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (size // 4,)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("train_log_probs.npy", "w") as file:
        file.write(header.getvalue())
        for _ in range(size // 2**20):
            file.write(bytes(2**20))


def test_a_zip_bomb_as_npz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_arrays, "MAX_DECODED_BYTES", 2**20)
    npz_bomb(tmp_path / "a.npz", 256 * 2**20)
    assert (tmp_path / "a.npz").stat().st_size < 2**20
    _, told, peak = traced(tmp_path / "a.npz")
    assert "the arrays must be at most 1048576 bytes" in str(told) and peak < 8 * 2**20


def test_a_zip_bomb_as_pt(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    (path,) = WRITERS["slime"][1](tmp_path, 7, given)
    entries = zipfile.ZipFile(io.BytesIO(path.read_bytes()))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for info in entries.infolist():
            content = entries.read(info)
            archive.writestr(info.filename, bytes(200 * 2**20) if info.filename.endswith("data/0") else content)
    _, told, peak = traced(path)
    assert "compressed entries" in str(told) and peak < 8 * 2**20


def test_huge_shapes_in_headers(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (2**50,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("train_log_probs.npy", header.getvalue())
    text = json.dumps({"train_log_probs": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (tmp_path / "b.safetensors").write_bytes(struct.pack("<Q", 2**62) + text)
    for name, match in (("a.npz", "claims more bytes"), ("a.safetensors", "damaged"), ("b.safetensors", "cut off")):
        _, told, peak = traced(tmp_path / name)
        assert match in str(told) and peak < 8 * 2**20


def test_tensors_larger_than_their_bytes(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 2)]
    (path,) = WRITERS["slime"][1](tmp_path, 7, given)
    payload = torch.load(path)
    payload["samples"][0]["log_probs"] = torch.zeros(1).expand(2**40)
    torch.save(payload, path)
    samples, told, peak = traced(path)
    assert len(samples) == 1 and "more than 16777216 values" in str(told) and peak < 8 * 2**20


def test_row_groups_of_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pa.table({"train_log_probs": [[0.0] * 3_000_000], "mask": [[1]]}), path)
    assert path.stat().st_size < 100_000
    monkeypatch.setattr(table_parquet, "MAX_SAMPLE_TOKENS", 2**20)
    assert "a row group must hold at most" in refusal(path)


def test_parquet_is_read_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [[-1.0] * 100] * 5000
    pyarrow.parquet.write_table(pa.table({"train_log_probs": rows, "rollout_log_probs": rows}), tmp_path / "a.parquet")
    monkeypatch.setattr(table_parquet, "BATCH_VALUES", 1000)
    sizes: list[int] = []
    whole = pyarrow.parquet.ParquetFile.iter_batches

    def counted(self: Any, batch_size: int, **rest: Any) -> Any:
        sizes.append(batch_size)
        return whole(self, batch_size, **rest)

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", counted)
    samples, told = read(tmp_path / "a.parquet")
    assert len(samples) == 5000 and not told and sizes == [10]


def test_pickles_that_number_their_objects_too_high(tmp_path: Path) -> None:
    path = tmp_path / "global_step_1_training_input.pkl"
    path.write_bytes(b"\x80\x02X\x12\x00\x00\x00TrainingInputBatchr\xff\xff\xff\x0f.")
    assert "numbers more objects than it can hold" in refusal(path, options=ReadOptions(allow_pickle=True))


def test_values_that_changed_on_disk(tmp_path: Path) -> None:
    """Values are not part of the pickle, so that only their checksum tells."""
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 3)]
    (path,) = WRITERS["slime"][1](tmp_path, 7, given)
    data = bytearray(path.read_bytes())
    data[data.index(given[0].train.tobytes())] ^= 1
    path.write_bytes(data)
    assert "the checksum of its entry" in refusal(path)


def test_lists_in_lists_of_a_footer(tmp_path: Path) -> None:
    footer = b"\x19" * 100_000
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1" + b"train_log_probs" + footer + struct.pack("<I", len(footer)) + b"PAR1")
    with pytest.raises(DumpError, match="lists in lists"):
        parquet_footer.most_values(path)
    assert refusal(path)


# --- code in files --------------------------------------------------------------------------------------------------


class Bomb:
    """Touches a file as soon as it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_a_pickle_is_refused_unopened(tmp_path: Path) -> None:
    path, touched = tmp_path / "global_step_1_training_input.pkl", tmp_path / "touched"
    path.write_bytes(pickle.dumps(["TrainingInputBatch", Bomb(touched)]))
    text = refusal(path)
    assert "--allow-pickle" in text and "would run code" in text and not touched.exists()
    assert "no training batch of SkyRL" in refusal(path, options=ReadOptions(allow_pickle=True))
    assert touched.exists()  # the bomb is a real one


@pytest.mark.parametrize("name", ["slime", "miles", "slime per rank"])
def test_code_in_a_torch_file_is_refused(name: str, tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 2)]
    touched = tmp_path / "touched"
    for path in WRITERS[name][1](tmp_path, 1, given):
        payload = torch.load(path)
        payload["more"] = Bomb(touched)
        torch.save(payload, path)
    text = refusal(tmp_path / "train_data")
    assert "--allow-pickle" in text and not touched.exists()
    samples, _ = read(tmp_path / "train_data", options=ReadOptions(allow_pickle=True))
    assert len(samples) == 2 and touched.exists()


@pytest.mark.parametrize("value", [bytearray(4), {1}, np.zeros(3), torch.zeros(3).to_sparse()])
def test_what_a_dump_has_no_use_for_needs_the_flag(value: Any, tmp_path: Path) -> None:
    (path,) = WRITERS["slime"][1](tmp_path, 1, [draw(np.random.default_rng(0), 1)[0].without_missing()])
    payload = torch.load(path)
    torch.save({**payload, "more": value}, path)
    assert "--allow-pickle" in refusal(path)
    assert len(read(path, options=ReadOptions(allow_pickle=True))[0]) == 1


def test_objects_in_npz_are_refused(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    values = np.array([Bomb(touched)], dtype=object)
    np.savez(tmp_path / "a.npz", train_log_probs=values, lengths=[1])
    assert "must hold numbers or text" in refusal(tmp_path / "a.npz") and not touched.exists()


# --- sentences ------------------------------------------------------------------------------------------------------


def test_a_file_cut_off_gives_the_lines_in_front(tmp_path: Path) -> None:
    for name in ("nemo-rl", "prime-rl", "table jsonl"):
        path = WRITERS[name][1](tmp_path, 7, draw(np.random.default_rng(0), 8))[0]
        text = path.read_text()
        lines = text.count("\n")
        path.write_text(text[: -len(text) // (2 * lines)])
        samples, told = read(path)
        assert len(samples) == lines - 1
        assert f"line {lines} is left out: it is not JSON, or cut off" in str(told)


def test_one_fault_of_many_samples_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good, bad = '{"train_log_probs": [-1.0]}\n', '{"train_log_probs": ["a"]}\n'
    path.write_text(good + bad * 999)
    samples, told = read(path)
    assert len(samples) == 1
    assert [sentence for _, sentence in told] == [
        *(f"line {line} is left out: train_log_probs must be numbers or null, got str" for line in range(2, 7)),
        "and 994 more are left out: train_log_probs must be numbers or null, got str",
    ]


@pytest.mark.parametrize("format", [name for name in files.FORMATS if name != "auto"])
@pytest.mark.parametrize(
    "content", [b"", b"\n", b"PK\x03\x04", b"PAR1", b"\x80\x04.", b"{}\n", b"\x00" * 100, b"text\n"]
)
def test_foreign_files_of_a_format_by_name(format: str, content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "step_1.jsonl"
    path.write_bytes(content)
    assert refusal(path, format)
    assert refusal(path, format, ReadOptions(allow_pickle=True))


@pytest.mark.parametrize(("name", "package"), [("table parquet", "pyarrow"), ("table safetensors", "safetensors")])
def test_packages_that_are_not_installed(
    name: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (path,) = WRITERS[name][1](tmp_path, 1, draw(np.random.default_rng(0)))
    for module in [module for module in sys.modules if module.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    text = refusal(path)
    assert f"needs {package}, which cannot be imported" in text and "pip install 'rlk_audit[tables]'" in text


def test_a_damaged_rank_does_not_hide_the_others(tmp_path: Path) -> None:
    given = [sample.without_missing() for sample in draw(np.random.default_rng(0), 6)]
    paths = ranks(tmp_path, 1, given, cp=1, dp=3)
    paths[1].write_bytes(paths[1].read_bytes()[:-100])
    samples, told = read(tmp_path)
    assert sorted(sample.sample_index for sample in samples) == [0, 2, 3, 5]
    assert [path for path, _ in told] == [paths[1]]


def test_the_footer_tells_what_pyarrow_tells(tmp_path: Path) -> None:
    for seed in range(10):
        (path,) = WRITERS["table parquet"][1](tmp_path, seed, draw(np.random.default_rng(seed), 9))
        with pyarrow.parquet.ParquetFile(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            told = [max(group.column(i).num_values for i in range(group.num_columns)) for group in groups]
        assert parquet_footer.most_values(path) == told and len(told) == 3
