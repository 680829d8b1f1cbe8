"""A family of transformers: its name, its task, and how to build a tiny model."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from tests.families.tiny import tiny_config

CROSSING = {"is_decoder": True, "add_cross_attention": True}
"""What a decoder that is named apart from its encoder must be told."""


class Task(Enum):
    """The task of a model. Its value names the class of transformers that builds the model."""

    CAUSAL = "AutoModelForCausalLM"
    MASKED = "AutoModelForMaskedLM"
    SEQ2SEQ = "AutoModelForSeq2SeqLM"
    SPEECH_SEQ2SEQ = "AutoModelForSpeechSeq2Seq"
    CTC = "AutoModelForCTC"
    AUDIO = "AutoModelForAudioClassification"
    IMAGE = "AutoModelForImageClassification"
    VIDEO = "AutoModelForVideoClassification"
    SEGMENTATION = "AutoModelForSemanticSegmentation"
    SEQUENCE = "AutoModelForSequenceClassification"
    TOKENS = "AutoModelForTokenClassification"
    ANSWERS = "AutoModelForQuestionAnswering"
    IMAGE_TEXT = "AutoModelForImageTextToText"


@dataclass(frozen=True)
class Family:
    """A model type of transformers, its task, and what its tiny configuration must say.

    `inputs` are the shapes, without rows, of the sounds or pictures it takes, where they are not those of its task.
    """

    name: str
    task: Task
    config: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def plain(task: Task, names: str) -> Iterator[Family]:
    """Returns families that need only the sizes that all families share."""
    return (Family(name, task) for name in names.split())


def sized(task: Task, configs: Mapping[str, Mapping[str, Any]]) -> Iterator[Family]:
    """Returns families with further settings, by name."""
    return (Family(name, task, config) for name, config in configs.items())


def config_of(family: Family, *, dropout: bool = False) -> PreTrainedConfig:
    """Returns the tiny configuration of a family."""
    return tiny_config(family.name, family.config, dropout=dropout)


def model_of(family: Family) -> type[nn.Module]:
    """Returns the class of the model."""
    models = getattr(transformers, family.task.value)._model_mapping
    found: type[nn.Module] = models[type(config_of(family))]
    return found


def inputs_of(family: Family) -> frozenset[str]:
    """Returns the names of the model's inputs."""
    return frozenset(inspect.signature(model_of(family).forward).parameters)


def build(family: Family, *, dropout: bool) -> nn.Module:
    """Returns a seeded model in training mode. With dropout, each of its dropout probabilities is 0.1."""
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, family.task.value).from_config(config_of(family, dropout=dropout))
    return model.train()
