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

REASONS: Mapping[str, str] = {
    "needs natten": "dinat",
    "needs timm": "fast_vlm gemma3n perception_lm timm_wrapper",
    "needs detectron2": "layoutlmv2",
    "has gpt2's model": "gpt-sw3",
    "has llama's model": "internlm3 iquestcoder",
    "seeds torch's generator anew in training, so no two runs are the same": "reformer",
    "refuses dropout of attention": "diffllama",
    "has no loss": "pp_lcnet",
    "cannot be found by its task in transformers 5.23": "deit levit perceiver",
    "takes pictures as words": "imagegpt",
    "makes words of pictures by a table of its own": "chameleon emu3",
    "takes words and pictures for a class": "shieldgemma2",
    "takes words twice": "instructblip",
    "takes a picture by its patches": "fuyu pix2struct siglip2",
    "takes several pictures a row": "idefics idefics2 idefics3 smolvlm",
    "takes the sizes of pictures": "exaone4_5 hyperclovax_vision_v2 lighton_ocr llava_onevision mistral3 mllama",
    "takes sounds among words": """
        audioflamingo3 glmasr granite_speech granite_speech_plus moss_transcribe_diarize musicflamingo qwen2_audio
        voxtral
        """,
    "is too big with the sizes of all, and no others were sought": """
        blt cohere2_vision dots3_note_text florence2 janus llama4 phi4_multimodal qwen3_asr tipsv2_dpt vibevoice
        vibevoice_asr
        """,
    "fails at the sizes that were tried": """
        aria bailing_hybrid bros cohere_compass_text cvt dbrx dia fun_asr_nano gemma4 gemma4_assistant
        gemma4_unified_assistant got_ocr2 granite_docling granite_speech5_ctc kosmos-2 kyutai_speech_to_text lilt
        markuplm moonshine_streaming musicgen musicgen_melody nemo_speechlm qwen4_exp_text sapiens2 voxtral_realtime
        zamba2
        """,
    "is a seq2seq model that the class for that does not know": "udop",
}
NOT_BUILT: Mapping[str, str] = {name: reason for reason, names in REASONS.items() for name in names.split()}
"""Model types that were tried and are not in the catalogue, and why."""


def named(name: str) -> Family:
    """Returns a family by name."""
    return next(family for family in FAMILIES if family.name == name)
