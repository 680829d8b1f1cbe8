"""Families of transformers, tiny, that train in milliseconds: to try on all of them what is for any model.

family = FAMILIES[0]
model = build(family, dropout=True)
loss = model(**batch(family)).loss
"""

from collections.abc import Mapping

from tests.families.batches import batch
from tests.families.family import Family, Task, build
from tests.families.senses import SENSES
from tests.families.text import TEXT

__all__ = ["DOZEN", "FAMILIES", "NOT_BUILT", "Family", "Task", "batch", "build", "named"]


FAMILIES: tuple[Family, ...] = (*TEXT, *SENSES)
"""One entry for each model type, by its name in transformers."""

DOZEN: tuple[str, ...] = (
    *("llama", "gpt2", "gemma3_text", "mixtral", "deepseek_v3", "mamba2"),
    *("bert", "deberta-v2", "t5", "whisper", "vit", "swin"),
)
"""Those that differ most, for what is to be quick."""

NOT_BUILT: Mapping[str, str] = {
    **dict.fromkeys(("dinat",), "needs natten"),
    **dict.fromkeys(("gemma3n", "perception_lm", "timm_wrapper"), "needs timm"),
    "layoutlmv2": "needs detectron2",
    "gpt-sw3": "has gpt2's model",
    **dict.fromkeys(("internlm3", "iquestcoder"), "has llama's model"),
    "reformer": "seeds torch's generator by the clock in training, so no two runs are the same",
    "diffllama": "refuses dropout of attention",
    "pp_lcnet": "has no loss",
    **dict.fromkeys(("deit", "levit", "perceiver"), "has several models for its task"),
    "imagegpt": "takes pictures as words",
    **dict.fromkeys(("emu3", "chameleon"), "makes words of pictures by a table of its own"),
    "shieldgemma2": "takes words and pictures for a class",
    "siglip2": "takes patches of a picture with their places",
    **dict.fromkeys(("idefics", "idefics2", "idefics3", "smolvlm"), "takes several pictures a row"),
    **dict.fromkeys(("hyperclovax_vision_v2", "exaone4_5", "mllama", "llava_onevision"), "takes sizes of pictures"),
    **dict.fromkeys(
        """
        bailing_hybrid blt bros cohere_compass_text cvt dbrx dots3_note_text gemma4_assistant granite_speech5_ctc lilt
        markuplm moonshine_streaming musicgen musicgen_melody phi4_multimodal qwen4_exp_text sapiens2 tipsv2_dpt
        zamba2
        """.split(),
        "needs sizes that go together in ways of its own",
    ),
}
"""Model types that are not in the catalogue, and why."""


def named(name: str) -> Family:
    """The family of a name."""
    return next(family for family in FAMILIES if family.name == name)
