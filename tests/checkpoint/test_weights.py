"""Weights in the layout of the Hugging Face Hub: written, read, and refused when they do not fit."""

import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import gpipe
from gpipe.checkpoint import weights as files_of_weights
from tests.support.checkpointed import build, build_tied, differences, make, snapshot
from tests.support.thread_ranks import RankPipe, all_well, rank_pipes, run_ranks

INDEX = "model.safetensors.index.json"


def weights(module: nn.Module) -> dict[str, Any]:
    return snapshot(module, None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("layers", [build, build_tied])
@pytest.mark.parametrize("most", [10**9, 150])
def test_what_is_loaded_is_what_was_saved(most: int, layers: Any, partitions: int, tmp_path: Path) -> None:
    pipe = make(layers(), partitions)
    gpipe.save_weights(tmp_path, pipe, max_shard_bytes=most)
    again = make(layers(2), 2)
    gpipe.load_weights(tmp_path, again)
    assert differences(weights(again), weights(pipe)) == []
    if most > 10**6:
        assert names(tmp_path) == ["model.safetensors"]
        assert (tmp_path / "model.safetensors").read_bytes()[8:].startswith(b'{"__metadata__":{"format":"pt"}')
        assert "2.weight" not in load_file(tmp_path / "model.safetensors")  # it is the first's, where layers are tied
        return
    index = json.loads((tmp_path / INDEX).read_text())
    shards = {name: load_file(tmp_path / name) for name in names(tmp_path) if name != INDEX}
    assert index["weight_map"] == {name: file for file, tensors in shards.items() for name in tensors}
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in shards.values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= most or len(tensors) == 1 for size, tensors in zip(sizes, shards.values(), strict=True))
    assert list(shards) == [f"model-{at + 1:05}-of-{len(shards):05}.safetensors" for at in range(len(shards))]


@pytest.mark.parametrize("layers", [build, build_tied])
@pytest.mark.parametrize("replicas", [1, 2])
def test_processes_write_and_read_it_together(replicas: int, layers: Any, tmp_path: Path) -> None:
    whole = make(layers(), 3)
    all_well(run_ranks(lambda own: gpipe.save_weights(tmp_path, own), rank_pipes(whole, replicas)))
    assert len(names(tmp_path)) == 4
    plain = nn.Sequential(*layers(2))
    gpipe.load_weights(tmp_path, plain)
    assert differences(weights(plain), weights(whole)) == []

    def load(own: RankPipe) -> dict[str, Any]:
        gpipe.load_weights(tmp_path, own)
        return weights(own)

    found = all_well(run_ranks(load, rank_pipes(make(layers(3), 2), replicas)))
    assert differences({name: value for own in found for name, value in own.items()}, weights(whole)) == []


