"""A family of transformers: what it is called, what it is trained for, and how it is built."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig

from tests.families.tiny import tiny_config


class Task(Enum):
    """What a model is trained for: its value names the class of transformers that builds it."""

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
    """A model type of transformers, its task, and what its tiny configuration must say."""

    name: str
    task: Task
    config: Mapping[str, Any] = field(default_factory=dict)


def config_of(family: Family, *, dropout: bool = False) -> PreTrainedConfig:
    return tiny_config(family.name, family.config, dropout=dropout)


def inputs_of(family: Family, config: PreTrainedConfig) -> frozenset[str]:
    """The names of what the model of a family takes."""
    mapping = getattr(transformers, family.task.value)._model_mapping
    model = mapping[type(config)]
    model = model[0] if isinstance(model, tuple) else model
    return frozenset(inspect.signature(model.forward).parameters)


def build(family: Family, *, dropout: bool) -> nn.Module:
    """A seeded model in training mode; with dropout, every probability of it is 0.1."""
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, family.task.value).from_config(config_of(family, dropout=dropout))
    return model.train()
