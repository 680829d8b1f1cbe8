"""Tests that the copies of a model read configurations of transformers as the model does, only faster."""

import copy
from typing import Any

import pytest
import torch

import gpipe
from gpipe.tracing.fast_config import fast_config

transformers: Any = pytest.importorskip("transformers")

KINDS = ("BertConfig", "GPT2Config", "LlamaConfig", "MixtralConfig", "T5Config", "ViTConfig", "WhisperConfig")


def read(config: object, name: str) -> object:
    try:
        value = getattr(config, name)
    except AttributeError as error:
        return str(error)
    return getattr(value, "__func__", value)


@pytest.mark.parametrize("name", KINDS)
def test_every_attribute_is_the_same(name: str) -> None:
    config = getattr(transformers, name)()
    fast: Any = fast_config(config)
    reads: Any = type(fast).__getattribute__
    assert reads is object.__getattribute__, "The configuration is not read faster."
    names = {*dir(config), *vars(config), *config.attribute_map, "missing"} - {"per_layer_config"}  # a new object
    for attribute in sorted(name for name in names if not name.startswith("__")):
        expected, value = read(config, attribute), read(fast, attribute)
        assert value is expected or value == expected, attribute
    assert fast == config == fast
    assert isinstance(fast, type(config))
    assert fast.__class__ is type(config)
    assert copy.deepcopy(fast) == config
    assert repr(fast) == repr(config)


@pytest.mark.parametrize("name", KINDS)
def test_writes_reach_the_configuration(name: str) -> None:
    config = getattr(transformers, name)()
    fast: Any = fast_config(config)
    for attribute, target in config.attribute_map.items():
        setattr(fast, attribute, 7)
        assert getattr(config, target) == getattr(fast, attribute) == 7
    config.added = 1
    assert fast.added == 1
    del fast.added
    assert not hasattr(config, "added")


def test_other_objects_are_not_replaced() -> None:
    kind: type = transformers.LlamaConfig
    inner: Any = kind.__getattribute__
    own = type("Own", (kind,), {"__getattribute__": lambda self, key: inner(self, key)})
    chained = type("Chained", (kind,), {"attribute_map": {"a": "b", "b": "hidden_size"}})
    mixed = transformers.LlamaConfig(per_layer_config={0: {"num_key_value_heads": 2}})
    renamed = transformers.LlamaConfig()
    vars(renamed)["attribute_map"] = {"width": "hidden_size"}
    for value in (own(), chained(), mixed, renamed, transformers.LlamaConfig, torch.nn.Linear(2, 2), torch, len, 3):
        assert fast_config(value) is value


def test_each_step_follows_the_configuration() -> None:
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 3, "head_dim": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        **sizes, **heads, final_logit_softcapping=9.0, pad_token_id=0, use_cache=False
    )
    model = transformers.Gemma3ForCausalLM(config).eval()
    batch = {"input_ids": torch.randint(1, 32, (4, 8)), "labels": torch.randint(1, 32, (4, 8))}
    pipe = gpipe.GPipe(model, 3, 1, sample=batch, driver="lockstep")
    losses = []
    for cap in (9.0, 0.1, 0.01):
        model.config.final_logit_softcapping = cap  # the model reads it after its last block
        if cap == 0.01:
            model.config = copy.deepcopy(model.config)
            model.config.final_logit_softcapping = 0.02
        with torch.no_grad():
            losses.append(pipe.step(batch))
            assert torch.equal(torch.as_tensor(losses[-1]), model(**batch).loss)
    assert len(set(map(float, losses))) == 3
