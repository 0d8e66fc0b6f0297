"""Model sizes that the benchmarks share."""

SIZES: dict[str, dict[str, int]] = {
    "3m": {"hidden_size": 256, "intermediate_size": 704, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2},
    "30m": {
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_layers": 10,
        "num_heads": 8,
        "num_kv_heads": 4,
    },
    "120m": {
        "hidden_size": 768,
        "intermediate_size": 2560,
        "num_layers": 16,
        "num_heads": 12,
        "num_kv_heads": 4,
    },
}
"""Keys of config.model.BuildSpec; about 3, 30 and 120 million parameters."""
