"""Model types for Megatron, one file each with a rule for every parameter.

A module named like the `model_type` of `config.json` has `NAMES`, parameters of Megatron's `GPTModel` by name (`{}` for
the number of a layer, then of an expert) with the rules of `mapping.py`; and `options(config)`, fields of Megatron's
`TransformerConfig` that differ from those of Llama.
"""
