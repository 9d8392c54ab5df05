"""What of the vendor's package is called, as it was when it was tested: furiosa-torch 2026.4.0, by parameter names."""

CALLS: dict[str, str | None] = {
    "furiosa.torch:CompileModule.from_module": "m args kwargs compiler_config pass_context task_name",
    "furiosa.torch:Event": "device",
    "furiosa.torch:Event.record": "self stream",
    "furiosa.torch:Event.synchronize": "self",
    "furiosa.torch:current_stream": "device",
    "furiosa.torch:set_fusion": "num_fusion",
    "furiosa.torch:config.CacheConfig.default_cache_dir": "",
    "furiosa.torch:config.cache_context": "root_dir summary ensure failure_link_dir",
    "furiosa.torch:config.get_cpu_fallback": "",
    "furiosa.torch:config.set_cpu_fallback": "fallback",
}