@pytest.mark.parametrize("folder", ["exists on the other host", "does not exist there"])
def test_processes_without_a_shared_folder_get_one_clear_message(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug story: the message was that of `os.replace`, of a name with a token that nobody knows."""
    path = tmp_path / "weights"
    if folder == "exists on the other host":
        path.mkdir()
        monkeypatch.setattr(files_of_weights, "write_file", lambda path, data: None)  # rank 0 sees no file
    else:
        monkeypatch.setattr(files_of_weights, "make_folder", lambda path: None)
    found = run_ranks(lambda own: gpipe.save_weights(path, own), rank_pipes(make()))
    errors = [str(each) for each in found if isinstance(each, OSError)]
    assert errors
    assert all(f"folder={path} is not shared by all processes" in text and "gpipe.save" in text for text in errors)
    assert not path.exists() or names(path) == []


def test_what_others_wrote_is_read_under_other_names(tmp_path: Path) -> None:
    plain = nn.Sequential(*build(5))
    state = {f"net.{name}".replace("weight", "kernel"): value for name, value in plain.state_dict().items()}
    parts = list(state.items())
    shards = {"a.safetensors": dict(parts[:3]), "b-2.safetensors": dict(parts[3:]) | {"net.more": torch.ones(2)}}
    for file, tensors in shards.items():
        save_file(tensors, tmp_path / file)
    where = {name: file for file, tensors in shards.items() for name in tensors}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text("{}")
    pipe = make()

    def rename(name: str) -> str:
        return f"net.{name}".replace("weight", "kernel")

    before = weights(pipe)
    with pytest.raises(
        gpipe.CheckpointError, match=r"The files contain net.more, which the model lacks\. Pass rename= or"
    ):
        gpipe.load_weights(tmp_path, pipe, rename=rename)
    with pytest.raises(gpipe.CheckpointError, match=r"The checkpoint lacks 0.weight, 0.bias, .* and 6 more"):
        gpipe.load_weights(tmp_path, pipe)
    assert differences(weights(pipe), before) == []
    gpipe.load_weights(tmp_path, pipe, rename=rename, strict=False)
    assert differences(weights(pipe), weights(plain)) == []


def test_older_weights_are_replaced_and_other_files_stay(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for most in (150, 10**9, 400, 150):
        pipe = make(build(most % 7))
        gpipe.save_weights(tmp_path, pipe, max_shard_bytes=most)
        again = make()
        gpipe.load_weights(tmp_path, again)
        assert differences(weights(again), weights(pipe)) == []
        assert "config.json" in names(tmp_path)
        assert ("model.safetensors" in names(tmp_path)) == (most == 10**9)
        counts = {name.rpartition("-of-")[2] for name in names(tmp_path) if "-of-" in name}
        assert len(counts) == (most != 10**9)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "models--x" / "snapshots" / "1a2b"
    gpipe.save_weights(folder, make(), max_shard_bytes=150)
    return folder


def refused(folder: Path) -> list[str]:
    pipe = make(build(2))
    before = weights(pipe)
    with pytest.raises(gpipe.CheckpointError, match=r"cannot be loaded\. Nothing was changed") as raised:
        gpipe.load_weights(folder, pipe)
    assert differences(weights(pipe), before) == []
    return raised.value.findings


def test_what_is_missing_or_damaged_is_refused(sharded: Path, tmp_path: Path) -> None:
    shards = [path for path in sorted(sharded.iterdir()) if path.name != INDEX]
    assert refused(tmp_path) == [
        f"There is neither model.safetensors nor {INDEX}. Pass the folder that contains one of these files."
    ]
    os.truncate(shards[0], shards[0].stat().st_size - 1)
    shards[2].write_bytes(b"no safetensors")
    (first, second) = refused(sharded)
    assert first.startswith(f"{shards[0].name} is not a valid safetensors file: ")
    assert second.startswith(f"{shards[2].name} is not a valid safetensors file: ")
    shards[2].unlink()
    shards[0].unlink()
    assert refused(sharded) == [f"{path.name} is missing." for path in (shards[0], shards[2])]


def test_an_index_that_is_damaged_or_leads_elsewhere_is_refused(sharded: Path) -> None:
    where = json.loads((sharded / INDEX).read_text())["weight_map"]
    for text in ("", "[]", '{"weight_map": {"0.weight": 3}}', '{"weight_map": []}', "{" * 10**5):
        (sharded / INDEX).write_text(text)
        assert refused(sharded) == [f"{INDEX} is damaged. Download it again."]
    (sharded / INDEX).write_text(json.dumps({"weight_map": {**where, "0.weight": where["5.weight"]}}))
    assert refused(sharded) == [f"0.weight are missing, although {INDEX} lists them. Download all shards again."]
    save_file({"0.weight": torch.ones(6, 4)}, sharded.parent / "secret.safetensors")
    for name in ("../secret.safetensors", "/etc/x.safetensors", "model.bin", "..", "a/b.safetensors"):
        (sharded / INDEX).write_text(json.dumps({"weight_map": {**where, "0.weight": name}}))
        text = f"{INDEX} names {name!r}, which is not a safetensors file in this folder. Do not trust these files."
        assert refused(sharded) == [text]


def test_links_to_files_are_followed(sharded: Path, tmp_path: Path) -> None:
    """The Hub's cache is made of them."""
    shard = sharded / "model-00001-of-00004.safetensors"
    shard.rename(tmp_path / "5f3e")
    shard.symlink_to(tmp_path / "5f3e")
    gpipe.load_weights(sharded, make(build(2)))


def test_what_cannot_be_saved_is_told_at_once(tmp_path: Path) -> None:
    class State(nn.Module):
        def get_extra_state(self) -> Any:
            return 3

        def forward(self, x: Any) -> Any:
            return x

    layers = build()
    layers.append(State())
    layers[0].register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    with pytest.raises(ValueError, match="Nothing was saved") as raised:
        gpipe.save_weights(tmp_path / "new", make(layers), rename=lambda name: name.replace("bias", "weight"))
    assert str(raised.value).splitlines()[1:] == [
        "- 0.bias and another name are renamed to 0.weight. Return different names from rename=.",
        "- 0.wide is of torch.complex128, which safetensors does not support. Convert it.",
        "- 1.bias and another name are renamed to 1.weight. Return different names from rename=.",
        "- 3.0.bias and another name are renamed to 3.0.weight. Return different names from rename=.",
        "- 5.bias and another name are renamed to 5.weight. Return different names from rename=.",
        "- 6._extra_state is not a tensor, which this layout does not support. Use gpipe.save.",
    ]
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_tells_how_it_is_loaded_instead(tmp_path: Path) -> None:
    gpipe.save_weights(tmp_path, make())
    with pytest.raises(gpipe.CheckpointError, match=r"This folder has only weights\. Use gpipe.load_weights"):
        gpipe.load(tmp_path, make())


SIZES = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 96,
    "max_position_embeddings": 64,
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("CausalLM", SIZES),
    "gpt2": ("CausalLM", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96, "n_positions": 64}),
    "gemma": ("CausalLM", SIZES | {"head_dim": 8, "num_key_value_heads": 2}),
    "bert": ("MaskedLM", SIZES),
    "t5": ("Seq2SeqLM", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 96}),
    "resnet": ("ImageClassification", {"embedding_size": 8, "hidden_sizes": [32, 64], "depths": [1, 1]}),
    "mixtral": ("CausalLM", SIZES | {"num_local_experts": 4, "num_key_value_heads": 2}),
}
"""Models of transformers, their own heads tied to the embedding (gpt2, gemma, bert, t5) or not."""


