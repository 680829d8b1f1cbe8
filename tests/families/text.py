"""Families for text only."""

from tests.families.family import CROSSING, Family, Task, plain, sized

LATENT = {"num_key_value_heads": 4}  # attention by latents has a key for every query
LATENT_ROTATED = {**LATENT, "head_dim": 4}  # and calls the rotated part its head
WHOLE = {"attention_type": "original_full"}  # else it is rebuilt at the first short row

TEXT: tuple[Family, ...] = (
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
    *sized(
        Task.CAUSAL,
        {
            "axk1": LATENT_ROTATED,
            "axk2": LATENT,
            "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
            "deepseek_v2": {**LATENT_ROTATED, "num_experts_per_tok": 2},
            "deepseek_v3": LATENT_ROTATED,
            "deepseek_v32": LATENT,
            "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
            "gemma3n_text": {
                "num_kv_shared_layers": 0,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 4,
                "intermediate_size": [64] * 4,
                "activation_sparsity_pattern": [0.0] * 4,
            },
            "glm4_moe_lite": LATENT,
            "glm_moe_dsa": LATENT,
            "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
            "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1},
            "hunyuan_v1_dense": {"head_dim": 8},
            "hunyuan_v1_moe": {"head_dim": 8},
            "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
            "kimi_linear": {**LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "num_experts_per_token": 2},
            "longcat_flash": {**LATENT_ROTATED, "n_routed_experts": 4, "zero_expert_num": 2, "ffn_hidden_size": 64},
            "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
            "minicpm3": LATENT,
            "ministral": {"head_dim": 8},
            "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
            "youtu": LATENT_ROTATED,
            "zamba": {
                "num_hidden_layers": 6,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "attention_hidden_size": 64,
                "attention_head_dim": 16,
            },
            "zaya": {"num_experts_per_tok": 1},
        },
    ),
    *plain(
        Task.MASKED,
        """
        albert bert camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie eurobert
        flaubert fnet gte ibert jina_embeddings_v3 layoutlm megatron-bert modernbert
        modernvbert mpnet mra nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer squeezebert
        tapas ultrabert ultravbert xlm xlm-roberta xlm-roberta-xl yoso
        """,
    ),
    *sized(
        Task.MASKED,
        {
            "big_bird": WHOLE,
            "esm": {"vocab_size": 96, "pad_token_id": 0, "mask_token_id": 4},
            "esmc": {"num_key_value_heads": 4},
            "funnel": {"block_sizes": [2, 2], "num_decoder_layers": 2, "d_inner": 64},
            "longformer": {"attention_window": 8},
            "luke": {"entity_vocab_size": 16, "entity_emb_size": 16},
            "mobilebert": {"embedding_size": 16},
            "neomme": {"head_dim": 16},
            "roc_bert": {
                "pronunciation_vocab_size": 96,
                "shape_vocab_size": 96,
                "pronunciation_embed_dim": 8,
                "shape_embed_dim": 8,
            },
            "xmod": {"languages": ["en"], "default_language": "en"},
        },
    ),
    *plain(
        Task.SEQ2SEQ,
        """
        bart blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp nllb-moe
        pegasus plbart prophetnet seamless_m4t seamless_m4t_v2 t5gemma t5gemma2 umt5
        """,
    ),
    *sized(
        Task.SEQ2SEQ,
        {
            "bigbird_pegasus": WHOLE,
            "encoder-decoder": {"decoder": CROSSING},
            "fsmt": {"src_vocab_size": 96, "tgt_vocab_size": 96, "langs": ["en", "de"]},
            "led": {"attention_window": [8] * 3},
            "longt5": {"decoder_start_token_id": 0, "local_radius": 4},
            "pegasus_x": {"block_size": 4, "num_global_tokens": 4},
            "switch_transformers": {"decoder_start_token_id": 0},
            "t5": {"decoder_start_token_id": 0},
        },
    ),
    *plain(Task.SEQUENCE, "canine"),
    *plain(Task.TOKENS, "openai_privacy_filter"),
    Family("layoutlmv3", Task.TOKENS, {"coordinate_size": 5, "shape_size": 6, "visual_embed": False}),
    *plain(Task.ANSWERS, "splinter"),
)
