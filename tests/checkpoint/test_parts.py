"""Law: processes that share no folder save parts, and any processes that see all parts together resume from them.

Parts count as a checkpoint only if all of them are there, and all are of one save.
"""

import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import gpipe
from gpipe.checkpoint import places, writing
from gpipe.checkpoint.parts import Seen, next_id, saves_in, unused_name
from gpipe.checkpoint.places import Url, to_place
from gpipe.errors import RemoteError
from tests.support.checkpointed import build, build_tied, differences, fail, make, remembered, train, trained
from tests.support.thread_ranks import RankPipe, all_well, optimizer_of, rank_pipes, run_ranks

Run = tuple[gpipe.GPipe, torch.optim.Optimizer]


def folders_of(base: Path, ranks: int) -> list[Path]:
    return [base / f"host_{rank}" for rank in range(ranks)]


def save_apart(base: Path, run: Run, folders: Sequence[Any] | None = None, **options: Any) -> list[Any]:
    """Saves in as many ranks as there are partitions, each to its folder. What each rank got."""
    pipes = rank_pipes(run[0])
    where = folders or folders_of(base, len(pipes))

    def save(own: RankPipe) -> Path:
        return gpipe.save(where[own._processes.rank], own, optimizer_of(*run, own), **options).wait()  # type: ignore[arg-type]

    return run_ranks(save, pipes)


def load_apart(folders: Sequence[Any], partitions: int, layers: Callable[[int], Any] = build) -> dict[str, Any]:
    """Loads in as many ranks as there are partitions, each from its folder. What all ranks have together."""
    whole, optimizer = trained(layers(9), partitions, steps=1)

    def load(own: RankPipe) -> tuple[dict[str, Any], Any]:
        mine = optimizer_of(whole, optimizer, own)
        checkpoint = gpipe.load(folders[own._processes.rank], own, mine)
        assert own.step_number == checkpoint.step_number
        return remembered(own, mine), checkpoint.extra

    loaded = all_well(run_ranks(load, rank_pipes(whole)))
    assert all(torch.equal(extra["noise"], torch.arange(5)) for _, extra in loaded)
    return {name: value for found, _ in loaded for name, value in found.items()}


def merge(folders: Sequence[Path], into: Path) -> Path:
    for folder in folders:
        shutil.copytree(folder, into, dirs_exist_ok=True)
    return into


def expected_of(run: Run, found: dict[str, Any]) -> dict[str, Any]:
    """What the whole run has, under the names that the ranks have."""
    whole = remembered(*run)
    return {name: whole[name] for name in whole if name in found}


EXTRA = {"noise": torch.arange(5)}


@pytest.mark.parametrize("layers", [build, build_tied])
@pytest.mark.parametrize("background", [False, True])
def test_any_number_of_ranks_resumes_from_parts_merged_or_not(
    background: bool, layers: Callable[[int], Any], tmp_path: Path
) -> None:
    run = trained(layers(1), 3)
    paths = all_well(save_apart(tmp_path, run, background=background, extra=EXTRA))
    assert paths == [folder / "step_2" for folder in folders_of(tmp_path, 3)]
    hosts = folders_of(tmp_path, 3)
    assert all(not list(host.glob("*.tmp-*")) and not (host / "latest").exists() for host in hosts)
    merged = merge(hosts, tmp_path / "merged")
    for partitions in (1, 2, 3):
        for folders in ([merged] * partitions, [*hosts, *hosts][: max(partitions, 3)]):
            if len(folders) == partitions:
                found = load_apart(folders, partitions, layers)
                assert differences(found, expected_of(run, found)) == []
    pipe = make(layers(5), 2)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=9.0)
    checkpoint = gpipe.load(merged, pipe, optimizer)
    assert differences(remembered(pipe, optimizer), remembered(*run)) == []
    assert differences(checkpoint.state_dict(), dict(run[0].state_dict())) == []
    assert differences(gpipe.load(merged).state_dict(), dict(run[0].state_dict())) == []
    assert [torch.equal(*losses) for losses in zip(train(pipe, optimizer, 2), train(*run, 2), strict=True)] == [
        True
    ] * 2
    assert gpipe.find_checkpoint(merged) == merged / "step_2"