def of_transformers(family: str, seed: int) -> tuple[Any, Any]:
    """A model, and the class that reads it."""
    transformers: Any = pytest.importorskip("transformers")
    transformers.logging.disable_progress_bar()
    task, config = MODELS[family]
    reader = getattr(transformers, f"AutoModelFor{task}")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0} if "vocab_size" in config else {}
        return reader.from_config(transformers.AutoConfig.for_model(family, **config, **tokens)), reader


@pytest.mark.parametrize("most", [10**9, 20_000])
@pytest.mark.parametrize("family", MODELS)
def test_what_transformers_saves_is_read_here_and_what_is_saved_here_by_transformers(
    family: str, most: int, tmp_path: Path
) -> None:
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    (saved, reader), (model, _) = (of_transformers(family, seed) for seed in (0, 1))
    saved.save_pretrained(theirs, max_shard_size=most, save_original_format=False)
    gpipe.load_weights(theirs, model)
    assert differences(weights(model), weights(saved)) == []
    if family in ("gpt2", "gemma"):
        assert model.lm_head.weight is model.get_input_embeddings().weight
    gpipe.save_weights(ours, model, max_shard_bytes=most)
    model.config.save_pretrained(ours)
    read, told = reader.from_pretrained(ours, output_loading_info=True)
    assert differences(weights(read), weights(saved)) == []
    assert not any(told.values()), told
    assert [(folder / INDEX).exists() for folder in (theirs, ours)] == [most == 20_000] * 2


def test_names_that_transformers_saves_otherwise_are_told_with_the_way_round(tmp_path: Path) -> None:
    (saved, reader), (model, _) = (of_transformers("mixtral", seed) for seed in (0, 1))
    saved.save_pretrained(tmp_path)
    with pytest.raises(gpipe.CheckpointError, match=r"The files contain .*experts.* If transformers saved the model"):
        gpipe.load_weights(tmp_path, model)
    gpipe.save_weights(tmp_path / "own", reader.from_pretrained(tmp_path))
    gpipe.load_weights(tmp_path / "own", model)
    assert differences(weights(model), weights(saved)) == []


class Ended(BaseException):
    """The process ends here."""


@pytest.mark.parametrize(("before", "after"), [(10**9, 10**9), (10**9, 150), (150, 10**9), (150, 400), (150, 150)])
def test_an_end_at_any_step_leaves_the_old_weights_or_the_new_ones(
    before: int, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = make(build(2)), make(build(3))
    done, steps = False, 0
    while not done:
        folder, steps = tmp_path / str(steps), steps + 1
        gpipe.save_weights(folder, old, max_shard_bytes=before)
        with monkeypatch.context() as patched:
            left = iter(range(steps - 1))
            for name in ("replace", "unlink"):
                original = getattr(os, name)

                def ending(*paths: Any, original: Any = original, left: Any = left) -> None:
                    if next(left, None) is None:
                        raise Ended
                    original(*paths)

                patched.setattr(os, name, ending)
            try:
                gpipe.save_weights(folder, new, max_shard_bytes=after)
                done = True
            except Ended:
                pass
        again = make(build(4))
        try:
            gpipe.load_weights(folder, again)
            assert any(differences(weights(again), weights(one)) == [] for one in (old, new))
        except gpipe.CheckpointError:  # never a mixture
            if (before, after) != (150, 150):
                raise
    assert steps > 1
    assert differences(weights(again), weights(new)) == []


def test_a_failed_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    gpipe.save_weights(tmp_path, make(build(2)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            gpipe.save_weights(tmp_path, make(build(3)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert names(tmp_path) == ["model.safetensors"]
