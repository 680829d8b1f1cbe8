"""Configurations of transformers made tiny, by the names that sizes have in them.

A family's own configuration class says which of the names it has; those that stand in its entry of the catalogue
come before these.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

WIDTH, INNER, LAYERS, HEADS, VOCABULARY, POSITIONS = 32, 64, 4, 4, 96, 64
PADDING, BEGIN, END, FIRST_WORD = 0, 1, 2, 3
HALF = 3  # the layers of an encoder that has a decoder, and those of the decoder
IMAGE, PATCH, BINS = 32, 8, 8
PROBABILITY = 0.1

SIZES: Mapping[str, Any] = {
    name: value
    for value, names in (
        (
            WIDTH,
            """
            hidden_size d_model n_embd dim emb_dim embedding_size embed_dim lru_width word_embed_proj_dim
            encoder_hidden_size decoder_hidden_size projection_dim out_hidden_size attention_hidden_size
            classifier_proj_size output_hidden_size
            """,
        ),
        (
            INNER,
            """
            intermediate_size intermediate_size_mlp d_ff dim_ff ffn_dim hidden_dim encoder_ffn_dim decoder_ffn_dim
            mlp_dim encoder_intermediate_size decoder_intermediate_size
            """,
        ),
        (LAYERS, "num_hidden_layers n_layer n_layers num_layers depth"),
        (HALF, "encoder_layers decoder_layers num_encoder_layers num_decoder_layers"),
        (
            HEADS,
            """
            num_attention_heads n_head n_heads num_heads attention_heads encoder_attention_heads
            decoder_attention_heads num_encoder_attention_heads num_decoder_attention_heads
            encoder_num_attention_heads decoder_num_attention_heads
            """,
        ),
        (2, "num_key_value_heads swa_num_key_value_heads linear_num_key_heads linear_num_value_heads index_n_heads"),
        (
            8,
            "head_dim d_kv d_head v_head_dim qk_nope_head_dim swa_head_dim linear_key_head_dim linear_value_head_dim",
        ),
        (8, "kv_lora_rank q_lora_rank index_head_dim"),
        (4, "qk_rope_head_dim rotary_dim index_topk"),
        (VOCABULARY, "vocab_size vocab_size_per_layer_input unpadded_vocab_size"),
        (
            POSITIONS,
            """
            max_position_embeddings original_max_position_embeddings n_positions max_seq_len context_length
            max_source_positions max_target_positions model_max_length
            """,
        ),
        (8, "sliding_window sliding_window_size local_attention attention_chunk_size chunk_size mamba_chunk_size"),
        (8, "mamba_d_state state_size ssm_state_size mamba_dt_rank time_step_rank"),
        (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_per_layer"),
        (2, "num_experts_per_tok moe_topk moe_num_active_experts moe_k n_group"),
        (1, "topk_group first_k_dense_replace"),
        (
            16,
            """
            moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
            moe_shared_expert_intermediate_size shared_intermediate_size
            """,
        ),
        (BINS, "num_mel_bins"),
        (IMAGE, "image_size"),
        (PATCH, "patch_size"),
        (PADDING, "pad_token_id"),
        (BEGIN, "bos_token_id cls_token_id decoder_start_token_id"),
        (END, "eos_token_id sep_token_id"),
        (None, "forced_eos_token_id"),
        (0.0, "router_jitter_noise input_jitter_noise jitter_noise mask_time_prob mask_feature_prob"),
        (False, "use_cache apply_spec_augment"),
    )
    for name in names.split()
}
"""The value for each name, where a configuration has a value of the same kind by that name."""

UNSET = frozenset({"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"})
"""Names that are also given where the configuration's own value is None."""

LAYER_DROP = re.compile(r"layerdrop|layer_drop|path_dropout")


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def fits(name: str, value: object, own: object) -> bool:
    """Whether a size can replace the value of a setting."""
    if own is None:
        return name in UNSET
    return value is None or (is_number(value) and is_number(own)) or isinstance(own, type(value))


def shrunk(own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sizes for the settings of a configuration and of its inner configurations."""
    sizes = {name: SIZES[name] for name in own if name in SIZES and fits(name, SIZES[name], own[name])}
    inner = {
        name: {"model_type": value["model_type"], **shrunk(value)}
        for name, value in own.items()
        if isinstance(value, dict) and "model_type" in value
    }
    return sizes | inner


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two nested mappings. `above` has precedence."""
    both = {
        name: merged(below[name], value)
        for name, value in above.items()
        if isinstance(value, Mapping) and isinstance(below.get(name), Mapping)
    }
    return {**below, **above, **both}


def tiny_config(name: str, config: Mapping[str, Any], *, dropout: bool) -> PreTrainedConfig:
    """The tiny configuration of a model type, under what is said of it."""
    own = AutoConfig.for_model(name).to_dict()
    tiny = AutoConfig.for_model(name, **merged(shrunk(own), config))
    for part in configs_in(tiny):
        give_dropout(vars(part), PROBABILITY if dropout else 0.0)
        if hasattr(part, "use_cache"):  # some set that of their parts when they are made
            part.use_cache = False
    return tiny


def configs_in(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    """Returns a configuration and its inner configurations."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from configs_in(value)


def give_dropout(values: dict[str, Any], probability: float) -> None:
    """Sets every dropout probability of a configuration, except layer drop, which becomes 0."""
    for name, own in values.items():
        if isinstance(own, dict):
            give_dropout(own, probability)
        elif isinstance(name, str) and "drop" in name:  # labels have numbers for names
            chosen = 0.0 if LAYER_DROP.search(name) else probability
            if is_number(own):
                values[name] = chosen
            elif isinstance(own, list | tuple) and all(map(is_number, own)):
                values[name] = type(own)(chosen for _ in own)