def test_ranks_of_one_host_share_its_folder_and_ranks_at_other_places_resume(tmp_path: Path) -> None:
    run = trained(partitions=4)
    hosts = folders_of(tmp_path, 2)
    all_well(save_apart(tmp_path, run, [hosts[0], hosts[0], hosts[1], hosts[1]], extra=EXTRA))
    assert len(list((hosts[0] / "step_2").glob("part_*.json"))) == 2
    for folders in ([hosts[1], hosts[0]], [hosts[1], hosts[1], hosts[0]], [tmp_path / "empty", *hosts, hosts[0]]):
        found = load_apart(folders, len(folders))
        assert differences(found, expected_of(run, found)) == []


@pytest.fixture
def bucket() -> Any:
    """The address of an empty store, which the threads of this process share."""
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = [""]
    yield "memory://bucket/run"
    system.store.clear()


@pytest.mark.parametrize("background", [False, True])
def test_a_url_holds_what_a_folder_holds(background: bool, bucket: str, tmp_path: Path) -> None:
    run = trained(partitions=2)
    assert gpipe.find_checkpoint(bucket) is None
    paths = all_well(save_apart(tmp_path, run, [bucket] * 2, background=background, extra=EXTRA))
    assert list(map(str, paths)) == [f"{bucket}/step_2"] * 2
    for partitions in (1, 2, 3):
        found = load_apart([bucket] * partitions, partitions)
        assert differences(found, expected_of(run, found)) == []
    pipe = make(build(3), 1)
    assert gpipe.load(paths[0], pipe).step_number == 2
    assert str(gpipe.find_checkpoint(bucket)) == f"{bucket}/step_2"
    assert differences(gpipe.load(bucket).state_dict(), dict(run[0].state_dict())) == []
    for step in (3, 4, 5):  # and by one process
        pipe.step_number = step
        gpipe.save(bucket, pipe, keep=2, background=background).wait()
    names = {Path(name).parent.name for name in fsspec.filesystem("memory").find("/bucket/run")}
    assert names == {"step_4", "step_5"}
    assert gpipe.load(bucket, pipe).step_number == 5


def test_a_checkpoint_with_a_manifest_loads_from_a_url(bucket: str, tmp_path: Path) -> None:
    run = trained()
    gpipe.save(tmp_path, *run)
    system = fsspec.filesystem("memory")
    system.put(str(tmp_path), "/bucket/run", recursive=True)
    pipe, optimizer = trained(build(4), 1, steps=1)
    assert gpipe.load(bucket, pipe, optimizer).step_number == 2
    assert differences(remembered(pipe, optimizer), remembered(*run)) == []


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    path = gpipe.save(f"file://{tmp_path}/run", make()).wait()
    assert path == tmp_path / "run" / "step_0"
    assert to_place(f"file://{tmp_path}") == tmp_path
    assert str(Url("s3://bucket/a") / "b") == "s3://bucket/a/b"
    assert Url("s3://bucket/a").parent.name == "bucket"


def test_an_unknown_scheme_is_rejected(tmp_path: Path) -> None:
    for act in (partial(gpipe.save, "foo://x/run", make()), partial(gpipe.load, "foo://x/run")):
        with pytest.raises(ValueError, match="foo://x/run cannot be opened: Protocol not known"):
            act()
    with pytest.raises(ValueError, match="is a URL"):
        gpipe.save_weights("memory://weights", make())


# What does not belong together.


def findings_of(act: Callable[[], object]) -> list[str]:
    with pytest.raises(gpipe.CheckpointError) as raised:
        act()
    return raised.value.findings


def test_a_missing_part_is_named_and_never_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(partitions=2)
    hosts = folders_of(tmp_path, 2)
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    assert "is not shared by all processes" in caplog.text
    assert gpipe.find_checkpoint(hosts[0]) is None
    (part,) = (hosts[1] / "step_2").glob("part_1-of-2.*.json")
    for folder in (hosts[0], hosts[0] / "step_2"):
        (finding,) = findings_of(lambda folder=folder: gpipe.load(folder))  # type: ignore[misc]
        assert finding.startswith(f"{part.name} is missing. ")
        assert finding.endswith("[missing-part]")
    merged = merge(hosts, tmp_path / "merged")
    train(*run, 1)
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    shutil.copytree(hosts[1], merged, dirs_exist_ok=True)  # a part of step 3
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        assert gpipe.load(merged).step_number == 2
    assert "step_3 lacks part_0-of-2." in caplog.text
    assert "so step_2 is the newest complete checkpoint" in caplog.text
    for file in sorted((merged / "step_2").iterdir()):
        if file.suffix == ".safetensors":
            shutil.move(file, tmp_path / "aside")
            (finding,) = findings_of(lambda: gpipe.load(merged / "step_2"))
            assert finding.startswith(f"{file.name} is missing. ")
            shutil.move(tmp_path / "aside", file)
    assert gpipe.load(merged / "step_2").step_number == 2


