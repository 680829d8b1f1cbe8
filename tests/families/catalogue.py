"""Families of transformers, tiny, that train in milliseconds: to try on all of them what is for any model.

family = FAMILIES[0]
model = build(family, dropout=True)
loss = model(**batch(family)).loss
"""

from collections.abc import Iterator

from tests.families.batches import batch
from tests.families.family import Family, Task, build

__all__ = ["DOZEN", "FAMILIES", "NOT_BUILT", "Family", "Task", "batch", "build", "named"]


def plain(task: Task, names: str) -> Iterator[Family]:
    """Families of which only the sizes that all have need be said."""
    return (Family(name, task) for name in names.split())


LATENT = {"num_key_value_heads": 4}  # attention by latents has a key for every query
LATENT_ROTATED = {**LATENT, "head_dim": 4}  # and calls the rotated part its head
STAGES = {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}
WINDOWS = {"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4, "patch_size": 2}

FAMILIES: tuple[Family, ...] = (
    *plain(
        Task.CAUSAL,
        """
        afmoe apertus arcee aria_text bert-generation biogpt bitnet bloom codegen cohere cohere2 cohere2_moe cpmant
        ctrl cwm deepseek_v4 doge ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon falcon_h1 falcon_mamba flex_olmo
        flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neox
        gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hrm_text
        hy_v3 hy_v4 hyperclovax inkling2_text inkling_text jais2 jamba jetmoe kolibri1 laguna
        lfm2 lfm3 llama llama4_text mamba mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral3
        mistral mixtral modernbert-decoder mpt nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
        persimmon phi phi3 phimoe qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next
        recurrent_gemma rwkv seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma xglm xlnet xlstm
        """,
    ),
    Family("axk1", Task.CAUSAL, LATENT_ROTATED),
    Family("axk2", Task.CAUSAL, LATENT),
    Family("bamba", Task.CAUSAL, {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}),
    Family("deepseek_v2", Task.CAUSAL, {**LATENT_ROTATED, "num_experts_per_tok": 2}),
    Family("deepseek_v3", Task.CAUSAL, LATENT_ROTATED),
    Family("deepseek_v32", Task.CAUSAL, LATENT),
    Family("dots1", Task.CAUSAL, {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    Family(
        "gemma3n_text",
        Task.CAUSAL,
        {
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "intermediate_size": [64] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    Family("glm4_moe_lite", Task.CAUSAL, LATENT),
    Family("glm_moe_dsa", Task.CAUSAL, LATENT),
    Family("gpt_neo", Task.CAUSAL, {"attention_types": [[["global", "local"], 2]], "window_size": 8}),
    Family("granitemoehybrid", Task.CAUSAL, {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1}),
    Family("hunyuan_v1_dense", Task.CAUSAL, {"head_dim": 8}),
    Family("hunyuan_v1_moe", Task.CAUSAL, {"head_dim": 8}),
    Family(
        "lfm2_moe",
        Task.CAUSAL,
        {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
    Family("mamba2", Task.CAUSAL, {"num_heads": 8, "head_dim": 8, "n_groups": 1}),
    Family("minicpm3", Task.CAUSAL, LATENT),
    Family("ministral", Task.CAUSAL, {"head_dim": 8}),
    Family("nemotron", Task.CAUSAL, {"num_key_value_heads": 2, "head_dim": 8}),
    Family("youtu", Task.CAUSAL, LATENT_ROTATED),
    Family(
        "zamba",
        Task.CAUSAL,
        {
            "num_hidden_layers": 6,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "attention_hidden_size": 64,
            "attention_head_dim": 16,
        },
    ),
    Family("zaya", Task.CAUSAL, {"num_experts_per_tok": 1}),
    *plain(
        Task.MASKED,
        """
        albert bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie eurobert
        flaubert fnet gte ibert jina_embeddings_v3 layoutlm longformer megatron-bert mobilebert modernbert
        modernvbert mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer squeezebert
        tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl yoso
        """,
    ),
    Family("esm", Task.MASKED, {"vocab_size": 96, "pad_token_id": 0, "mask_token_id": 4}),
    Family("esmc", Task.MASKED, {"num_key_value_heads": 4}),
    Family("funnel", Task.MASKED, {"block_sizes": [2, 2], "num_decoder_layers": 2, "d_inner": 64}),
    Family("luke", Task.MASKED, {"entity_vocab_size": 16, "entity_emb_size": 16}),
    Family("neomme", Task.MASKED, {"head_dim": 16}),
    Family(
        "roc_bert",
        Task.MASKED,
        {
            "pronunciation_vocab_size": 96,
            "shape_vocab_size": 96,
            "pronunciation_embed_dim": 8,
            "shape_embed_dim": 8,
        },
    ),
    Family("xmod", Task.MASKED, {"languages": ["en"], "default_language": "en"}),
    *plain(
        Task.SEQ2SEQ,
        """
        bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder m2m_100 marian mbart mt5 mvp nllb-moe
        pegasus plbart prophetnet seamless_m4t seamless_m4t_v2 t5gemma t5gemma2 umt5
        """,
    ),
    Family("fsmt", Task.SEQ2SEQ, {"src_vocab_size": 96, "tgt_vocab_size": 96, "langs": ["en", "de"]}),
    Family("longt5", Task.SEQ2SEQ, {"decoder_start_token_id": 0}),
    Family("switch_transformers", Task.SEQ2SEQ, {"decoder_start_token_id": 0}),
    Family("t5", Task.SEQ2SEQ, {"decoder_start_token_id": 0}),
    *plain(Task.IMAGE, "beit data2vec-vision dinov2 dinov2_with_registers ijepa mobilenet_v2 siglip vit vit_msn"),
    Family("bit", Task.IMAGE, {**STAGES, "embedding_size": 8, "num_groups": 4}),
    Family("donut-swin", Task.IMAGE, WINDOWS),
    Family("focalnet", Task.IMAGE, {"embed_dim": 16, "depths": [1, 1, 2, 1], "patch_size": 4}),
    Family("mobilenet_v1", Task.IMAGE, {"depth_multiplier": 0.125}),
    Family(
        "mobilevit",
        Task.IMAGE,
        {
            "image_size": 64,
            "hidden_sizes": [16, 24, 32],
            "neck_hidden_sizes": [8, 8, 8, 16, 16, 16, 32],
            "num_attention_heads": 2,
        },
    ),
    Family("poolformer", Task.IMAGE, STAGES),
    Family("pvt", Task.IMAGE, {**STAGES, "num_attention_heads": [1, 2, 2, 4]}),
    Family("regnet", Task.IMAGE, {**STAGES, "embedding_size": 8, "groups_width": 8}),
    Family("resnet", Task.IMAGE, {**STAGES, "embedding_size": 8, "layer_type": "basic"}),
    Family("segformer", Task.IMAGE, {**STAGES, "num_attention_heads": [1, 2, 2, 4], "decoder_hidden_size": 16}),
    Family("swiftformer", Task.IMAGE, {"embed_dims": [8, 16, 16, 32], "depths": [1, 1, 2, 1]}),
    Family("swin", Task.IMAGE, WINDOWS),
    Family("swinv2", Task.IMAGE, WINDOWS),
)
"""One entry for each model type, by its name in transformers."""

DOZEN: tuple[str, ...] = (
    *("llama", "gpt2", "gemma3_text", "mixtral", "deepseek_v3", "mamba2"),
    *("bert", "deberta-v2", "t5", "bart", "vit", "swin"),
)
"""Those that differ most, for what is to be quick."""

NOT_BUILT: dict[str, str] = {
    "dinat": "needs natten",
    "gemma3n": "needs timm",
    "gpt-sw3": "has gpt2's model",
    "internlm3": "has llama's model",
    "iquestcoder": "has llama's model",
    "reformer": "seeds torch's generator by the clock in training, so no two runs are the same",
    "timm_wrapper": "needs timm",
}
"""Model types that are not in the catalogue, and why."""


def named(name: str) -> Family:
    """The family of a name."""
    return next(family for family in FAMILIES if family.name == name)
