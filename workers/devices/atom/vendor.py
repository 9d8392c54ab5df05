"""What of the vendor's packages is called, as it was when it was tested: optimum-rbln 0.12.0, by parameter names.

`rebel` is closed; of it the names are known, not the signatures.
"""

_MODEL = "optimum.rbln.transformers.models.decoderonly.modeling_decoderonly:RBLNDecoderOnlyModelForCausalLM"
_CONFIG = "optimum.rbln.transformers.models.decoderonly.configuration_decoderonly:RBLNDecoderOnlyModelForCausalLMConfig"
_RUNTIME = "optimum.rbln.transformers.models.decoderonly.decoderonly_runtime_utils:RBLNRuntimeModel"
_CACHE = "optimum.rbln.transformers.cache_utils"
_RUN = (
    "self input_ids inputs_embeds cache_position attention_mask batch_idx block_tables position_embed position_ids"
    " token_type_ids local_block_tables lora_int_ids"
)

#: `module:name` → parameters, or None where only the name is known.
CALLS: dict[str, str | None] = {
    f"{_MODEL}.from_pretrained": "model_id export rbln_config kwargs",
    f"{_MODEL}.from_model": "model config rbln_config model_save_dir subfolder kwargs",
    f"{_MODEL}.compile": "model rbln_compile_config create_runtimes device kwargs",
    f"{_MODEL}.get_compiled_model": "model rbln_config",
    f"{_MODEL}._get_compile_context": "compile_config example_inputs",
    f"{_MODEL}._update_rbln_config": "preprocessors model model_config rbln_config",
    f"{_RUNTIME}.forward": _RUN,
    "optimum.rbln.transformers.models.gemma3.gemma3_runtime_utils:RBLNGemma3RuntimeModel.forward": _RUN,
    "optimum.rbln.configuration_utils:RBLNCompileConfig": "compiled_model_name input_info npu num_devices",
    "optimum.rbln.configuration_utils:RBLNCompileConfig.get_dummy_inputs": "self fill static_tensors meta_tensor_names",
    f"{_CONFIG}.set_compile_cfgs": "self compile_cfgs",
    **{
        f"{_CONFIG}.{name}": None
        for name in (
            *("compile_cfgs", "device_map", "dtype", "use_global_attention", "use_local_attention"),
            "use_bidirectional_prefill",
        )
    },
    f"{_CACHE}:FullAttentionKVCacheMeta": "name layer_index shape dtype is_auto",
    f"{_CACHE}:SlidingWindowAttentionKVCacheMeta": "name layer_index shape dtype",
    "rebel:Runtime": None,
    "rebel:get_npu_name": None,
    "rebel:device_count": None,
    "rebel.kv_cache:aligned_tensor": None,
}