def test_parts_of_different_saves_are_rejected_with_their_names(tmp_path: Path) -> None:
    first, second = trained(partitions=2), trained(build(7), partitions=2)
    for name, run in (("first", first), ("second", second)):
        all_well(save_apart(tmp_path / name, run, extra=EXTRA))
    mixed = tmp_path / "mixed"
    shutil.copytree(tmp_path / "first" / "host_0", mixed)
    shutil.copytree(tmp_path / "second" / "host_1", mixed, dirs_exist_ok=True)
    assert gpipe.find_checkpoint(mixed) is None
    parts = sorted(path.name for path in (mixed / "step_2").glob("part_*"))
    findings = findings_of(lambda: gpipe.load(mixed))
    assert any(parts[0] in finding and "different save" in finding for finding in findings)
    victim, optimizer = trained(build(2), 2, steps=1)
    before = {name: value.clone() for name, value in victim.state_dict().items()}
    hosts = [tmp_path / "first" / "host_0", tmp_path / "second" / "host_1"]
    pipes = rank_pipes(victim)
    raised = run_ranks(lambda own: gpipe.load(hosts[own._processes.rank], own), pipes)
    assert all(isinstance(error, gpipe.CheckpointError) for error in raised)
    assert len({str(error).partition("\n")[2] for error in raised}) == 1
    found = {name: value for own in pipes for name, value in own.state_dict().items()}
    assert differences(found, before) == []
    # A file of another save, under the part file of this one.
    whole = merge([tmp_path / "first" / "host_0", tmp_path / "first" / "host_1"], tmp_path / "whole")
    shutil.copy(tmp_path / "second" / "host_1" / "step_2" / "stage_1.safetensors", whole / "step_2")
    (finding,) = findings_of(lambda: gpipe.load(whole, victim, optimizer))
    assert finding.startswith("stage_1.safetensors has a different SHA-256.")
    # A part file that was renamed.
    forged = merge([tmp_path / "first" / "host_0"], tmp_path / "forged") / "step_2"
    (part,) = (tmp_path / "second" / "host_1" / "step_2").glob("part_1-*")
    (own,) = forged.glob("part_0-*")
    shutil.copy(part, forged / own.name.replace("part_0", "part_1"))
    assert any("belongs to a different save" in finding for finding in findings_of(lambda: gpipe.load(forged)))


def test_every_file_of_a_part_counts(tmp_path: Path) -> None:
    run = trained(partitions=2)
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    merged = merge(folders_of(tmp_path, 2), tmp_path / "merged")
    for path in sorted((merged / "step_2").iterdir()):
        good = path.read_bytes()
        for bad in (
            good[: len(good) // 2] + bytes([good[len(good) // 2] ^ 1]) + good[len(good) // 2 + 1 :],
            good[:-1],
            b"",
        ):
            path.write_bytes(bad)
            findings = findings_of(lambda: gpipe.load(merged))
            assert any(path.name in finding for finding in findings)
        path.write_bytes(good)
    gpipe.load(merged)


def test_damage_on_one_host_is_told_on_all_before_anything_changes(tmp_path: Path) -> None:
    run = trained(partitions=2)
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    hosts = folders_of(tmp_path, 2)
    path = hosts[1] / "step_2" / "stage_1.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for folders in (hosts, hosts[::-1], [tmp_path / "none", hosts[0], hosts[1]]):
        whole = make(build(3), len(folders))
        pipes = rank_pipes(whole)
        raised = run_ranks(lambda own: gpipe.load(folders[own._processes.rank], own), pipes)  # noqa: B023
        assert all("stage_1.safetensors has a different SHA-256" in str(error) for error in raised)
        found = {name: value for own in pipes for name, value in own.state_dict().items()}
        assert differences(found, dict(whole.state_dict())) == []


# Whole or not at all.


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("url", [False, True])
def test_a_rank_that_cannot_write_leaves_nothing_that_counts(
    background: bool, url: bool, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = trained(partitions=2)
    hosts: list[Any] = [bucket] * 2 if url else folders_of(tmp_path, 2)
    all_well(save_apart(tmp_path, run, hosts, extra=EXTRA))
    train(*run, 1)
    original = places.write_file

    def write_file(path: Path, chunks: Any) -> Any:
        if path.name == "stage_1.optimizer.safetensors":
            fail()
        return original(path, chunks)

    monkeypatch.setattr(writing, "write_file", write_file)
    first, second = save_apart(tmp_path, run, hosts, background=background, keep=1)
    assert isinstance(first, RemoteError)
    assert isinstance(second, OSError)
    monkeypatch.undo()
    found = load_apart(hosts, 2)
    expected = expected_of(run, found)
    assert "0.weight" in differences(found, expected)  # step 2
    if not url:
        assert not (hosts[1] / "step_3").exists()
        assert (hosts[0] / "step_3").exists() == background  # there rank 0 was done
    paths = all_well(save_apart(tmp_path, run, hosts, extra=EXTRA, keep=1))
    assert {path.name for path in paths} == {"step_3.2" if background else "step_3"}
    found = load_apart(hosts, 2)
    assert differences(found, expected_of(run, found)) == []
    if not url:
        assert [[path.name for path in host.iterdir()] for host in hosts] == [[paths[0].name]] * 2


def test_keep_counts_complete_checkpoints_and_removes_after_all_ranks_are_done(tmp_path: Path) -> None:
    run = trained(partitions=2)
    hosts = folders_of(tmp_path, 2)
    for _ in range(4):
        all_well(save_apart(tmp_path, run, keep=2, background=True))
        train(*run, 1)
    assert [sorted(path.name for path in host.iterdir()) for host in hosts] == [["step_4", "step_5"]] * 2
    (part,) = (hosts[1] / "step_5").glob("part_*")
    part.unlink()
    all_well(save_apart(tmp_path, run, keep=2))
    assert [sorted(path.name for path in host.iterdir()) for host in hosts] == [["step_4", "step_6"]] * 2


def test_a_folder_may_be_shared_then_not_then_again_and_the_last_save_is_the_newest(tmp_path: Path) -> None:
    """Bug story avoided: after parts were saved, `latest` still named the checkpoint before them."""
    run = trained(partitions=2, steps=1)
    host = folders_of(tmp_path, 2)[0]
    gpipe.save(host, *run)
    train(*run, 1)
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    other = folders_of(tmp_path, 2)[1]
    merge([other], host)
    assert gpipe.load(host).path.name == "step_2"
    run[0].step_number = 1  # went back
    gpipe.save(host, run[0])
    assert gpipe.load(host).path.name == "step_1.2"
    run[0].step_number = 2
    all_well(save_apart(tmp_path, run, extra=EXTRA))
    merge([other], host)
    assert gpipe.load(host).path.name == "step_2.2"
    all_well(save_apart(tmp_path, run, [host, host]))
    assert gpipe.load(host).path.name == "step_2.3"
    assert (host / "latest").read_text().startswith("step_2.3\n")


seen_strategy = st.lists(
    st.dictionaries(
        st.sampled_from(["step_1", "step_2", "step_2.2"]),
        st.lists(
            st.builds("part_{}-of-{}.{:016x}.json".format, st.integers(0, 3), st.integers(1, 3), st.integers(1, 5)),
            max_size=4,
        ),
        max_size=3,
    ),
    min_size=1,
    max_size=3,
)


@settings(max_examples=200, deadline=None)
@given(seen_strategy, st.integers(0, 4))
def test_a_new_save_is_newer_than_all_that_any_rank_sees_and_has_an_unused_name(seen: list[Seen], now: int) -> None:
    found = saves_in(seen)
    assert next_id(seen, now) > max((save.save_id for save in found), default="")
    assert not any(unused_name(seen, 2) in one for one in seen)
    for save in found:
        assert save.missing or all(
            any(save.file(part) in one.get(save.name, []) for one in seen) for part in range(save.parts)
        )
